"""What test_vocab_parallel_top_k.py runs against the patched vLLM: every rank of a sharded head, in turn.

top_k_probes.py OUT    OUT is read with torch.load: {case: (ids, scores, elements sent a row) or the error}
"""

import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import logits_processor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding, pad_vocab_size

from tests.patched.test_vocab_parallel_top_k import CASES, logits_of


def shard_heads(case):
    """The head of each rank: vLLM's own shard indices, and logits with tempting padding behind the shard."""
    padded = pad_vocab_size(case.vocab, 64)
    logits = logits_of(case)
    for rank in range(case.tp):
        indices = VocabParallelEmbedding._get_indices(padded, padded, case.vocab, case.vocab, rank, case.tp)
        own = logits[:, indices.org_vocab_start_index : indices.org_vocab_end_index]
        padding = torch.full((len(logits), padded // case.tp - own.shape[1]), 99.0, dtype=logits.dtype)
        padded = torch.cat([own, padding], 1)
        method = SimpleNamespace(apply=lambda head, hidden, bias=None, padded=padded: padded.clone())
        yield SimpleNamespace(tp_size=case.tp, shard_indices=indices, quant_method=method)


def run(case):
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


def attempt(case):
    try:
        return run(case)
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    torch.save({case: attempt(case) for case in CASES}, sys.argv[1])
