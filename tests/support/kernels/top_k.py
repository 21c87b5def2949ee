"""dflash2/layers/dflash2/top_k.py against a stable sort: small rows through Triton's interpreter, big ones on a GPU."""

from typing import NamedTuple
from unittest.mock import patch

import torch

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    name: str
    rows: int
    vocab: int
    k: int
    dtype: torch.dtype = BF16
    kind: str = "normal"
    valid: int | None = None  # None: the whole width
    stride: int = 0  # columns of storage after each row


# Rows of a few pieces, cut small enough for the interpreter, which takes a millisecond an exchange.
TINY_TILE = {"piece": 64, "group": 8, "sets": 16, "slots": 16, "warps": 1}
SMALL = [
    Case("several pieces", 3, 320, 4),
    Case("float32", 2, 320, 4, FP32),
    Case("float16", 1, 130, 3, torch.float16),
    Case("k = 1", 2, 201, 1),
    Case("k no power of two", 2, 201, 5),
    Case("k of every column", 2, 16, 16),
    Case("less than a group", 2, 7, 3),
    Case("k beyond the groups", 1, 70, 16),
    Case("as many reach the bound as fit", 2, 320, 16, kind="spread"),
    Case("best logits in one group", 2, 320, 4, kind="ascending"),
    Case("ties", 2, 320, 6, kind="ties"),
    Case("one value", 2, 201, 6, kind="equal"),
    Case("NaN rows", 2, 201, 6, kind="nan"),
    Case("NaN, inf, zeros of both signs", 3, 201, 8, FP32, kind="special"),
    Case("columns beyond valid", 2, 320, 4, valid=203),
    Case("strided rows", 2, 201, 4, stride=55),
]
BIG = [
    *(Case(f"batch {b} of 7", 7 * b, 248320, 16) for b in (1, 8, 32, 128)),
    *(Case(f"k = {k}", 56, 248320, k) for k in (1, 2, 4, 5, 8, 17, 32, 33, 64)),
    *(Case(f"vocabulary {v}", 21, v, 16) for v in (320, 1025, 8192, 50257, 128256, 151936, 202048, 154880)),
    *(Case(f"float32, k = {k}", 21, 151936, k, FP32) for k in (4, 16, 64)),
    *(
        Case(f"{kind}, k = {k}", 14, 151936, k, kind=kind)
        for kind in ("ties", "equal", "nan", "special", "ascending")
        for k in (16, 64)
    ),
    Case("special float32", 14, 151936, 16, FP32, kind="special"),
    Case("odd valid", 14, 248320, 16, valid=248077),
    Case("odd everything", 14, 32001, 16, valid=31999, stride=7),
    Case("aligned rows, odd width", 14, 32001, 16, stride=63),
    Case("k of every column", 14, 64, 64),
    Case("a million columns", 3, 1 << 20, 64),
]


def logits_of(case, device):
    generator = torch.Generator(device).manual_seed(case.vocab * 100 + case.k)
    width = case.vocab + case.stride
    x = 4 * torch.randn(case.rows, width, generator=generator, device=device)
    if case.kind == "ties":
        x = (x / 4).round()
    if case.kind == "equal":
        x.fill_(-1.5)
    if case.kind == "spread":  # every group of 8 ends in its best, so that the bound is the k-th best logit
        x = torch.arange(width, device=device).flip(0).float().expand(x.shape).clone()
        x += 1000 * (torch.arange(width, device=device) % 8 == 7)
    if case.kind == "ascending":
        x = x.sort(dim=1).values
    if case.kind in ("nan", "special"):
        draw = torch.rand(x.shape, generator=generator, device=device)
        for value, share in (("nan", 0.4), ("-inf", 0.6), ("-0.0", 0.8)):
            lower = {"nan": 0.0, "-inf": 0.4, "-0.0": 0.6}[value]
            x = torch.where((draw >= lower) & (draw < share), float(value), x)
        x = torch.where(draw > 0.9, 0.0, x.clamp(max=0.0)) if case.kind == "special" else x
    if case.kind == "nan":
        x[0] = float("nan")
        x[-1, 1:] = float("nan")
    x = x.to(case.dtype)
    x[:, case.vocab :] = float("inf")  # storage after a row must never be chosen
    if case.valid is not None:
        x[:, case.valid :] = float("inf")
    return x[:, : case.vocab]


def expected(logits, k, valid):
    """Ids and values by a stable sort of the float32 row: equal values stay in order of id."""
    x = logits[:, :valid].float()
    x = torch.where(x.isnan(), float("-inf"), x)
    values, ids = x.sort(dim=1, descending=True, stable=True)
    return ids[:, :k], values[:, :k]


def check(module, case, device, tile=None, pieces=None):
    """What is wrong with the case: an empty list when ids and values are exactly as expected, twice."""
    logits = logits_of(case, device)
    valid = case.valid or case.vocab
    tile = tile or module.choose_tile(case.k)
    counters = module.Counters()
    wanted = expected(logits, case.k, valid)
    wrong = []
    for launch in ("first", "second"):  # the second finds out whether the first left the counters at zero
        with patch.object(torch, "empty", poisoned):
            got = module.launch(logits, case.k, valid, tile, counters, pieces)
        for name, a, b in zip(("ids", "values"), got, wanted, strict=True):
            if not torch.equal(a, b):
                row = int((a != b).any(1).nonzero()[0])
                wrong.append(f"{launch} launch: {name} of row {row}: {a[row].tolist()} instead of {b[row].tolist()}")
    return wrong


def poisoned(*shape, dtype, device):
    """What torch.empty may return."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=device)
