"""Verification from a sparse proposal emits what vLLM's own dense form emits, token for token."""

import pytest
import torch

SLOTS, REQUESTS = 8, 6


def batch(steps, k, vocab, placeholders):
    """Requests with any number of drafts in any slot, greedy ones among them; targets that often agree."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal

    torch.manual_seed(0)
    proposal = SparseProposal(
        torch.stack([torch.randperm(vocab)[:k] for _ in range(SLOTS * steps)]).view(SLOTS, steps, k),
        torch.randn(SLOTS, steps, k),
        vocab,
    )
    counts = torch.randint(0, steps + 1, (REQUESTS,))
    counts[0] = steps
    slots = torch.randperm(SLOTS)[:REQUESTS].int()
    proposal.reset(int(slots[1]))
    rows = [(request, step) for request in range(REQUESTS) for step in range(int(counts[request]) + 1)]
    target = torch.randn(len(rows), vocab)
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    for row, (request, step) in enumerate(rows):
        slot = slots[request]
        if step < counts[request]:
            target[row, proposal.ids[slot, step]] += proposal.scores[slot, step].clamp(min=-5) + 7
        if step:
            q = proposal.scores[slot, step - 1].softmax(-1)
            tokens[row] = proposal.ids[slot, step - 1, torch.multinomial(q, 1)]
            if placeholders and step > 1:
                tokens[row] = -1
    requests, within = torch.tensor(rows).T
    arguments = (
        tokens,
        torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0)).int(),
        100 * requests + within,
        slots,
        slots[requests],
        within.int(),
        torch.tensor([0.0, 0.3, 0.6, 1.0, 1.4, 0.8, 0.0, 1.0]),
        torch.randint(-(2**62), 2**62, (SLOTS,)),
        steps,
    )
    return target, proposal, arguments


def compare(target, proposal, arguments, rates=None, **options):
    """How many drafts both forms accept."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    dense = torch.full((*proposal.ids.shape[:2], proposal.vocab_size), -torch.inf)
    dense.scatter_reduce_(2, proposal.ids, proposal.scores, "amax")
    wanted, number = rejection_sample(target, dense, *arguments, rates, **options)
    got, got_number = proposal.rejection_sample(target, proposal, *arguments, rates, **options)
    kept = torch.arange(wanted.shape[1]) < number[:, None]
    assert torch.equal(number, got_number)
    assert torch.equal(wanted[kept], got[kept])
    return int(number.sum()) - REQUESTS


@pytest.mark.parametrize("placeholders", [False, True])
@pytest.mark.parametrize("steps, k, vocab", [(1, 4, 50), (3, 5, 1500), (7, 16, 9000), (15, 16, 320)])
@pytest.mark.parametrize("block", [False, True])
def test_sparse_verification_emits_what_the_dense_one_does(block, steps, k, vocab, placeholders):
    accepted = compare(*batch(steps, k, vocab, placeholders), use_block_verification=block)
    assert accepted or steps == 1 or placeholders, "nothing was accepted: this case shows little"


OPTIONS = {
    "float64 noise": {"use_fp64": True},
    "synthetic": {"rates": torch.linspace(0.9, 0.2, 7)},
    "padded vocabulary": {},
    "bfloat16": {},
    "NaN": {},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_sparse_verification_with(case):
    target, proposal, arguments = batch(7, 16, 320, False)
    if case == "padded vocabulary":
        target = torch.nn.functional.pad(target, (0, 40), value=-torch.inf)
    if case == "bfloat16":
        target = target.bfloat16()
    if case == "NaN":
        target[3], target[4, 5] = torch.nan, torch.nan
    compare(target, proposal, arguments, **OPTIONS[case])
