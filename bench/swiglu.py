"""The activation of a gated MLP, silu(gate) * up: ours, vLLM's kernel, PyTorch's, and the bytes alone.

    python -m bench.swiglu [--out DIR] [--sweep]

vLLM's kernel is timed if vLLM is installed; newest upstream (0.33.0) uses the same. Times are
microseconds per call, replayed as a CUDA graph, the input in L2 as right after the GEMM that wrote it.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from bench._common import copy_bandwidth, empty_kernel_time, precompile, require_gpu, time_graph, write
from tests.support.kernels import load_kernels
from tests.support.kernels.swiglu import BIG, SMALL, check

NUM_QUERY = 8  # rows per request
SHAPES = [
    *((batch, 17408) for batch in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((batch, n) for n in (6144, 28672) for batch in (1, 32)),
]
CHOICES = [(256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]  # columns, warps
SETS = 5  # layers


def vllm_kernel():
    try:
        # Which extension registers it depends on the build; this imports the right one.
        import vllm._custom_ops  # noqa: F401

        torch.ops._C.silu_and_mul  # noqa: B018
    except (ImportError, AttributeError) as error:
        print(f"vLLM's kernel not timed: {error}")
        return None

    def silu_and_mul(x):
        out = x.new_empty(len(x), x.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, x)
        return out

    return silu_and_mul


def torch_silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def input_sets(batch, n):
    return [torch.randn(batch * NUM_QUERY, 2 * n, dtype=torch.bfloat16, device="cuda") for _ in range(SETS)]


def measure(swiglu, vllm, shape, bandwidth):
    batch, n = shape
    sets = input_sets(*shape)
    return {
        "batch": batch,
        "n": n,
        "ours": time_graph([lambda x=x: swiglu.silu_and_mul(x) for x in sets]),
        "vLLM": vllm and time_graph([lambda x=x: vllm(x) for x in sets]),
        "torch": time_graph([lambda x=x: torch_silu_and_mul(x) for x in sets]),
        "bytes alone": 6 * batch * NUM_QUERY * n / bandwidth * 1e6,
    }


def sweep(swiglu):
    inputs = {batch: input_sets(batch, 17408) for batch in (1, 8, 32)}
    return [
        {"columns": columns, "warps": warps}
        | {
            f"batch {batch}": time_graph([lambda x=x: swiglu.launch(x, columns, warps) for x in sets])
            for batch, sets in inputs.items()
        }
        for columns, warps in CHOICES
    ]


def compile_one(choice):
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if choice is None else (torch.bfloat16,):
        for n in (64, 37):
            load_kernels("swiglu").launch(torch.zeros(1, 2 * n, dtype=dtype, device="cuda"), *(choice or ()))
    torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for swiglu.md, swiglu.json and swiglu.png")
    parser.add_argument("--sweep", action="store_true", help="also time every candidate launch configuration")
    args = parser.parse_args()
    require_gpu()
    precompile(compile_one, [None, *(CHOICES if args.sweep else ())])
    swiglu, cases = load_kernels("swiglu"), SMALL + BIG
    wrong = {case.name: w for case in cases if (w := check(swiglu.silu_and_mul, case, "cuda"))}
    for name, what in wrong.items():
        print(f"WRONG {name}: {what}")
    print(f"{len(cases) - len(wrong)} of {len(cases)} cases within rounding of float32")
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; an empty kernel {empty_kernel_time():.2f} us")
    vllm = vllm_kernel()
    results = [measure(swiglu, vllm, shape, bandwidth) for shape in SHAPES]
    sections = {"silu(gate) * up, µs": results}
    if args.sweep:
        sections["Launch configurations, µs"] = sweep(swiglu)
    write(args.out, "swiglu", sections, lambda axes: plot(axes, results))
    return 1 if wrong else 0


def plot(axes, results):
    shown = [r for r in results if r["n"] == 17408]
    for name, style in (("torch", "s-"), ("vLLM", "^-"), ("ours", "o-"), ("bytes alone", "k--")):
        if shown[0][name] is not None:
            axes.loglog([r["batch"] for r in shown], [r[name] for r in shown], style, label=name)
    axes.set(xlabel="requests of 8 rows", ylabel="µs", title="silu(gate) * up, n 17408, bf16")


if __name__ == "__main__":
    raise SystemExit(main())
