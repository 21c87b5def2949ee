"""The selector: scores, walk and cached proposal of a draft, in one kernel.

    python -m bench.walk [--out DIR] [--upstream FOLDER_WITH_VLLM_0.33.0]

Needs a vLLM 0.27.1 that this tool was applied to. Correctness against float32 comes first. "upstream"
is three kernels of 0.33.0: the scores of every candidate after every other ("edges alone"), the walk over
them and the cache. "torch" is the same greedy walk in PyTorch.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
from vllm.v1.worker.gpu.spec_decode.dflash2.walk import walk

from bench._common import empty_kernel_time, load_upstream, require_gpu, time_graph, upstream_file, write

VOCAB = 248320
CASES = [(batch, 16, 256, 7) for batch in (1, 2, 4, 8, 16, 32, 64, 128)]
CASES += [(8, k, 256, 7) for k in (4, 32, 64)] + [(8, 16, 64, 7), (8, 16, 256, 15)]
SETS = 8  # drafts of different candidates, so that a codebook row is as cold as in a serve


def inputs(batch, k, rank, steps):
    """One draft's worth of random inputs, and the slots it is cached in."""
    rows = batch * steps
    ids = torch.randint(0, VOCAB // k, (rows, k), device="cuda") * k + torch.arange(k, device="cuda")
    return {
        "draft_tokens": torch.zeros(batch, steps, dtype=torch.int64, device="cuda"),
        "candidate_ids": ids,
        "unary": torch.randn(rows, k, device="cuda"),
        "projected": torch.randn(rows, rank, device="cuda", dtype=torch.bfloat16),
        "anchors": torch.randint(0, VOCAB, (batch,), device="cuda", dtype=torch.int32),
        "idx_mapping": torch.arange(batch, device="cuda", dtype=torch.int32).repeat_interleave(steps),
        "sample_pos": torch.arange(rows, device="cuda"),
        "temperature": (torch.arange(batch, device="cuda") % 2 * 0.7).float(),
        "seeds": torch.arange(batch, device="cuda"),
    }


def shared(batch, k, rank, steps):
    """The codebooks and the cached proposal."""
    books = [torch.randn(VOCAB, rank, device="cuda", dtype=torch.bfloat16) / rank**0.5 for _ in range(2)]
    return {
        "predecessor_codebook": books[0],
        "successor_codebook": books[1],
        "proposal": SparseProposal.empty(batch, steps, k, VOCAB, torch.device("cuda")),
    }


def torch_scores(draft, common, step, token):
    """Scores [batch, K] of one step in float32, after each request's `token`."""
    steps = draft["draft_tokens"].shape[1]
    ids = draft["candidate_ids"].view(-1, steps, draft["unary"].shape[1])[:, step]
    projected = draft["projected"].view(len(ids), steps, -1)[:, step].float()
    gate = common["predecessor_codebook"][token].float() * projected
    successors = common["successor_codebook"][ids].float()
    return ids, draft["unary"].view(len(ids), steps, -1)[:, step] + torch.einsum("bkr,br->bk", successors, gate)


def torch_walk(draft, common):
    """The greedy walk in PyTorch."""
    token = draft["anchors"].long()
    for step in range(draft["draft_tokens"].shape[1]):
        ids, scores = torch_scores(draft, common, step, token)
        token = ids.gather(1, scores.argmax(1, keepdim=True))[:, 0]
        draft["draft_tokens"][:, step] = token


def check(case):
    """What is cached are the candidates and their scores / T after the token that was drawn before them."""
    common = shared(*case)
    for _ in range(2):
        draft = inputs(*case)
        walk(**draft, **common)
        token = draft["anchors"].long()
        temperature = torch.where(draft["temperature"] == 0, 1.0, draft["temperature"])[:, None]
        for step in range(case[3]):
            ids, scores = torch_scores(draft, common, step, token)
            assert torch.equal(common["proposal"].ids[:, step], ids)
            torch.testing.assert_close(common["proposal"].scores[:, step], scores / temperature, rtol=1e-3, atol=1e-3)
            token = draft["draft_tokens"][:, step]
            drawn = scores.gather(1, (ids == token[:, None]).int().argmax(1, keepdim=True))[:, 0]
            greedy = draft["temperature"] == 0
            assert bool((ids == token[:, None]).any(1).all()), "a token that was no candidate"
            assert bool((drawn >= scores.max(1).values - 1e-3)[greedy].all()), "greedy did not take the best"


def upstream_selector(folder):
    """0.33.0's kernel for the edges and its class for walk and cache, from their files."""
    gpu = folder / "vllm/v1/worker/gpu"
    beam = folder / "vllm/models/beam/nvidia"
    _, edges = load_upstream(beam / "dflash2_ops.py", "_candidate_edges_kernel", "candidate_edges")
    spec = importlib.util.spec_from_file_location("upstream_gumbel", upstream_file(gpu / "sample/gumbel.py"))
    gumbel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gumbel)
    _, _, sampler = load_upstream(
        gpu / "spec_decode/dflash2/speculator.py",
        "_selector_walk_kernel",
        "_cache_draft_logits_kernel",
        "CandidateSampler",
        gumbel_noised_argmax=gumbel.gumbel_noised_argmax,
        spec_step_seed=gumbel.spec_step_seed,
    )
    return edges, sampler


def measure(case, upstream):
    batch, k, rank, steps = case
    common, drafts = shared(*case), [inputs(*case) for _ in range(SETS)]
    row = {"batch": batch, "K": k, "rank": rank, "S": steps}
    row["ours"] = time_graph([lambda d=d: walk(**d, **common) for d in drafts])
    truncation = tuple(torch.full((batch,), value, device="cuda") for value in (k, 0.9, 0.0))
    row["ours, top-p"] = time_graph([lambda d=d: walk(**d, **common, truncation=truncation) for d in drafts])
    row["torch"] = time_graph([lambda d=d: torch_walk(d, common) for d in drafts])
    row["upstream"] = row["upstream, edges alone"] = None
    if upstream is None:
        return row
    edges, make_sampler = upstream
    sampler = make_sampler(batch, steps, k, torch.device("cuda"))
    draft_logits = torch.full((batch, steps, VOCAB), float("-inf"), device="cuda")

    def score(d):
        return edges(
            common["predecessor_codebook"],
            common["successor_codebook"],
            d["candidate_ids"].view(batch, steps, k),
            d["unary"].view(batch, steps, k),
            d["projected"].view(batch, steps, rank),
            d["anchors"],
            k,
        )

    def select(d):
        names = ("sample_pos", "idx_mapping", "temperature", "seeds", "draft_tokens")
        arguments = {name: d[name] for name in names} | {"draft_logits": draft_logits, "use_fp64": False}
        sampler.sample(d["candidate_ids"].view(batch, steps, k), score(d), batch, **arguments)

    row["upstream"] = time_graph([lambda d=d: select(d) for d in drafts])
    row["upstream, edges alone"] = time_graph([lambda d=d: score(d) for d in drafts])
    return row


def plot(axes, rows):
    rows = [row for row in rows if (row["K"], row["rank"], row["S"]) == (16, 256, 7)]
    for name in ("ours", "torch", "upstream", "upstream, edges alone"):
        if rows[0][name] is not None:
            axes.plot([row["batch"] for row in rows], [row[name] for row in rows], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="µs", title="Selector: walk, scores and cached q")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for walk.md, walk.json and walk.png")
    parser.add_argument("--upstream", type=Path, help="folder that holds vllm 0.33.0, unpacked from its wheel")
    args = parser.parse_args()
    require_gpu()
    upstream = upstream_selector(args.upstream) if args.upstream else None
    for case in CASES:
        check(case)
    print(
        f"{len(CASES)} of {len(CASES)} cases within rounding of float32; an empty kernel {empty_kernel_time():.2f} µs"
    )
    rows = [measure(case, upstream) for case in CASES]
    write(args.out, "walk", {"One draft, µs": rows}, lambda axes: plot(axes, rows))


if __name__ == "__main__":
    main()
