"""Verification of a probabilistic draft: from K candidates, and from rows of the vocabulary.

    python -m bench.rejection [--out DIR]

Needs a vLLM 0.27.1 that this tool was applied to. Both forms first have to emit the same tokens for the same
seeds. The dense form is vLLM's own; goal: 0.6 of its time at batch 32.
"""

import argparse
from pathlib import Path

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from bench._common import require_gpu, time_graph, write

VOCAB, STEPS, K = 248320, 7, 16
BATCHES = (1, 8, 32, 256)
# Chunks of logits that vLLM verifies at a time are at most 1 GiB of float32: 138 requests of these.
CHUNK = 2**30 // 4 // VOCAB // (STEPS + 1)


def inputs(batch, dtype):
    """(arguments of rejection_sample after the first two, target logits, proposal): every other token is likely."""
    rows = batch * (STEPS + 1)
    proposal = SparseProposal.empty(batch, STEPS, K, VOCAB, torch.device("cuda"))
    proposal.ids.copy_(torch.randint(0, VOCAB // K, proposal.ids.shape, device="cuda") * K)
    proposal.ids.add_(torch.arange(K, device="cuda"))
    proposal.scores.copy_(torch.randn(proposal.scores.shape, device="cuda"))
    target = torch.randn(rows, VOCAB, device="cuda", dtype=dtype)
    drafted = proposal.ids.gather(2, torch.randint(0, K, (batch, STEPS, 1), device="cuda"))[..., 0]
    target.view(batch, STEPS + 1, VOCAB)[:, :STEPS].scatter_(2, proposal.ids, (proposal.scores + 12).to(dtype))
    tokens = torch.nn.functional.pad(drafted, (1, 0)).flatten()
    slots = torch.arange(batch, device="cuda", dtype=torch.int32)
    within = torch.arange(STEPS + 1, device="cuda", dtype=torch.int32)
    arguments = (
        tokens,
        torch.arange(batch + 1, device="cuda", dtype=torch.int32) * (STEPS + 1),
        (100 + torch.arange(rows, device="cuda")),
        slots,
        slots.repeat_interleave(STEPS + 1),
        within.repeat(batch),
        torch.ones(batch, device="cuda"),
        torch.arange(batch, device="cuda") + 11,
        STEPS,
    )
    return arguments, target, proposal


def rows_of(proposal):
    """The proposal as [batch, S, vocab_size], -inf but for its candidates."""
    rows = torch.full((*proposal.ids.shape[:2], VOCAB), float("-inf"), device="cuda")
    return rows.scatter_(2, proposal.ids, proposal.scores)


def measure(batch, dtype, block):
    requests = min(batch, CHUNK)
    arguments, target, proposal = inputs(requests, dtype)
    dense = rows_of(proposal)
    options = {"use_block_verification": block}
    wanted, count = rejection_sample(target, dense, *arguments, **options)
    got, got_count = proposal.rejection_sample(target, proposal, *arguments, **options)
    kept = torch.arange(STEPS + 1, device="cuda") < count[:, None]
    assert torch.equal(count, got_count) and torch.equal(wanted[kept], got[kept]), "the two forms emit other tokens"
    slow = time_graph([lambda: rejection_sample(target, dense, *arguments, **options)], least=4)
    fast = time_graph([lambda: proposal.rejection_sample(target, proposal, *arguments, **options)], least=4)
    chunks = batch / requests
    return {
        "batch": batch,
        "logits": str(dtype).removeprefix("torch."),
        "method": "block" if block else "standard",
        "accepted": (count.float().mean() - 1).item(),
        "dense, µs": slow * chunks,
        "sparse, µs": fast * chunks,
        "ratio": fast / slow,
        "dense, MiB": batch * STEPS * VOCAB * 4 / 2**20,
        "sparse, MiB": batch * STEPS * K * 12 / 2**20,
    }


def plot(axes, rows):
    rows = [row for row in rows if row["method"] == "standard" and row["logits"] == "float32"]
    for name in ("dense, µs", "sparse, µs"):
        axes.plot([row["batch"] for row in rows], [row[name] for row in rows], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="µs", title="Verification, S 7, K 16, V 248,320")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for rejection.md, rejection.json and rejection.png")
    args = parser.parse_args()
    require_gpu()
    cases = [
        (batch, dtype, block)
        for block in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
        for batch in BATCHES
    ]
    rows = [measure(*case) for case in cases]
    write(args.out, "rejection", {"One verification": rows}, lambda axes: plot(axes, rows))


if __name__ == "__main__":
    main()
