"""A drafter's weights: whole at the start, any part of them later, and what a checkpoint may hold besides."""

from pathlib import Path

import pytest
import torch

PROBES = Path(__file__).with_name("drafter_weights.py")


@pytest.fixture(scope="module")
def found(run_patched, tmp_path_factory):
    """{probe: what it found}, see drafter_weights.py."""
    out = tmp_path_factory.mktemp("weights") / "out.pt"
    run_patched(PROBES, out, env={"VLLM_LOGGING_LEVEL": "ERROR"})
    return torch.load(out)


def test_what_is_derived_from_weights_follows_their_parts(found):
    """Two tensors per call, as trainers synchronise; then everything is what starting with them makes it."""
    probe = found["parts"]
    assert torch.equal(probe["after"], probe["wanted"])
    assert not torch.allclose(probe["after"], probe["before"], atol=1e-2)
    assert len(probe["same"]) > 20 and all(probe["same"].values()), probe["same"]


def test_it_follows_a_reload(found):
    """In a reload the weights are nowhere until its end, and on a CPU they are packed behind it."""
    probe = found["reloaded"]
    torch.testing.assert_close(probe["after"], probe["wanted"], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(probe["after"], probe["before"], atol=1e-2)


@pytest.mark.parametrize("case", ["later, one of 36", "later, none", "identity maps"])
def test_taken(found, case):
    assert found["faults"][case] is None


@pytest.mark.parametrize(
    "case, says",
    [
        ("start, one missing", "layers.0.self_attn.k_proj.weight is missing"),
        ("later, unknown", "layers.9.mlp.up_proj.weight is not a DFlash2 tensor"),
        ("later, misshapen", "layers.0.self_attn.k_proj.weight has shape (127, 256), config.json asks for (128, 256)"),
        ("t2d", "t2d maps tokens to others"),
        ("d2t", "d2t maps tokens to others"),
        ("short t2d", "t2d maps tokens to others"),
        ("embedding", "embed_tokens.weight has shape (100, 256), config.json asks for (320, 256)"),
    ],
)
def test_refused_by_name(found, case, says):
    assert says in (found["faults"][case] or "taken")


@pytest.mark.parametrize(
    "case, embedding, head",
    [
        ("none", True, True),
        ("the target's", True, True),
        ("an embedding", False, True),
        ("a head", True, False),
    ],
)
def test_a_checkpoints_own_vocabulary(found, case, embedding, head):
    """Shared where it has none or the target's, its own otherwise; and the target's is never written to."""
    probe = found["vocabulary"][case]
    assert probe["shared"] == (embedding, head)
    assert probe["right"] == [True, True]
    assert probe["target kept"] and probe["later taken"] == (not embedding)


@pytest.mark.parametrize("case", ["a tensor", "a dict"])
def test_mask_embedding_takes_the_mask_tokens_place_in_the_drafter_only(found, case):
    probe = found["mask_embeddings"]
    assert torch.equal(probe[case], torch.stack([probe["own"], probe["table"][1]]))
    assert torch.equal(probe["none"], probe["table"]) and torch.equal(probe["target"], probe["table"])


@pytest.mark.parametrize(
    "case, says",
    [("of another token", "mask_token_id"), ("too short", "mask_embedding.pt has 100 elements, hidden_size is 256")],
)
def test_a_mask_embedding_that_does_not_fit(found, case, says):
    assert says in found["mask_embeddings"][case]


def test_dummy_weights_start_on_a_cpu(found):
    """Its linear layers have packed their weights away before anything is derived from them."""
    probe = found["dummies"]
    torch.testing.assert_close(probe["projected"], probe["wanted"], atol=1e-6, rtol=1e-4)
    assert probe["started"]
