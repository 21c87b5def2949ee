"""dflash2/layers/dflash2/context_kv.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

import json
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from answers import run_interpreted  # noqa: E402
from bench._common import load_kernels  # noqa: E402

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
            scale = scale if is_fp8 else 1.0
            expected = wanted[live, layer] / scale
            count = mismatches(stored, expected, terms[live, layer] / scale, case.page)
            if count:
                wrong.append(f"layer {layer}: {count} of {expected.numel()} values of {name}")
        bytes_of = view.view(torch.uint8) if is_fp8 else view
        bytes_of[where] = torch.tensor(0x5A, dtype=torch.uint8, device=device) if is_fp8 else poison(case.page, device)
        if not bool((raw == 0x5A).all()):
            wrong.append(f"layer {layer}: wrote outside the live slots")
    return wrong


def poison(dtype, device):
    return torch.full((dtype.itemsize,), 0x5A, dtype=torch.uint8, device=device).view(dtype)[0]


@pytest.fixture(scope="module")
def interpreted():
    """{name of case: what is wrong}, from one process that runs every small case without a GPU."""
    return run_interpreted(__file__)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_interpreted_kernel_matches_float32(interpreted, case):
    assert interpreted[case.name] == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + BIG, ids=lambda case: case.name)
def test_kernel_matches_float32(case):
    assert check(load_kernels("context_kv"), case, "cuda") == []


@pytest.mark.gpu
def test_one_compilation_serves_every_number_of_tokens():
    module = load_kernels("context_kv")
    for tokens in (1, 2, 16, 17, 100, 4096):
        assert check(module, Case("", 5, 8, 128, tokens), "cuda") == []
    ((compiled, *_),) = module._store_context_kv_kernel.device_caches.values()
    assert len(compiled) == 1


class FakeLayer:
    """What the writer reads of a vLLM Attention module."""

    def __init__(self, cache, kv_cache_dtype="auto", backend="FLASH_ATTN", shared=None):
        self.kv_cache = cache
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = shared
        self._k_scale = self._v_scale = torch.tensor(1.0)
        self._name = backend

    def get_attn_backend(self):
        return types.SimpleNamespace(get_name=lambda: self._name)


def pages(blocks=3, heads=2, block=16, width=128, dtype=torch.bfloat16):
    return torch.zeros(blocks, block, heads, width, dtype=dtype).transpose(1, 2)


FALLBACKS = {
    "another backend": [FakeLayer(pages()), FakeLayer(pages(), backend="ROCM_ATTN")],
    "packed 4-bit pages": [FakeLayer(pages(dtype=torch.uint8), "nvfp4")] * 2,
    "scales kept a head": [FakeLayer(pages(dtype=torch.uint8, width=136), "fp8_per_token_head")] * 2,
    "different page formats": [FakeLayer(pages()), FakeLayer(pages(dtype=torch.uint8), "fp8")],
    "different block sizes": [FakeLayer(pages()), FakeLayer(pages(block=32))],
    "different memory order": [FakeLayer(pages()), FakeLayer(pages().contiguous())],
    "a cache shared with another layer": [FakeLayer(pages()), FakeLayer(pages(), shared="model.layers.1")],
    "caches not bound yet": [FakeLayer(torch.tensor([]))] * 2,
    "addresses off 16 bytes": [
        FakeLayer(torch.zeros(3 * 2 * 16 * 144 + 4, dtype=torch.bfloat16)[4:].view(3, 2, 16, 144))
    ]
    * 2,
}


@pytest.fixture(scope="module")
def module():
    return load_kernels("context_kv")


def writer(module, layers, head_dim=64, **options):
    weights = torch.ones(len(layers), head_dim)
    return module.ContextKVWriter(layers, weights, EPS, torch.zeros(8, 64), head_dim, **options)


SLOTS = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("name", FALLBACKS)
def test_unsupported_caches_are_left_to_the_caller(module, name):
    layers = FALLBACKS[name]
    head_dim = 72 if name == "addresses off 16 bytes" else 64
    instance = module.ContextKVWriter(layers, torch.ones(2, head_dim), EPS, torch.zeros(8, head_dim), head_dim)
    assert not instance.can_store(SLOTS)


@pytest.mark.parametrize("options", [{"is_neox": False}, {"head_dim": 128}])
def test_unsupported_rotary_embeddings_are_left_to_the_caller(module, options):
    layers = [FakeLayer(pages(width=2 * options.get("head_dim", 64))) for _ in range(2)]
    assert not writer(module, layers, **options).can_store(SLOTS)


@pytest.mark.parametrize(
    "slots, served", [(SLOTS, True), ([SLOTS, SLOTS], True), ([SLOTS, None], False), (None, False)]
)
def test_slots_that_are_missing_are_left_to_the_caller(module, slots, served):
    assert writer(module, [FakeLayer(pages()), FakeLayer(pages())]).can_store(slots) is served


def test_the_table_follows_the_caches_and_is_not_rebuilt_for_nothing(module):
    layers = [FakeLayer(pages()), FakeLayer(pages())]
    instance = writer(module, layers)
    first = instance._bind()
    assert instance._bind() is first
    layers[1].kv_cache = pages()
    second = instance._bind()
    assert second.table[0].tolist() == [layer.kv_cache.data_ptr() for layer in layers]
    assert second.table[1].tolist() == [layer.kv_cache.data_ptr() + 128 for layer in layers]
    assert second.strides == (16 * 2 * 128, 2 * 128, 128)


def test_rows_of_one_buffer_become_offsets_made_once(module):
    instance = writer(module, [FakeLayer(pages()), FakeLayer(pages())])
    rows = torch.zeros(2, 10, dtype=torch.int64)
    offsets = instance._slot_offsets([rows[0, :4], rows[1, :4]])
    assert offsets.tolist() == [0, 10]
    assert instance._slot_offsets([rows[0, :7], rows[1, :7]]) is offsets
    assert instance._slot_offsets([rows[0], rows[0]]) is None


def check_writer(module):
    """Stores through the writer, one slot tensor a layer, and directly; whether the same bytes result."""
    case = Case("", layers=3, groups=2)
    kv_flat, weights, cos_sin, positions, slots, scales, blocks = inputs(case, "cpu")
    direct, through = ([empty_pages(case, blocks, "cpu") for _ in range(case.layers)] for _ in range(2))
    views = [view.transpose(1, 2).split(case.head_dim, dim=-1) for _, view in direct]
    caches = module.page_table([k for k, _ in views], [v for _, v in views], scales[:3], scales[3:], case.page)
    offsets = torch.tensor([0, slots.stride(0), 0])
    module.store_context_kv(kv_flat, weights, EPS, positions, cos_sin, slots, offsets, caches)
    layers = [FakeLayer(view) for _, view in through]
    instance = module.ContextKVWriter(layers, weights, EPS, cos_sin, case.head_dim)
    instance.store(kv_flat, positions, [slots[0], slots[1], slots[0]])
    return all(torch.equal(a, b) for (a, _), (b, _) in zip(direct, through, strict=True))


def test_the_writer_stores_what_the_kernel_stores(interpreted):
    assert interpreted["writer"] is True


if __name__ == "__main__":
    loaded = load_kernels("context_kv")
    results = {case.name: check(loaded, case, "cpu") for case in SMALL}
    print(json.dumps({**results, "writer": check_writer(loaded)}))
