"""dflash2/layers/dflash2/swiglu.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

from typing import NamedTuple

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    name: str
    rows: int
    n: int
    dtype: torch.dtype = BF16
    stride: int = 0  # columns of storage after each row
    special: bool = False


SMALL = [
    Case("one row", 1, 64),
    Case("odd width", 3, 37),
    Case("more than a program", 2, 1500),
    Case("float16", 3, 40, FP16),
    Case("float32", 3, 40, FP32),
    Case("strided rows", 4, 48, stride=24),
    Case("NaN, inf and large", 3, 48, FP32, special=True),
]
BIG = [
    *(Case(f"{rows} rows of {n}", rows, n) for rows in (1, 8, 64, 256, 1024) for n in (6144, 17408)),
    *(Case(f"{dtype}, {n}", 65, n, dtype) for dtype in (FP16, FP32) for n in (17408, 5003)),
    Case("odd width, strided, special", 65, 5003, stride=9, special=True),
]


def gate_up_of(case, device):
    generator = torch.Generator(device).manual_seed(case.rows * 10007 + case.n)
    x = 3 * torch.randn(case.rows, 2 * case.n + case.stride, generator=generator, device=device)
    if case.special:
        x[0, 3], x[1, case.n + 5] = float("nan"), float("inf")
        x[1, 7], x[2, 9] = -200.0, 200.0
    return x.to(case.dtype)[:, : 2 * case.n]


def check(silu_and_mul, case, device):
    """What is wrong with the case; empty when every value is float32's, rounded."""
    x = gate_up_of(case, device)
    got = silu_and_mul(x)
    gate, up = x.double()[:, : case.n], x.double()[:, case.n :]
    wanted = gate / (1 + torch.exp(-gate)) * up
    # Half a unit in the last place. The interpreter cuts bf16's low bits off: a whole unit.
    unit = torch.finfo(case.dtype).eps * (1.01 if device == "cpu" else 0.505)
    close = (got.double() - wanted).abs() <= unit * wanted.abs() + 4e-6 * wanted.abs() + torch.finfo(case.dtype).tiny
    bad = int((~(close | (got.isnan() & wanted.isnan()) | (got.double() == wanted))).sum())
    wrong = [f"{bad} of {got.numel()} values"] if bad else []
    return wrong if (got.shape, got.dtype) == (gate.shape, case.dtype) else [*wrong, f"{got.dtype} {got.shape}"]
