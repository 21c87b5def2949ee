"""The 20 grouped convolutions of a draft step: ours, newest upstream's, PyTorch's.

    python -m bench.conv [--out DIR] [--sweep] [--upstream FOLDER_WITH_VLLM_0.33.0]

A draft step of a drafter of 5 layers filters 10 sublayer inputs (side 0) and 10 outputs (side 1);
each of the latter is followed by a residual add and an RMSNorm. Times are microseconds per call or
per step, replayed as a CUDA graph, every call on tensors of its own as in the step. "upstream fused" is
0.33.0's convolution for side 0 and its kernel that, like ours, does side 1, add and norm at once;
"upstream, no add, no norm" is its convolution for both sides: less work than the others do.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from bench._common import (
    copy_bandwidth,
    empty_kernel_time,
    load_upstream,
    precompile,
    require_gpu,
    time_graph,
    write,
)
from tests.support.kernels import load_kernels
from tests.support.kernels.conv import BIG, SMALL, check

EPS = 1e-6
GROUP = 16
SITES = 10  # 5 layers, around attention and around the MLP
SHAPES = [
    *((batch, 5120, 2) for batch in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((batch, hidden, 2) for hidden in (2048, 4096, 6656, 8192) for batch in (1, 32)),
    *((batch, 5120, taps) for taps in (3, 4) for batch in (1, 32)),
]
NUM_QUERY = 8  # rows per request
SIDE_0_CHOICES = [(512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 4), (2048, 8)]  # columns, warps
SIDE_1_CHOICES = [2, 4, 8, 16]  # warps


def make_site(batch, hidden, taps):
    """One convolution's tensors: x, delta, base, residual, norm weight."""
    rows, groups = batch * NUM_QUERY, hidden // GROUP
    shapes = ((rows, hidden), (rows, 2 * taps * groups), (2, taps, hidden), (rows, hidden), (hidden,))
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def torch_conv(x, delta, base, side):
    """Float32 in PyTorch, eager."""
    rows, hidden = x.shape
    taps = base.shape[1]
    x = x.float().view(-1, NUM_QUERY, hidden)
    delta = delta.view(rows, 2, taps, -1)[:, side].float().view(-1, NUM_QUERY, taps, hidden // GROUP, 1)
    out = torch.zeros_like(x)
    for tap in range(taps):
        kernel = (base[side, tap].float().view(-1, GROUP) + delta[:, :, tap]).flatten(2)
        out += kernel * F.pad(x, (0, 0, tap, 0))[:, :NUM_QUERY]
    return out.view(rows, hidden).to(torch.bfloat16)


def add_norm(y, residual, weight):
    residual = y.float() + residual.float()
    scale = torch.rsqrt(residual.square().mean(-1, keepdim=True) + EPS)
    return (residual * scale * weight.float()).to(y.dtype), residual.to(y.dtype)


def contenders(conv, upstream, taps):
    """{name: (side 0 of a site, side 1 and add and norm of a site)}"""

    def torch_side1(x, d, b, r, w):
        return add_norm(torch_conv(x, d, b, 1), r, w)

    found = {
        "ours": (
            lambda x, d, b, r, w: conv.conv_side0(x, d, b, NUM_QUERY),
            lambda x, d, b, r, w: conv.conv_side1_add_norm(x, d, b, r, w, EPS, NUM_QUERY),
        ),
        "torch": (lambda x, d, b, r, w: torch_conv(x, d, b, 0), torch_side1),
    }
    if upstream is None:
        return found
    plain, fused = upstream

    def shaped(d):
        return d.view(len(d), 2, taps, -1)

    def upstream_side0(x, d, b, r, w):
        return plain(x, shaped(d)[:, 0], b[0], NUM_QUERY, GROUP)

    def upstream_side1(x, d, b, r, w):
        return plain(x, shaped(d)[:, 1], b[1], NUM_QUERY, GROUP)

    def upstream_fused(x, d, b, r, w):
        return fused(x, shaped(d)[:, 1], b[1], r, w, EPS, NUM_QUERY, GROUP)

    return found | {
        "upstream fused": (upstream_side0, upstream_fused),
        "upstream, no add, no norm": (upstream_side0, upstream_side1),
    }


def step_bytes(batch, hidden, taps):
    """Fewest bytes of 10 sides 0 and 10 sides 1 with add and norm, all bf16."""
    rows = batch * NUM_QUERY
    side0 = 2 * rows * hidden
    side1 = 4 * rows * hidden + hidden
    coefficients = 2 * taps * (rows * hidden // GROUP + hidden)
    return 2 * SITES * (side0 + side1 + coefficients)


def measure(conv, upstream, shape, bandwidth):
    batch, hidden, taps = shape
    sites = [make_site(*shape) for _ in range(SITES)]
    row = {"batch": batch, "H": hidden, "taps": taps}
    for name, (side0, side1) in contenders(conv, upstream, taps).items():
        # Upstream's fused kernel may write the residual it is given.
        copies = [[t.clone() for t in site] for site in sites]
        first = time_graph([lambda s=s: side0(*s) for s in copies])
        second = time_graph([lambda s=s: side1(*s) for s in copies])
        if name == "ours":
            row |= {"side 0": first, "side 1 + add + norm": second}
        row[f"step, {name}"] = SITES * (first + second)
    row["step, bytes alone"] = step_bytes(*shape) / bandwidth * 1e6
    return row


def disagreement(conv, upstream):
    """Largest relative distance between our results and upstream's, to see that both did the same work."""
    x, d, b, r, w = make_site(8, 5120, 2)
    found = contenders(conv, upstream, 2)
    ours, theirs = (
        (side0(x, d, b, r.clone(), w), *side1(x, d, b, r.clone(), w))
        for side0, side1 in (found["ours"], found["upstream fused"])
    )
    return max(float((a.float() - c.float()).norm() / a.float().norm()) for a, c in zip(ours, theirs, strict=True))


def sweep(conv):
    sites = {batch: [make_site(batch, 5120, 2) for _ in range(SITES)] for batch in (1, 8, 32)}
    groups = 5120 // GROUP

    def times(call):
        return {f"batch {b}": time_graph([lambda s=s: call(*s) for s in row]) for b, row in sites.items()}

    side0 = [
        {"side": 0, "columns": columns, "warps": warps}
        | times(lambda x, d, b, r, w: conv.launch_side0(x, d, b, NUM_QUERY, groups, columns, warps))
        for columns, warps in SIDE_0_CHOICES
    ]
    side1 = [
        {"side": 1, "columns": 8192, "warps": warps}
        | times(lambda x, d, b, r, w: conv.launch_side1(x, d, b, r, w, EPS, NUM_QUERY, groups, warps))
        for warps in SIDE_1_CHOICES
    ]
    return side0 + side1


def compile_one(case):
    check_case(load_kernels("conv"), case)


def check_case(conv, case):
    return check((conv.conv_side0, conv.conv_side1_add_norm), case, "cuda")


def upstream_kernels(folder):
    if folder is None:
        print("upstream not timed: pass --upstream FOLDER, which holds the vllm folder of 0.33.0")
        return None
    package = folder / "vllm" if (folder / "vllm").is_dir() else folder
    plain = package / "model_executor/models/qwen3_dflash2.py"
    fused = package / "models/beam/nvidia/dflash2_conv_ops.py"
    _, plain = load_upstream(plain, "_dflash2_grouped_conv_kernel", "dflash2_grouped_conv_impl")
    _, fused = load_upstream(fused, "_conv_residual_norm_kernel", "conv_residual_norm")
    return plain, fused


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for conv.md, conv.json and conv.png")
    parser.add_argument("--sweep", action="store_true", help="also time every candidate launch configuration")
    parser.add_argument("--upstream", type=Path, help="folder that holds vllm 0.33.0, unpacked from its wheel")
    args = parser.parse_args()
    require_gpu()
    upstream = upstream_kernels(args.upstream)
    cases = SMALL + BIG
    precompile(compile_one, cases)
    conv = load_kernels("conv")
    wrong = {case.name: w for case in cases if (w := check_case(conv, case))}
    for name, what in wrong.items():
        print(f"WRONG {name}: {what}")
    print(f"{len(cases) - len(wrong)} of {len(cases)} cases within rounding of float32")
    bandwidth, empty = copy_bandwidth(), empty_kernel_time()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; an empty kernel {empty:.2f} us, so 20 launches {20 * empty:.0f} us")
    if upstream:
        print(f"relative distance to upstream's results {disagreement(conv, upstream):.1e}")
    results = [measure(conv, upstream, shape, bandwidth) for shape in SHAPES]
    sections = {"20 convolutions of a step, µs": results}
    if args.sweep:
        sections["Launch configurations, µs per call"] = sweep(conv)
    write(args.out, "conv", sections, lambda axes: plot(axes, results, 20 * empty))
    return 1 if wrong else 0


def plot(axes, results, launches):
    shown = [r for r in results if (r["H"], r["taps"]) == (5120, 2)]
    names = [name for name in shown[0] if name.startswith("step, ")]
    for name in names:
        style = "k--" if name.endswith("alone") else "o-" if name.endswith("ours") else "s-"
        axes.loglog([r["batch"] for r in shown], [r[name] for r in shown], style, label=name.removeprefix("step, "))
    axes.axhline(launches, color="grey", linestyle=":", label="20 empty kernels")
    axes.set(xlabel="requests of 8 rows", ylabel="µs", title="20 convolutions, 10 with add and norm, H 5120")


if __name__ == "__main__":
    raise SystemExit(main())
