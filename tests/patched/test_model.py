"""The installed modules, without an engine: imports, registry, configs, and the walk against float32."""

from types import SimpleNamespace

import pytest
import torch

from tests.support import lossless, reference, transcription
from tests.support.trees import REPO

PROBES = REPO / "tests/patched/model_probes.py"


@pytest.fixture(scope="module")
def found(run_patched, tmp_path_factory):
    """{probe: what it found}, see model_probes.py."""
    out = tmp_path_factory.mktemp("probes") / "out.pt"
    run_patched(PROBES, out, interpret=True)
    return torch.load(out, weights_only=False)


def test_every_touched_module_imports(found):
    assert found["imports"] == {}


def test_every_touched_module_imports_without_triton(run_patched):
    """A CPU server has no Triton, and must not fall over the kernels that it never runs."""
    code = """
import importlib, sys, types
import tests.support
sys.modules["tests.support.interpret"] = tests.support.interpret = types.ModuleType("interpret")
from tests.patched import model_probes
for module in model_probes.touched_modules():
    importlib.import_module(module)
from vllm.triton_utils import HAS_TRITON
print("triton", HAS_TRITON)
"""
    assert run_patched(code).stdout.endswith("triton False\n")


def test_registry_resolves_the_architecture(found):
    assert found["registry"] == "vllm.model_executor.models.qwen3_dflash2.DFlash2Qwen3ForCausalLM"


def test_a_bad_config_is_refused_by_key_and_value(found):
    assert len(found["refusals"]) > 15
    for key, value, error in found["refusals"]:
        assert error and f"dflash_config.{key}" in error, f"{key} = {value}: {error}"
        assert ("is missing" if value is None else repr(value)) in error, f"{key} = {value}: {error}"


def reference_walk(given, request):
    """Scores [S, K] along the tokens that the walk chose, in float32."""
    steps = given["draft_tokens"].shape[1]
    rank = given["projected"].shape[1]
    # The walk gets the projected states, so the projection of the reference is the identity.
    selector = SimpleNamespace(
        weights={
            "candidate_selector.hidden_projection.weight": torch.eye(rank),
            "candidate_selector.predecessor_codebook": given["predecessor_codebook"],
            "candidate_selector.successor_codebook": given["successor_codebook"],
        }
    )
    previous, scores = int(given["anchors"][request]), []
    for step in range(steps):
        row = request * steps + step
        ids, unary = given["candidate_ids"][row], given["unary"][row]
        scores.append(reference.edge_scores(selector, given["projected"][row], ids, unary, previous))
        previous = int(given["draft_tokens"][request, step])
    return torch.stack(scores)


def test_greedy_walk_takes_the_best_candidate_at_each_step(found):
    for given in found["greedy_walks"]:
        requests, steps = given["draft_tokens"].shape
        for request in range(requests):
            ids = given["candidate_ids"][request * steps :][:steps]
            best = ids.gather(1, reference_walk(given, request).argmax(1, keepdim=True))
            assert given["draft_tokens"][request].tolist() == best[:, 0].tolist()


def test_the_cache_holds_what_the_token_was_drawn_from_and_nothing_else(found):
    given = found["sampled_walks"]
    for request, temperature in enumerate(given["temperature"].tolist()):
        wanted = torch.full_like(given["draft_logits"][request], -torch.inf)
        ids = given["candidate_ids"][request * 2 :][:2]
        wanted.scatter_(1, ids, reference_walk(given, request) / (temperature or 1.0))
        torch.testing.assert_close(given["draft_logits"][request], wanted, atol=1e-5, rtol=1e-5)


def test_the_dense_form_is_the_sparse_one_in_rows_of_the_vocabulary(found):
    dense, sparse = found["dense_walks"]
    assert torch.equal(dense, sparse)


def test_the_proposal_leaves_out_what_the_requests_top_k_top_p_and_min_p_do(found):
    given = found["truncated_walks"]
    scores = [reference_walk(given, request) / t for request, t in enumerate((1.0, 1.0, 1.0, 0.7, 1.0))]
    kept = [torch.ones(2, 8, dtype=torch.bool) for _ in scores]
    kept[1] = scores[1] >= scores[1].topk(2).values[:, -1:]
    ranked, order = scores[2].softmax(-1).sort(-1, descending=True)
    kept[2].scatter_(1, order, ranked.cumsum(-1) - ranked < 0.5)
    kept[3] = scores[3].softmax(-1) >= 0.6 * scores[3].softmax(-1).max(-1, keepdim=True).values
    assert all((~mask).sum() > 0 for mask in kept[1:4]), "nothing to leave out"
    for request, (score, mask) in enumerate(zip(scores, kept, strict=True)):
        wanted = score.masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(given["scores"][request], wanted, atol=1e-5, rtol=1e-5)
        for step, token in enumerate(given["draft_tokens"][request].tolist()):
            assert token in given["ids"][request, step][mask[step]].tolist()


def transcribed(given):
    """Tokens and scores of the NumPy walk, for counting; lossless.py says what it stands for."""
    requests, steps = given["draft_tokens"].shape
    shaped = {
        name: given[name].numpy().reshape(requests, steps, -1) for name in ("candidate_ids", "unary", "projected")
    }
    return transcription.walk(
        shaped["candidate_ids"],
        shaped["unary"],
        shaped["projected"],
        given["predecessor_codebook"].numpy(),
        given["successor_codebook"].numpy(),
        given["anchors"].long().numpy(),
        given["seeds"].numpy(),
        given["sample_pos"].numpy().reshape(requests, steps),
        given["temperature"].numpy(),
    )


def test_the_walk_draws_from_softmax_of_scores_over_temperature(found):
    given = found["sampled_walks"]
    tokens, _ = transcribed(given)
    assert tokens.tolist() == given["draft_tokens"].tolist(), "the transcription is not the kernel"
    samples = 100_000
    for request, temperature in enumerate(given["temperature"].tolist()):
        if temperature == 0:
            continue
        ids = given["candidate_ids"][request * 2].numpy()
        many = {
            "draft_tokens": torch.zeros(samples, 1),
            "candidate_ids": torch.from_numpy(ids).repeat(samples, 1),
            "unary": given["unary"][request * 2].repeat(samples, 1),
            "projected": given["projected"][request * 2].repeat(samples, 1),
            "anchors": given["anchors"][request].repeat(samples),
            "seeds": torch.arange(samples),
            "sample_pos": torch.full((samples,), 100),
            "temperature": torch.full((samples,), temperature),
        }
        drawn, _ = transcribed(given | many)
        counts = (drawn == ids).sum(0)
        q = given["draft_logits"][request, 0, ids].double().softmax(0).numpy()
        assert lossless.chi_square(counts, q) > 1e-3, (counts / samples, q)
        # The test can tell: the same draws do not fit the raw scores.
        raw = (given["draft_logits"][request, 0, ids] * temperature).double().softmax(0).numpy()
        assert lossless.chi_square(counts, raw) < 1e-6


def test_nothing_that_is_lost_leaves_the_vocabulary_or_the_distribution(found):
    given = found["lost_rows"]
    vocab = given["draft_logits"].shape[-1]
    assert ((given["draft_tokens"] >= 0) & (given["draft_tokens"] < vocab)).all()
    for request in range(3):
        q = given["draft_logits"][request].softmax(-1)
        assert q.isfinite().all() and torch.allclose(q.sum(-1), torch.ones(2))
        for step, token in enumerate(given["draft_tokens"][request].tolist()):
            assert q[step, token] > 0
    # +inf beats everything, NaN nothing.
    assert given["draft_tokens"][1, 0] == given["candidate_ids"][2, 2]
    # A padded request writes to no slot.
    assert (given["scores"][3] == -torch.inf).all() and (given["ids"][3] == 0).all()


def test_the_walk_reads_only_the_chosen_predecessors_rows(found):
    clean, dirty = found["poisoned_rows"]
    assert torch.equal(clean, dirty)
