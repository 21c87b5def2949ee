"""layers/dflash2/context_kv.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

import types

import pytest
import torch

from tests.support.kernels import load_kernels
from tests.support.kernels.context_kv import BIG, EPS, SMALL, Case, check, empty_pages, inputs


@pytest.fixture(scope="module")
def module():
    return load_kernels("context_kv")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_interpreted_kernel_matches_float32(module, case):
    assert check(module, case, "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + BIG, ids=lambda case: case.name)
def test_kernel_matches_float32(module, case):
    assert check(module, case, "cuda") == []


@pytest.mark.gpu
def test_one_compilation_serves_every_number_of_tokens():
    module = load_kernels("context_kv")  # nothing compiled yet
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


def test_the_writer_stores_what_the_kernel_stores(module):
    """Through the writer, one slot tensor per layer, and directly: the same bytes."""
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
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(direct, through, strict=True))
