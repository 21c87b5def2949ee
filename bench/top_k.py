"""Top-k over the vocabulary: ours, torch.topk, FlashInfer's radix top-k, and the time to read the logits.

    python -m bench.top_k [--out DIR] [--sweep] [--flashinfer]

Newest upstream (0.33.0) has no kernel of its own here: it calls FlashInfer if that is installed
and torch.topk elsewhere. Times are microseconds per call, replayed as a CUDA graph, over input sets
that do not stay in L2 ("in L2": over one set, as right after the LM head wrote it).
"""

import argparse
from pathlib import Path

import torch

from bench._common import (
    copy_bandwidth,
    empty_kernel_time,
    precompile,
    require_gpu,
    rotations,
    time_graph,
    write,
)
from tests.support.kernels import load_kernels
from tests.support.kernels.top_k import BIG, SMALL, Case, check

STEPS = 7  # rows per request
SHAPES = [
    *((batch, 248320, 16, torch.bfloat16) for batch in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((32, 248320, k, torch.bfloat16) for k in (4, 8, 32, 64)),
    *((1, 248320, k, torch.bfloat16) for k in (4, 32, 64)),
    *((32, vocab, 16, torch.bfloat16) for vocab in (151936, 202048)),
    *((batch, 248320, 16, torch.float32) for batch in (1, 32)),
]
TILES = {  # piece, group, sets, slots, warps
    16: [
        (16384, 128, 64, 32, 8), (16384, 128, 64, 32, 16), (16384, 128, 64, 32, 4), (32768, 128, 64, 32, 16),
        (8192, 128, 64, 32, 8), (16384, 128, 32, 32, 8), (16384, 256, 64, 32, 8), (16384, 64, 64, 64, 8),
    ],
    64: [(16384, 32, 128, 128, 8), (16384, 32, 128, 128, 16), (16384, 64, 128, 128, 8), (8192, 32, 128, 128, 8)],
}  # fmt: skip
PIECES = {1: (1,), 8: (2, 4, 8), 32: (4, 8, 16), 64: (4, 8, 16)}  # batch: pieces per program


def compile_one(job):
    """In a process of its own: compiles what one shape or check needs."""
    _rows, vocab, k, dtype, valid, stride, tile = job
    top_k = load_kernels("top_k")
    logits = torch.zeros(1, vocab + stride, dtype=dtype, device="cuda")[:, :vocab]
    top_k.launch(logits, k, valid, top_k.Tile(*tile) if tile else top_k.choose_tile(k))
    torch.cuda.synchronize()


def jobs(cases, tiles):
    """One job per compilation: what is specialised on is the tile, the number of groups and divisibility by 16."""
    found = {}
    wanted = [(1, c.vocab, c.k, c.dtype, c.valid or c.vocab, c.stride, None) for c in cases]
    wanted += [(1, v, k, dtype, v, 0, None) for _, v, k, dtype in SHAPES]
    wanted += [(1, 248320, k, torch.bfloat16, 248320, 0, tile) for k, tile in tiles]
    for job in wanted:
        _, vocab, k, dtype, valid, stride, tile = job
        key = (k > 16, max(12, (valid - 1).bit_length()), valid % 16 == 0, (vocab + stride) % 16 == 0, dtype, tile)
        found.setdefault(key, job)
    return list(found.values())


def input_sets(rows, vocab, dtype):
    count = rotations(rows * vocab * dtype.itemsize)
    return [torch.randn(rows, vocab, device="cuda").mul_(4).to(dtype) for _ in range(count)]


def time_ours(top_k, sets, k, tile, pieces=None):
    vocab = sets[0].shape[1]
    counters = top_k.Counters()
    return time_graph([lambda x=x: top_k.launch(x, k, vocab, tile, counters, pieces) for x in sets])


def measure(top_k, shape, bandwidth, flashinfer):
    batch, vocab, k, dtype = shape
    rows = batch * STEPS
    sets = input_sets(rows, vocab, dtype)
    floor = rows * vocab * dtype.itemsize / bandwidth * 1e6
    ours = time_ours(top_k, sets, k, top_k.choose_tile(k))
    torch_time = time_graph([lambda x=x: torch.topk(x, k) for x in sets], replays=5, least=4)
    radix = flashinfer and time_graph([lambda x=x: flashinfer(x, k, sorted=True, deterministic=True) for x in sets])
    return {
        "batch": batch,
        "rows": rows,
        "vocabulary": vocab,
        "K": k,
        "dtype": str(dtype).removeprefix("torch."),
        "ours": ours,
        "in L2": time_ours(top_k, sets[:1], k, top_k.choose_tile(k)),
        "torch.topk": torch_time,
        "FlashInfer": radix or None,
        "read once": floor,
        "ours / read": ours / floor,
        "torch / ours": torch_time / ours,
    }


def sweep(top_k, tiles):
    """Microseconds of each tile at batch 1, 8, 32 and 64, by pieces per program."""
    rows = {batch: input_sets(batch * STEPS, 248320, torch.bfloat16) for batch in PIECES}
    return [
        {"K": k, **top_k.Tile(*tile)._asdict()}
        | {
            f"batch {b} by {p}": time_ours(top_k, sets, k, top_k.Tile(*tile), p)
            for b, sets in rows.items()
            for p in PIECES[b]
        }
        for k, tile in tiles
    ]


def import_flashinfer(wanted):
    if not wanted:
        print("FlashInfer not timed: pass --flashinfer (its top_k compiles for minutes the first time)")
        return None
    try:
        from flashinfer import top_k
    except ImportError as error:
        print(f"FlashInfer not timed: {error}")
        return None
    return top_k


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for top_k.md, top_k.json and top_k.png")
    parser.add_argument("--sweep", action="store_true", help="also time every candidate tile")
    parser.add_argument("--flashinfer", action="store_true", help="also time FlashInfer's radix top-k")
    args = parser.parse_args()
    require_gpu()
    tiles = [(k, tile) for k, row in TILES.items() for tile in row] if args.sweep else []
    cases = SMALL + BIG
    precompile(compile_one, jobs(cases, tiles))
    top_k = load_kernels("top_k")
    tile_cases = [(Case("", 14, 248320, k, kind="special"), top_k.Tile(*tile)) for k, tile in tiles]
    wrong = {c.name: w for c in cases if (w := check(top_k, c, "cuda"))}
    wrong |= {str((c.k, tile)): w for c, tile in tile_cases if (w := check(top_k, c, "cuda", tile))}
    for name, what in wrong.items():
        print(f"WRONG {name}: {what[0][:300]}")
    print(f"{len(cases) + len(tile_cases) - len(wrong)} of {len(cases) + len(tile_cases)} cases exact")
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; an empty kernel {empty_kernel_time():.2f} us")
    flashinfer = import_flashinfer(args.flashinfer)
    results = [measure(top_k, shape, bandwidth, flashinfer) for shape in SHAPES]
    sections = {"Top-k of the logits, µs": results}
    if tiles:
        sections["Tiles, µs"] = sweep(top_k, tiles)
    write(args.out, "top_k", sections, lambda axes: plot(axes, results))
    return 1 if wrong else 0


def plot(axes, results):
    shown = [r for r in results if (r["vocabulary"], r["K"], r["dtype"]) == (248320, 16, "bfloat16")]
    for name, style in (("torch.topk", "s-"), ("FlashInfer", "^-"), ("ours", "o-"), ("read once", "k--")):
        if shown[0][name] is not None:
            axes.loglog([r["batch"] for r in shown], [r[name] for r in shown], style, label=name)
    axes.set(xlabel="requests of 7 rows", ylabel="µs", title="Top 16 of 248,320 bf16 logits")


if __name__ == "__main__":
    raise SystemExit(main())
