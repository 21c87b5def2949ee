"""Beam's drafter in an engine: it drafts as the Qwen3 one does, and as float32 says where its scores are scaled."""

import json

import pytest
import torch

from tests.support import reference
from tests.support.beam import BEAM, LAYERS, SCALED, STEPS
from tests.support.pair import write_pair
from tests.support.trees import TINY

pytestmark = pytest.mark.engine


def beam_draft(folder):
    """A folder with the tiny drafter, its architecture string changed and nothing else."""
    config = json.loads((TINY / "draft/config.json").read_text()) | {"architectures": [BEAM]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(TINY / "draft/model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engine(run_engine):
    """engine(target, draft, prompts, tokens, steps) -> one greedy run, see tests/support/engine.py."""

    def run(target, draft, prompts, tokens, steps):
        return run_engine(
            target=target,
            draft=draft,
            prompts=prompts,
            runs=[{"temperature": 0, "max_tokens": tokens}],
            speculative={"num_speculative_tokens": steps},
        )["runs"][0]

    return run


@pytest.fixture(scope="module")
def tiny_runs(engine, tmp_path_factory):
    """Two prompts x 24 tokens with the trained drafter, as Beam and as Qwen3."""
    prompts = json.loads((TINY / "prompts.json").read_text())["prompts"][:2]
    drafts = beam_draft(tmp_path_factory.mktemp("beam")), TINY / "draft"
    return [engine(TINY / "target", draft, prompts, 24, 7) for draft in drafts]


def test_the_architecture_string_changes_no_draft(tiny_runs):
    beam, qwen3 = tiny_runs
    assert len(beam["drafts"]) > 5
    for ours, theirs in zip(beam["drafts"], qwen3["drafts"], strict=True):
        assert (ours["anchor"], ours["position"], ours["tokens"]) == (
            theirs["anchor"],
            theirs["position"],
            theirs["tokens"],
        )
        assert torch.equal(ours["ids"], theirs["ids"]) and torch.equal(ours["unary"], theirs["unary"])


def test_text_and_acceptance_are_the_qwen3_drafters(tiny_runs):
    beam, qwen3 = tiny_runs
    assert beam["num_accepted"] > 0
    for key in ("texts", "num_drafts", "num_accepted"):
        assert beam[key] == qwen3[key]


@torch.no_grad()
def test_scaled_and_capped_drafts_match_float32(engine, tmp_path):
    """input_embedding_scale, output_multiplier and final_logit_softcapping, one draft at a time."""
    folder = tmp_path / "pair"
    write_pair(folder, SCALED, architectures=[BEAM], **LAYERS)
    prompt = torch.randint(0, 148, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    run = engine(folder / "target", folder / "draft", [prompt], 6, STEPS)
    t, d = reference.load(folder / "target"), reference.load(folder / "draft")
    ids = prompt + run["texts"][0]
    context = reference.target_forward(t, torch.tensor(ids), SCALED["target_layer_ids"])[1]
    drafts = [draft for draft in run["drafts"] if draft["position"] < len(ids)]
    assert len(drafts) > 1
    for draft in drafts:
        at = draft["position"]
        wanted = reference.draft_block(d, t, ids[at], at, context[:at], STEPS, path=draft["tokens"])
        torch.testing.assert_close(draft["unary"], wanted[2], atol=1e-3, rtol=0)
        assert draft["tokens"] == reference.draft_block(d, t, ids[at], at, context[:at], STEPS)[0]
