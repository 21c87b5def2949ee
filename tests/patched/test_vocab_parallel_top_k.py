"""LogitsProcessor.get_top_k_tokens over simulated tensor-parallel shards, against a sort of all logits."""

from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import logits_processor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding, pad_vocab_size


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


def logits_of(case):
    """[rows, vocab] bf16"""
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


def shard_heads(case):
    """The head of each rank: vLLM's own shard indices, and logits with tempting padding behind the shard."""
    padded = pad_vocab_size(case.vocab, 64)
    logits = logits_of(case)
    for rank in range(case.tp):
        indices = VocabParallelEmbedding._get_indices(padded, padded, case.vocab, case.vocab, rank, case.tp)
        own = logits[:, indices.org_vocab_start_index : indices.org_vocab_end_index]
        padding = torch.full((len(logits), padded // case.tp - own.shape[1]), 99.0, dtype=logits.dtype)
        whole = torch.cat([own, padding], 1)
        method = SimpleNamespace(apply=lambda head, hidden, bias=None, whole=whole: whole.clone())
        yield SimpleNamespace(tp_size=case.tp, shard_indices=indices, quant_method=method)


def top_k(case):
    """Ids, scores and how many elements a row sends, of the last rank of a sharded head; every rank runs in turn."""
    with set_current_vllm_config(VllmConfig()):
        processor = logits_processor.LogitsProcessor(case.vocab, scale=case.scale, soft_cap=case.soft_cap)
    heads, hidden, sent = list(shard_heads(case)), torch.zeros(case.rows, 8), []

    def rank(head, gather):
        with patch.object(logits_processor, "tensor_model_parallel_all_gather", gather):
            return processor.get_top_k_tokens(head, hidden, case.k)

    if case.tp == 1:
        return (*rank(heads[0], None), 0)
    for head in heads:  # what each rank sends does not depend on what it receives
        rank(head, lambda own, dim: sent.append(own) or torch.cat([own] * case.tp, dim))
    return (*rank(heads[-1], lambda own, dim: torch.cat(sent, dim)), sent[0].shape[1])


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_the_best_of_all_shards(case):
    ids, scores, sent = top_k(case)
    wanted_ids, wanted_scores = expected(case)
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-6, atol=1e-6)
    assert sent == (2 * case.k if case.tp > 1 else 0)  # k (score, id) pairs per row, not the vocabulary


@pytest.mark.parametrize("case", BAD, ids=str)
def test_refused(case):
    with pytest.raises(ValueError, match=BAD[case]):
        top_k(case)
