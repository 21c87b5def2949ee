"""layers/dflash2/context_kv.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

from typing import NamedTuple

import torch

EPS = 1e-6


class Case(NamedTuple):
    name: str
    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    tokens: int = 5
    block: int = 16
    layout: str = "NHD"
    page: torch.dtype = torch.bfloat16
    groups: int = 1
    inputs: torch.dtype = torch.bfloat16


FP8 = torch.float8_e4m3fn
SMALL = [
    Case("one token", tokens=1),
    Case("several programs", heads=3, tokens=17),
    Case("head dim 128, one head", layers=1, heads=1, head_dim=128),
    Case("head dim no power of two", head_dim=80, heads=3),
    Case("heads before slots", layout="HND"),
    Case("padded pages", layout="padded"),
    Case("two KV groups", layers=3, groups=2),
    Case("big pages", block=48, tokens=33),
    Case("float32 pages", page=torch.float32, inputs=torch.float32),
    Case("e4m3", page=FP8),
    Case("e5m2, heads before slots", page=torch.float8_e5m2, layout="HND"),
]
BIG = [
    Case("a decode step", 5, 8, 128, 8),
    Case("32 requests", 5, 8, 128, 256),
    Case("prefill", 5, 8, 128, 8192),
    Case("prefill, odd", 5, 8, 128, 8191, layout="HND"),
    Case("one rank of eight", 5, 1, 128, 4097),
    Case("e4m3 prefill", 5, 8, 128, 4096, page=FP8),
    Case("e5m2 prefill", 5, 8, 128, 4096, page=torch.float8_e5m2),
    Case("head dim 256", 3, 4, 256, 1000, groups=3),
    Case("head dim 80, e4m3", 2, 5, 80, 1000, page=FP8, layout="padded"),
    Case("head dim 96", 2, 5, 96, 1000, block=784),
]


def empty_pages(case, blocks, device):
    """[blocks, heads, block, 2 * head_dim] in the case's memory order, every byte 0x5A."""
    page = case.heads * case.block * 2 * case.head_dim
    stride = page + (64 if case.layout == "padded" else 0)
    raw = torch.full((blocks * stride * case.page.itemsize,), 0x5A, dtype=torch.uint8, device=device)
    flat = raw.view(case.page).as_strided((blocks, page), (stride, 1))
    if case.layout == "HND":
        return raw, flat.unflatten(1, (case.heads, case.block, 2 * case.head_dim))
    return raw, flat.unflatten(1, (case.block, case.heads, 2 * case.head_dim)).transpose(1, 2)


def inputs(case, device):
    generator = torch.Generator(device).manual_seed(case.tokens * 1000 + case.head_dim)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    width = case.layers * 2 * case.heads * case.head_dim
    # A slice of a wider buffer: the rows are strided, as a padded GEMM output's are.
    kv_flat = (3 * normal(case.tokens, width + 64)).to(case.inputs)[:, :width]
    kv_flat[-1, 0] = float("nan")  # spoils K of the first layer's first head and nothing else
    weights = (1 + 0.3 * normal(case.layers, case.head_dim)).to(case.inputs)
    angles = torch.arange(2 * case.tokens + 3, device=device)[:, None] * 0.37 ** torch.arange(
        case.head_dim // 2, device=device
    )
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(case.inputs)
    positions = torch.randperm(2 * case.tokens + 3, generator=generator, device=device)[: case.tokens]
    blocks = -(-2 * case.tokens // case.block) + 1
    slots = torch.stack(
        [
            torch.randperm(blocks * case.block, generator=generator, device=device)[: case.tokens]
            for _ in range(case.groups)
        ]
    )
    slots[:, 1::4] = -1
    # 0.004 makes the larger values overflow e4m3 (448), so that saturation shows.
    scales = [torch.tensor(0.004 * (i + 1), device=device) for i in range(2 * case.layers)]
    return kv_flat, weights, cos_sin, positions, slots, scales, blocks


def reference(case, kv_flat, weights, cos_sin, positions):
    """K normalised and rotated, V, and the size of what K is a sum of: float32 [n, L, heads, head_dim] each."""
    kv = kv_flat.float().reshape(case.tokens, case.layers, 2, case.heads, case.head_dim)
    k, v = kv[:, :, 0], kv[:, :, 1]
    k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + EPS) * weights.float()[:, None]
    cos, sin = cos_sin.float()[positions][:, None, None].chunk(2, dim=-1)
    first, second = k.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    terms = torch.cat(((first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs()), dim=-1)
    return rotated, v, terms


def mismatches(got, wanted, terms, page):
    """How many stored values lie further from the float32 ones than rounding to the page's type can put them.

    terms: the size of what each value is a sum of, whose float32 rounding is left where they cancel.
    """
    info = torch.finfo(page)
    is_fp8 = page.itemsize == 1
    limit = info.max if is_fp8 else float("inf")
    wanted = wanted.clamp(-limit, limit)
    got = got.float()
    nan = got.isnan() & wanted.isnan()
    # Half a unit in the last place, and a little for float32's own rounding. Triton's interpreter cuts
    # bf16's low bits off, which costs a whole unit; converting to fp8 it loses the carry into the
    # exponent (30 becomes 16, not 32) and e4m3's NaN. Those are exact on a GPU only.
    unit = 0.505 * info.eps
    if not got.is_cuda:
        unit = 0.52 if is_fp8 else 2 * unit
        nan |= is_fp8 & wanted.isnan()
    allowed = wanted.abs() * unit + 2e-6 * terms + 0.505 * info.smallest_normal * info.eps + 1e-30
    if not got.is_cuda:
        allowed += info.smallest_normal * info.eps
    return int((~(((got - wanted).abs() <= allowed) | nan)).sum())


def check(module, case, device):
    """Stores the case and returns a list of what is wrong with the pages; empty when all is right."""
    kv_flat, weights, cos_sin, positions, slots, scales, blocks = inputs(case, device)
    pages = [empty_pages(case, blocks, device) for _ in range(case.layers)]
    views = [view.transpose(1, 2).split(case.head_dim, dim=-1) for _, view in pages]
    caches = module.page_table(
        [k for k, _ in views], [v for _, v in views], scales[: case.layers], scales[case.layers :], case.page
    )
    group = [layer % case.groups for layer in range(case.layers)]
    offsets = torch.tensor([g * slots.stride(0) for g in group], device=device) if any(group) else None
    given = torch.where(slots[0] < 0, 2**40, positions)  # without a slot, a position is anything
    module.store_context_kv(kv_flat, weights, EPS, given, cos_sin, slots, offsets, caches)

    wanted_k, wanted_v, terms_k = reference(case, kv_flat, weights, cos_sin, positions)
    wrong = []
    for layer, (raw, view) in enumerate(pages):
        slot = slots[group[layer]]
        live = slot >= 0
        where = (slot[live] // case.block, slice(None), slot[live] % case.block)
        is_fp8 = case.page.itemsize == 1
        for name, half, wanted, terms, scale in (
            ("K", slice(0, case.head_dim), wanted_k, terms_k, scales[layer]),
            ("V", slice(case.head_dim, None), wanted_v, wanted_v.abs(), scales[case.layers + layer]),
        ):
            stored = view.view(torch.uint8)[where] if is_fp8 else view[where]
            stored = stored.view(case.page)[..., half] if is_fp8 else stored[..., half]
            unit = scale if is_fp8 else 1.0
            expected = wanted[live, layer] / unit
            count = mismatches(stored, expected, terms[live, layer] / unit, case.page)
            if count:
                wrong.append(f"layer {layer}: {count} of {expected.numel()} values of {name}")
        bytes_of = view.view(torch.uint8) if is_fp8 else view
        bytes_of[where] = torch.tensor(0x5A, dtype=torch.uint8, device=device) if is_fp8 else poison(case.page, device)
        if not bool((raw == 0x5A).all()):
            wrong.append(f"layer {layer}: wrote outside the live slots")
    return wrong


def poison(dtype, device):
    return torch.full((dtype.itemsize,), 0x5A, dtype=torch.uint8, device=device).view(dtype)[0]
