"""dflash2/layers/dflash2/conv.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6


class Case(NamedTuple):
    name: str
    rows: int
    block: int
    hidden: int
    group: int
    taps: int = 2
    dtype: torch.dtype = BF16
    kind: str = "normal"


SMALL = [
    Case("one block", 8, 8, 64, 16),
    Case("three blocks", 24, 8, 96, 16),
    Case("float32", 16, 8, 80, 16, dtype=FP32),
    Case("three taps", 12, 4, 60, 5, taps=3),
    Case("four taps", 12, 6, 48, 4, taps=4),
    Case("one tap", 5, 5, 32, 8, taps=1),
    Case("a block shorter than the taps", 6, 2, 32, 8, taps=4),
    Case("rows that end inside a block", 11, 8, 64, 16),
    Case("one group", 8, 8, 33, 33),
    Case("a group a channel", 8, 8, 40, 1),
    Case("NaN and inf", 16, 4, 64, 16, taps=3, kind="special"),
    Case("strided rows", 16, 8, 64, 16, kind="strided"),
]
BIG = [
    *(Case(f"H {h}, batch {b}", b * 8, 8, h, 16) for h in (2048, 4096, 5120, 6656, 8192) for b in (1, 8, 32, 128)),
    *(Case(f"{t} taps, S = {s}", 16 * (s + 1), s + 1, 5120, 16, taps=t) for t in (2, 3, 4) for s in (1, 7, 15)),
    *(Case(f"float32, {t} taps", 64, 8, 5120, 16, taps=t, dtype=FP32) for t in (2, 4)),
    *(Case(f"{kind}, group {g}", 61, 8, 5120, g, 3, kind=kind) for kind in ("special", "strided") for g in (1, 5, 128)),
]


def inputs(case, device):
    generator = torch.Generator(device).manual_seed(case.rows * 10007 + case.hidden)
    pad = 24 if case.kind == "strided" else 0

    def normal(*shape):
        wide = torch.randn(*shape[:-1], shape[-1] + pad, generator=generator, device=device)
        return wide.to(case.dtype)[..., : shape[-1]]

    x, residual = normal(case.rows, case.hidden), normal(case.rows, case.hidden)
    delta = normal(case.rows, 2 * case.taps * (case.hidden // case.group))
    base, weight = normal(2, case.taps, case.hidden).contiguous(), normal(case.hidden)
    if case.kind == "special":
        x[5, 3], x[9, 7], x[12, 1] = float("nan"), float("-inf"), float("inf")
        residual[6, 2] = float("nan")
    return x, delta, base, residual, weight


def grouped_conv(case, x, delta, base, side):
    """float32 [rows, hidden], block by block, as the specification writes it."""
    delta = delta.float().view(case.rows, 2, case.taps, -1)[:, side].repeat_interleave(case.group, -1)
    blocks = []
    for first in range(0, case.rows, case.block):
        rows = slice(first, min(first + case.block, case.rows))
        block, out = x[rows].float(), 0.0
        for tap in range(case.taps):
            kernel = base[side, tap].float() + delta[rows, tap]
            kernel[:tap] = 0.0  # nothing before the block, whatever the kernel holds
            out = out + kernel * F.pad(block, (0, 0, tap, 0))[: len(block)]
        blocks.append(out)
    return torch.cat(blocks)


def mismatches(got, wanted, magnitude, interpreted):
    """Elements further from float32 than rounding allows; `magnitude` is the sum of the terms' sizes."""
    eps = torch.finfo(got.dtype).eps
    # Half a unit in the last place of the result. The interpreter cuts bf16's low bits off: a whole unit.
    unit = 1.01 * eps if interpreted else 0.505 * eps
    allowed = unit * wanted.abs() + 1e-6 * magnitude + 1e-30
    same = (got.float() - wanted).abs() <= allowed
    both_nan = got.isnan() & wanted.isnan()
    return int((~(same | both_nan | (got.float() == wanted))).sum())


def check(sides, case, device):
    """What is wrong with (conv_side0, conv_side1_add_norm) on the case; empty when all is right."""
    x, delta, base, residual, weight = inputs(case, device)
    kept = residual.clone()
    on_interpreter = device == "cpu"
    filtered = sides[0](x, delta, base, case.block)
    normed, total = sides[1](x, delta, base, residual, weight, EPS, case.block)
    wanted_0 = grouped_conv(case, x, delta, base, 0)
    wanted_total = grouped_conv(case, x, delta, base, 1) + residual.float()
    scale = torch.rsqrt(wanted_total.square().mean(-1, keepdim=True) + EPS)
    wanted_normed = wanted_total * scale * weight.float()
    # How large the terms are, whose float32 sums may cancel.
    finite = [t.nan_to_num(0.0, 1.0, 1.0).abs() for t in (x, delta, base)]
    size = 1 + sum(grouped_conv(case, *finite, side) for side in (0, 1)) + residual.nan_to_num(0.0).float().abs()
    normed_size = size * (scale * weight.float()).nan_to_num(0.0).abs() + wanted_normed.nan_to_num(0.0).abs()
    counts = {
        "side 0": mismatches(filtered, wanted_0, size, on_interpreter),
        "residual": mismatches(total, wanted_total, size, on_interpreter),
        "normed": mismatches(normed, wanted_normed, normed_size, on_interpreter),
        "the residual passed in": int((~((residual == kept) | kept.isnan())).sum()),
    }
    return [f"{count} of {x.numel()} values of {name}" for name, count in counts.items() if count]


def kernels(module):
    """The launchers, called as the public functions are: on a CPU those would take the PyTorch path."""

    def side0(x, delta, base, block):
        return module.launch_side0(x, delta, base, block, delta.shape[1] // (2 * base.shape[1]))

    def side1(y, delta, base, residual, weight, eps, block):
        groups = delta.shape[1] // (2 * base.shape[1])
        return module.launch_side1(y, delta, base, residual, weight, eps, block, groups)

    return side0, side1
