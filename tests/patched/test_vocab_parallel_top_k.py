"""LogitsProcessor.get_top_k_tokens over simulated tensor-parallel shards, against a sort of all logits."""

from typing import NamedTuple

import pytest
import torch

from tests.support.trees import REPO


class Case(NamedTuple):
    """One sharded head. `kind`: how its logits are made, see `logits_of`."""

    vocab: int
    tp: int
    k: int
    kind: str = "normal"
    scale: float = 1.0
    soft_cap: float | None = None
    rows: int = 3


SOUND = [
    Case(320, 1, 16),
    Case(320, 2, 16),
    Case(320, 4, 16),
    Case(301, 4, 7),  # padding in the last shard
    Case(33, 4, 16),  # a shard of one token, and one of padding alone
    Case(33, 4, 33),
    Case(320, 4, 16, "ties"),
    Case(320, 4, 16, "one value"),
    Case(320, 4, 16, "minus infinity"),
    Case(33, 4, 20, "minus infinity"),
    Case(320, 4, 16, "NaN"),
    Case(320, 4, 16, scale=0.196, soft_cap=2.0),
    Case(320, 1, 16, scale=3.0),
]
BAD = {
    Case(320, 1, 16, scale=0.0): "positive logit scale, got 0.0",
    Case(320, 1, 16, scale=-1.0): "positive logit scale, got -1.0",
    Case(320, 1, 0): "between 1 and the vocabulary size 320, got 0",
    Case(320, 1, -1): "between 1 and the vocabulary size 320, got -1",
    Case(320, 4, 321): "between 1 and the vocabulary size 320, got 321",
}
CASES = [*SOUND, *BAD]


def logits_of(case):
    """[rows, vocab] bf16, the same in every process."""
    x = torch.randn(case.rows, case.vocab, generator=torch.Generator().manual_seed(case.vocab + case.k))
    if case.kind == "ties":
        x = x.round()
    if case.kind == "one value":
        x = torch.full_like(x, -1.5)
    if case.kind == "minus infinity":
        x[:, 5:] = float("-inf")
    if case.kind == "NaN":
        x[0], x[1, ::3] = float("nan"), float("nan")
    return x.to(torch.bfloat16)


def expected(case):
    """Ids by falling logit, equal ones by rising id; then scale, then cap."""
    x = logits_of(case).float()
    x = torch.where(x.isnan(), float("-inf"), x)
    order = sorted_ids(x)[:, : case.k]
    scores = x.gather(1, order) * case.scale
    return order, scores if case.soft_cap is None else torch.tanh(scores / case.soft_cap) * case.soft_cap


def sorted_ids(x):
    return torch.tensor([sorted(range(x.shape[1]), key=lambda i: (-row[i], i)) for row in x.tolist()])


@pytest.fixture(scope="module")
def found(run_patched, tmp_path_factory):
    """{case: what get_top_k_tokens gave}"""
    out = tmp_path_factory.mktemp("top_k") / "out.pt"
    run_patched(REPO / "tests/patched/top_k_probes.py", out)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_the_best_of_all_shards(found, case):
    ids, scores, sent = found[case]
    wanted_ids, wanted_scores = expected(case)
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-6, atol=1e-6)
    assert sent == (2 * case.k if case.tp > 1 else 0)  # k (score, id) pairs a row, not the vocabulary


@pytest.mark.parametrize("case", BAD, ids=str)
def test_refused(found, case):
    assert BAD[case] in found[case]
