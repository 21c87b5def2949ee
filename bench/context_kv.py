"""Context K/V after the projection, on a GPU: K-norm, RoPE and the scatter into every layer's pages.

    python -m bench.context_kv [--out DIR] [--upstream DIR]

Correctness over the whole sweep comes first, against float32. Then microseconds per call, replayed as a
CUDA graph, at the dimensions of Qwen3.8-27B's drafter (5 layers, 8 KV heads of 128), for decode steps
(batch × 8 rows) and prefills:

    ours      one kernel for all layers
    0.27.1    what it replaces: a transposing copy, a norm, a rope and a cache write per layer, with vLLM's
              own kernels (needs the CUDA build of vLLM in this Python)
    upstream  vLLM 0.33.0's fused kernel (needs --upstream, a folder that holds its vllm/)
    floor     every value read once and written once at this card's copy bandwidth, or an empty kernel

The projection itself, one GEMM for all layers, is the same for all and is not in the times.
"""

import argparse
from pathlib import Path

import torch

from bench._common import (
    copy_bandwidth,
    empty_kernel_time,
    load_upstream,
    require_gpu,
    rotations,
    time_graph,
    write,
)
from tests.support.kernels import context_kv as reference
from tests.support.kernels import load_kernels

LAYERS, HEADS, HEAD_DIM, PAGE = 5, 8, 128, 16
STEP = 8  # rows of a request in a decode step: S + 1
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILLS = (512, 2048, 8192)
EPS = 1e-6
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


class Inputs:
    """One set of inputs and caches for n tokens; ``bytes`` is what a call has to move."""

    def __init__(self, tokens: int, dtype: torch.dtype, module):
        width = LAYERS * 2 * HEADS * HEAD_DIM
        blocks = 2 * tokens // PAGE + 2
        self.kv = torch.randn(tokens, width, device="cuda").bfloat16()
        self.weights = torch.rand(LAYERS, HEAD_DIM, device="cuda").bfloat16() + 0.5
        self.cos_sin = torch.randn(tokens + 4096, HEAD_DIM, device="cuda").bfloat16()
        self.positions = torch.arange(tokens, device="cuda") + 4000
        self.slots = torch.randperm(blocks * PAGE, device="cuda")[:tokens]
        self.scales = [torch.tensor(0.02, device="cuda") for _ in range(2 * LAYERS)]
        shape = (blocks, PAGE, HEADS, 2 * HEAD_DIM)
        self.caches = [torch.zeros(shape, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(LAYERS)]
        views = [cache.transpose(1, 2).split(HEAD_DIM, dim=-1) for cache in self.caches]
        self.keys, self.values = [k for k, _ in views], [v for _, v in views]
        self.pages = module.page_table(self.keys, self.values, self.scales[:LAYERS], self.scales[LAYERS:], dtype)
        pairs = zip(self.scales[:LAYERS], self.scales[LAYERS:], strict=True)
        self.cache_pointers = torch.tensor([cache.data_ptr() for cache in self.caches], device="cuda")
        self.scale_pointers = torch.tensor([scale.data_ptr() for pair in pairs for scale in pair], device="cuda")
        self.bytes = self.kv.numel() * (self.kv.element_size() + dtype.itemsize)


def ours(module):
    def call(x: Inputs) -> None:
        module.store_context_kv(x.kv, x.weights, EPS, x.positions, x.cos_sin, x.slots, None, x.pages)

    return call


def vllm_0_27_1():
    """The path of 0.27.1 with its own kernels, or None if its CUDA build is not installed."""
    try:
        from vllm import _custom_ops as ops

        torch.ops._C_cache_ops.reshape_and_cache_flash  # noqa: B018
    except (ImportError, AttributeError) as error:
        print(f"no column for vLLM 0.27.1: {error}")
        return None

    def call(x: Inputs) -> None:
        tokens = x.kv.shape[0]
        kv = x.kv.view(tokens, LAYERS, 2, HEADS, HEAD_DIM).permute(2, 1, 0, 3, 4).contiguous()
        keys = torch.empty_like(kv[0])
        ops.rms_norm(keys, kv[0], x.weights, EPS)
        flat = keys.view(LAYERS * tokens, HEADS * HEAD_DIM)
        ops.rotary_embedding(x.positions.repeat(LAYERS), flat, None, HEAD_DIM, x.cos_sin, True)
        kind = "fp8" if x.keys[0].dtype.itemsize == 1 else "auto"
        for layer in range(LAYERS):
            k_cache, v_cache = (c[layer].view(torch.uint8) if kind == "fp8" else c[layer] for c in (x.keys, x.values))
            torch.ops._C_cache_ops.reshape_and_cache_flash(
                keys[layer], kv[1][layer], k_cache, v_cache, x.slots, kind, x.scales[layer], x.scales[LAYERS + layer]
            )

    return call


def upstream(folder: Path):
    """vLLM 0.33.0's fused kernel, called as its Beam drafter calls it."""
    path = folder / "vllm" / "models" / "beam" / "nvidia" / "dflash2_context_ops.py"
    _, store = load_upstream(path, "_context_kv_kernel", "store_context_kv")

    def call(x: Inputs) -> None:
        store(
            x.kv.view(-1, LAYERS, 2, HEADS, HEAD_DIM),
            x.weights,
            x.positions,
            x.cos_sin,
            x.cache_pointers,
            x.slots,
            x.caches[0],
            EPS,
            x.scale_pointers if x.caches[0].dtype.itemsize == 1 else None,
        )

    return call


def check_all(module) -> str:
    """Run the float32 table of the tests; SystemExit names what is wrong."""
    cases = reference.SMALL + reference.BIG
    sizes = [STEP * batch for batch in BATCHES] + list(PREFILLS)
    cases += [reference.Case(f"n = {n}", LAYERS, HEADS, HEAD_DIM, n, PAGE) for n in sizes]
    for case in cases:
        wrong = reference.check(module, case, "cuda")
        if wrong:
            raise SystemExit(f"error: {case.name}: {'; '.join(wrong)}")
    return f"{len(cases)} cases agree with float32"


def measure(calls: dict, tokens: int, dtype: torch.dtype, module, bandwidth: float, empty: float) -> dict:
    one = Inputs(tokens, dtype, module)
    sets = [one] + [Inputs(tokens, dtype, module) for _ in range(rotations(one.bytes, 16) - 1)]
    row = {}
    for name, call in calls.items():
        row[name] = None if call is None else time_graph([lambda x=x: call(x) for x in sets])
    row["floor"] = max(one.bytes / bandwidth * 1e6, empty)
    row["ours / floor"] = row["ours"] / row["floor"]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--upstream", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    module = load_kernels("context_kv")
    print(check_all(module))
    calls = {
        "ours": ours(module),
        "0.27.1": vllm_0_27_1(),
        "upstream": upstream(arguments.upstream) if arguments.upstream else None,
    }
    bandwidth, empty = copy_bandwidth(), empty_kernel_time()
    sizes = [(f"batch {b}", STEP * b) for b in BATCHES] + [(f"prefill {n}", n) for n in PREFILLS]
    sections = {}
    for name, dtype in DTYPES.items():
        sections[f"{name} pages, µs per call"] = [
            {"what": what, "tokens": n, **measure(calls, n, dtype, module, bandwidth, empty)} for what, n in sizes
        ]

    def plot(axes):
        rows = sections["bf16 pages, µs per call"]
        for column in (*calls, "floor"):
            if rows[0][column] is not None:
                axes.loglog([r["tokens"] for r in rows], [r[column] for r in rows], marker="o", label=column)
        axes.set(xlabel="context tokens", ylabel="µs", title="Context K/V into the pages of 5 layers, bf16")

    write(arguments.out, "context_kv", sections, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
