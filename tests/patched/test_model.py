"""The installed modules, without an engine: imports, registry, configs, and the walk against float32."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import _site
import patches
from tests.support import lossless, reference, transcription
from tests.support.trees import REPO

GOOD = {
    "mask_token_id": 257,
    "target_layer_ids": [0, 2, 3],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 32,
    "selector_top_k": 16,
}
# key, a value that cannot be served (None: the key is left out)
BAD = [
    *((key, None) for key in GOOD),
    ("conv_group_size", 24),
    ("conv_group_size", 0),
    ("conv_kernel_size", 0),
    ("selector_top_k", 321),
    ("selector_top_k", 0),
    ("selector_top_k", -1),
    ("selector_rank", 0),
    ("mask_token_id", 320),
    ("mask_token_id", -1),
    ("target_layer_ids", []),
    ("output_multiplier", 0.0),
    ("output_multiplier", -1.0),
    ("use_aux_hidden_state", False),
]
MODULES = sorted(
    file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for file in {
        *(hunk.file for patch in patches.PATCHES for hunk in patch.hunks),
        *_site.list_installed(REPO, patches.INSTALLED).values(),
    }
)


@pytest.mark.parametrize("module", MODULES)
def test_every_touched_module_imports(module):
    importlib.import_module(module)


def test_every_touched_module_imports_without_triton(run_patched):
    """A CPU server has no Triton, and must not fall over the kernels that it never runs."""
    code = f"""
import importlib
for module in {MODULES}:
    importlib.import_module(module)
from vllm.triton_utils import HAS_TRITON
print("triton", HAS_TRITON)
"""
    assert run_patched(code).stdout.endswith("triton False\n")


def test_registry_resolves_the_architecture():
    from vllm.model_executor.models.registry import ModelRegistry

    found = ModelRegistry._try_load_model_cls("DFlash2DraftModel")
    assert (found.__module__, found.__name__) == (
        "vllm.model_executor.models.qwen3_dflash2",
        "DFlash2Qwen3ForCausalLM",
    )


@pytest.mark.parametrize("key, value", BAD)
def test_a_bad_config_is_refused_by_key_and_value(key, value):
    from vllm.transformers_utils.configs.dflash2 import DFlash2Config

    given = {**GOOD, key: value} if value is not None else {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(ValueError) as error:
        DFlash2Config.from_hf_config(SimpleNamespace(dflash_config=given, hidden_size=256, vocab_size=320))
    assert f"dflash_config.{key}" in str(error.value)
    assert ("is missing" if value is None else repr(value)) in str(error.value)


def walk_inputs(requests, steps, k, rank, vocab, seed=0):
    """Random arguments of `walk` for as many requests in as many slots, by name."""
    g = torch.Generator().manual_seed(seed)
    rows = requests * steps

    def randn(*shape):
        return torch.randn(shape, generator=g)

    # Candidates with a stride, as the k best of several ranks' are.
    ids = torch.stack([torch.randperm(vocab, generator=g)[: k + 1] for _ in range(rows)])[:, :k]
    return {
        "draft_tokens": torch.zeros(requests, steps, dtype=torch.int64),
        "candidate_ids": ids,
        "unary": randn(rows, k + 1)[:, :k],
        "projected": randn(rows, rank) / rank**0.5,
        "predecessor_codebook": randn(vocab, rank),
        "successor_codebook": randn(vocab, rank),
        "anchors": torch.randint(0, vocab, (requests,), generator=g, dtype=torch.int32),
        "idx_mapping": torch.arange(requests, dtype=torch.int32).repeat_interleave(steps),
        "sample_pos": 100 + torch.arange(steps).repeat(requests),
        "temperature": torch.zeros(requests),
        "seeds": torch.arange(requests) + 3,
        "ids": torch.zeros(requests, steps, k, dtype=torch.int64),
        "scores": torch.full((requests, steps, k), -torch.inf),
    }


def walked(given, **others):
    """The arguments after the walk has run, and the proposal as rows of the vocabulary."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
    from vllm.v1.worker.gpu.spec_decode.dflash2.walk import walk

    vocab = len(given["predecessor_codebook"])
    cached = {name: given[name] for name in ("ids", "scores")}
    walk(
        **{name: value for name, value in given.items() if name not in (*cached, "draft_logits")},
        proposal=SparseProposal(**cached, vocab_size=vocab),
        **others,
    )
    rows = torch.full((*given["ids"].shape[:2], vocab), -torch.inf)
    return given | {"draft_logits": rows.scatter_reduce_(2, given["ids"], given["scores"], "amax")}


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


@pytest.mark.parametrize("steps, k, rank", [(1, 1, 8), (3, 3, 12), (4, 5, 32), (2, 16, 20)])
def test_greedy_walk_takes_the_best_candidate_at_each_step(steps, k, rank):
    """K and rank with and without powers of two, one step and several."""
    given = walked(walk_inputs(2, steps, k, rank, 40))
    for request in range(2):
        ids = given["candidate_ids"][request * steps :][:steps]
        best = ids.gather(1, reference_walk(given, request).argmax(1, keepdim=True))
        assert given["draft_tokens"][request].tolist() == best[:, 0].tolist()


@pytest.fixture(scope="module")
def sampled_walks():
    """Two rounds in the same slots at several temperatures; the second leaves nothing of the first."""
    first = walk_inputs(3, 2, 3, 8, 40)
    first["temperature"] = torch.tensor([0.0, 0.6, 1.3])
    walked(first)
    second = walk_inputs(3, 2, 3, 8, 40, seed=1)
    kept = {name: first[name] for name in ("temperature", "ids", "scores")}
    return walked(second | kept)


def test_the_cache_holds_what_the_token_was_drawn_from_and_nothing_else(sampled_walks):
    given = sampled_walks
    for request, temperature in enumerate(given["temperature"].tolist()):
        wanted = torch.full_like(given["draft_logits"][request], -torch.inf)
        ids = given["candidate_ids"][request * 2 :][:2]
        wanted.scatter_(1, ids, reference_walk(given, request) / (temperature or 1.0))
        torch.testing.assert_close(given["draft_logits"][request], wanted, atol=1e-5, rtol=1e-5)


def test_the_dense_form_is_the_sparse_one_in_rows_of_the_vocabulary():
    """Two rounds that also keep the dense form."""
    dense = torch.full((3, 2, 40), -torch.inf)
    first = walk_inputs(3, 2, 3, 8, 40)
    first["temperature"] = torch.tensor([0.0, 0.6, 1.3])
    walked(first, draft_logits=dense)
    second = walk_inputs(3, 2, 3, 8, 40, seed=1) | {name: first[name] for name in ("ids", "scores")}
    assert torch.equal(walked(second, draft_logits=dense)["draft_logits"], dense)


def test_the_proposal_leaves_out_what_the_requests_top_k_top_p_and_min_p_do():
    """One greedy request and four sampled ones: top-k 2, top-p 0.5, min-p 0.6, and all three at nothing."""
    given = walk_inputs(5, 2, 8, 8, 40)
    given["temperature"] = torch.tensor([0.0, 1.0, 1.0, 0.7, 1.0])
    truncation = (
        torch.tensor([1, 2, 40, 40, 40], dtype=torch.int32),
        torch.tensor([0.1, 1.0, 0.5, 1.0, 1.0]),
        torch.tensor([0.9, 0.0, 0.0, 0.6, 0.0]),
    )
    given = walked(given, truncation=truncation)
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


def test_the_walk_draws_from_softmax_of_scores_over_temperature(sampled_walks):
    given = sampled_walks
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


def test_nothing_that_is_lost_leaves_the_vocabulary_or_the_distribution():
    """NaN and infinite scores, ids and anchors past the vocabulary, and a padded request."""
    given = walk_inputs(4, 2, 4, 8, 40)
    given["temperature"] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    given["unary"][0:2] = torch.nan
    given["unary"][2] = torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf])
    given["candidate_ids"][4:6] = torch.tensor([40, 41, -1, 7])
    given["anchors"][2] = 40
    given["idx_mapping"][6:] = -1
    given = walked(given)
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


def test_the_walk_reads_only_the_chosen_predecessors_rows():
    """Every predecessor row that it has no business with is NaN."""
    clean = walked(walk_inputs(1, 3, 5, 8, 40))
    dirty = walk_inputs(1, 3, 5, 8, 40)
    needed = [int(dirty["anchors"][0]), *clean["draft_tokens"][0, :-1].tolist()]
    unneeded = torch.ones(40, dtype=torch.bool)
    unneeded[needed] = False
    dirty["predecessor_codebook"][unneeded] = torch.nan
    assert torch.equal(clean["draft_tokens"], walked(dirty)["draft_tokens"])
