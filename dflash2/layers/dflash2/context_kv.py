# SPDX-License-Identifier: Apache-2.0
"""Context K/V into the paged caches of every draft layer, in one kernel.

One GEMM projects the context states to K and V for all layers at once. What remains per layer is an
RMSNorm and RoPE of K and the scatter of K and V into that layer's pages. vLLM 0.27.1 does it with a
transposing copy, a norm, a rope and one cache write per layer; here each value is read once and written
once, to where it belongs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton

# Elements of a half-head tile, and warps per program: eight bf16 values, one 16-byte access, per thread.
TILE = 512
NUM_WARPS = 2

# Backends whose pages are [blocks, kv heads, block size, 2 * head size] (K, then V), in any order in
# memory, written by value / scale. The others (ROCm's split pages, CPU, packed 4-bit) differ.
PACKED_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
FP8_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _address(table_ptr, index, dtype: tl.constexpr):
    # Addresses read from memory carry no alignment; without the hint every store is two bytes wide.
    address = tl.load(table_ptr + index).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16)


@triton.jit
def _encode(x, scale, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    if LIMIT > 0:
        x = tl.clamp(x / scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_context_kv_kernel(
    kv_ptr,
    kv_stride,
    weight_ptr,
    eps,
    position_ptr,
    cos_sin_ptr,
    cos_sin_stride,
    slot_ptr,
    slot_offset_ptr,
    table_ptr,
    block_stride,
    slot_stride,
    head_stride,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    layer = tl.program_id(1)
    num_layers = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    inside = token < num_tokens
    if slot_offset_ptr is not None:
        slot_ptr += tl.load(slot_offset_ptr + layer)
    slot = tl.load(slot_ptr + token, mask=inside, other=-1).to(tl.int64)
    # A decode step takes as long as its longest chain of loads: what needs no slot is loaded before one is known.
    k_cache = _address(table_ptr, layer, DTYPE)
    v_cache = _address(table_ptr, num_layers + layer, DTYPE)
    k_scale = 1.0
    v_scale = 1.0
    if LIMIT > 0:
        k_scale = tl.load(tl.load(table_ptr + 2 * num_layers + layer).to(tl.pointer_type(tl.float32)))
        v_scale = tl.load(tl.load(table_ptr + 3 * num_layers + layer).to(tl.pointer_type(tl.float32)))
    position = tl.load(position_ptr + token, mask=inside, other=0).to(tl.int64)

    HALF: tl.constexpr = HEAD_DIM // 2
    # Every load spans rows and columns: a single row would have a layout of its own, and K, cos and sin
    # would go through shared memory to meet it.
    col = tl.broadcast_to(tl.arange(0, COLS)[None, :], (ROWS, COLS))
    mask = inside[:, None] & (col < HALF)
    source = token.to(tl.int64) * kv_stride + (layer * 2 * NUM_HEADS + head) * HEAD_DIM
    k_in = kv_ptr + source[:, None] + col
    v_in = k_in + NUM_HEADS * HEAD_DIM
    k1 = tl.load(k_in, mask=mask, other=0.0).to(tl.float32)
    k2 = tl.load(k_in + HALF, mask=mask, other=0.0).to(tl.float32)
    v1 = tl.load(v_in, mask=mask, other=0.0)
    v2 = tl.load(v_in + HALF, mask=mask, other=0.0)
    weight = weight_ptr + layer * HEAD_DIM + col
    w1 = tl.load(weight, mask=col < HALF, other=0.0).to(tl.float32)
    w2 = tl.load(weight + HALF, mask=col < HALF, other=0.0).to(tl.float32)

    # A negative slot is padding or a rejected row: nothing of it is written, its position may be anything.
    mask = mask & (slot >= 0)[:, None]
    angle = cos_sin_ptr + position[:, None] * cos_sin_stride + col
    cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=mask, other=0.0).to(tl.float32)

    page = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    target = (page + head * head_stride)[:, None] + col
    # V is stored before K's norm: otherwise the compiler sinks V's loads to their stores, behind the norm.
    v_out = v_cache + target
    tl.store(v_out, _encode(v1.to(tl.float32), v_scale, DTYPE, LIMIT), mask=mask)
    tl.store(v_out + HALF, _encode(v2.to(tl.float32), v_scale, DTYPE, LIMIT), mask=mask)

    scale = tl.rsqrt(tl.sum(k1 * k1 + k2 * k2, axis=1) / HEAD_DIM + eps)[:, None]
    k1 = k1 * scale * w1
    k2 = k2 * scale * w2
    k_out = k_cache + target
    tl.store(k_out, _encode(k1 * cos - k2 * sin, k_scale, DTYPE, LIMIT), mask=mask)
    tl.store(k_out + HALF, _encode(k2 * cos + k1 * sin, k_scale, DTYPE, LIMIT), mask=mask)


class PagedCaches(NamedTuple):
    """Where every layer's pages lie. ``table`` is int64 [4, L] on the device: addresses of K, of V and
    of the float32 K and V scales; ``strides`` count elements per block, slot and head."""

    table: torch.Tensor
    strides: tuple[int, int, int]
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


def layouts_agree(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Whether one kernel can write all caches ([blocks, block size, kv heads, head dim] views): the
    same page shape, strides and dtype in every layer, heads contiguous, addresses on 16 bytes."""
    first = keys[0]
    return first.stride(3) == 1 and all(
        cache.shape[1:] == first.shape[1:]
        and cache.stride() == first.stride()
        and cache.dtype == first.dtype
        and cache.device == first.device
        and cache.data_ptr() % 16 == 0
        for cache in (*keys, *values)
    )


def page_table(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    k_scales: Sequence[torch.Tensor],
    v_scales: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> PagedCaches | None:
    """The ``PagedCaches`` of the views, or None if their layouts differ.

    Scales are float32 scalars on the device, read at every store, so that scales calibrated later
    count. ``dtype`` is what the pages hold; vLLM keeps fp8 pages as uint8 tensors.
    """
    if not layouts_agree(keys, values):
        return None
    rows = [[t.data_ptr() for t in tensors] for tensors in (keys, values, k_scales, v_scales)]
    _, block_size, num_kv_heads, head_dim = keys[0].shape
    table = torch.tensor(rows, dtype=torch.int64, device=keys[0].device)
    return PagedCaches(table, keys[0].stride()[:3], block_size, num_kv_heads, head_dim, dtype)


def store_context_kv(
    kv_flat: torch.Tensor,
    k_norm_weights: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slots: torch.Tensor,
    slot_offsets: torch.Tensor | None,
    caches: PagedCaches,
) -> None:
    """Normalise and rotate K, and write K and V of n tokens into the pages of all L layers.

    kv_flat        [n, L * 2 * kv heads * head dim], a layer's K and then its V; rows may be strided
    k_norm_weights [L, head dim], contiguous
    positions      [n], integer; anything if the slot is negative
    cos_sin_cache  [positions, head dim]: cosines, then sines (neox pairs i and i + head dim / 2)
    slots          [n] int64, block * block size + offset; a negative slot writes nothing
    slot_offsets   [L] int64: layer l reads its slots at ``slots`` + slot_offsets[l] elements; None: at ``slots``

    Everything is computed in float32 and rounded once; fp8 pages get value / scale, saturated.
    """
    num_tokens = kv_flat.shape[0]
    if num_tokens == 0:
        return
    cols = triton.next_power_of_2(caches.head_dim // 2)
    rows = max(1, TILE // cols)
    is_fp8 = caches.dtype.itemsize == 1
    grid = (triton.cdiv(num_tokens * caches.num_kv_heads, rows), k_norm_weights.shape[0])
    _store_context_kv_kernel[grid](
        kv_flat,
        kv_flat.stride(0),
        k_norm_weights,
        eps,
        positions,
        cos_sin_cache,
        cos_sin_cache.stride(0),
        slots,
        slot_offsets,
        caches.table,
        *caches.strides,
        num_tokens,
        BLOCK_SIZE=caches.block_size,
        NUM_HEADS=caches.num_kv_heads,
        HEAD_DIM=caches.head_dim,
        DTYPE=_triton_dtype(caches.dtype),
        LIMIT=torch.finfo(caches.dtype).max if is_fp8 else 0.0,
        ROWS=rows,
        COLS=cols,
        num_warps=NUM_WARPS,
    )


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e5m2: tl.float8e5,
    }[dtype]


def page_dtype(kv_cache_dtype: str, cache: torch.Tensor) -> torch.dtype | None:
    """What the pages of a layer hold, or None for a format that this kernel does not write."""
    if kv_cache_dtype in FP8_DTYPES:
        dtype = FP8_DTYPES[kv_cache_dtype]
        # Before compute capability 8.9 Triton cannot convert to e4m3.
        old = cache.is_cuda and torch.cuda.get_device_capability(cache.device) < (8, 9)
        return None if old or cache.dtype.itemsize != 1 or torch.version.hip else dtype
    return cache.dtype if cache.dtype in PLAIN_DTYPES else None


class ContextKVWriter:
    """Writes the context K/V of a draft's attention layers (vLLM ``Attention`` modules, in order).

    k_norm_weights [L, head dim]; cos_sin_cache [positions, head dim], neox, as vLLM's rotary
    embedding keeps it; head_dim is the draft's.
    """

    def __init__(
        self,
        attn_layers: Sequence[torch.nn.Module],
        k_norm_weights: torch.Tensor,
        eps: float,
        cos_sin_cache: torch.Tensor,
        head_dim: int,
        is_neox: bool = True,
    ) -> None:
        self.layers = list(attn_layers)
        self.k_norm_weights = k_norm_weights.contiguous()
        self.eps = eps
        self.cos_sin_cache = cos_sin_cache
        self.head_dim = head_dim
        self.usable = is_neox and cos_sin_cache.shape[-1] == head_dim
        self._bound: tuple[int, ...] = ()
        self._caches: PagedCaches | None = None
        self._offsets: dict[tuple[int, ...], torch.Tensor | None] = {}

    def can_store(self, slot_mapping: torch.Tensor | Sequence[torch.Tensor | None] | None) -> bool:
        """Whether ``store`` serves these slots; if not, the caller writes layer by layer, or, if
        nothing has slots (a dummy run), not at all."""
        slots = [slot_mapping] if isinstance(slot_mapping, torch.Tensor) else slot_mapping or [None]
        return self.usable and all(s is not None for s in slots) and self._bind() is not None

    def store(
        self,
        kv_flat: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor | Sequence[torch.Tensor],
    ) -> None:
        """Write K and V of every context token, see ``store_context_kv``.

        ``slot_mapping`` is [n] for all layers, or one [n] tensor per layer (several KV groups).
        """
        caches = self._bind()
        assert caches is not None, "ask can_store first"
        slots = [slot_mapping] * len(self.layers) if isinstance(slot_mapping, torch.Tensor) else slot_mapping
        store_context_kv(
            kv_flat,
            self.k_norm_weights,
            self.eps,
            positions,
            self.cos_sin_cache,
            slots[0],
            self._slot_offsets(slots),
            caches,
        )

    def _bind(self) -> PagedCaches | None:
        # vLLM binds throwaway caches while it measures CUDA-graph memory: look at the addresses
        # every time, and build the table again only when they have changed.
        bound = tuple(layer.kv_cache.data_ptr() for layer in self.layers)
        if bound != self._bound:
            self._caches = self._describe()
            self._bound = bound
        return self._caches

    def _describe(self) -> PagedCaches | None:
        first = self.layers[0]
        same = all(
            layer.get_attn_backend().get_name() in PACKED_BACKENDS
            and layer.kv_cache_dtype == first.kv_cache_dtype
            and layer.kv_sharing_target_layer_name is None
            and layer.kv_cache.dim() == 4
            and layer.kv_cache.shape[3] == 2 * self.head_dim
            for layer in self.layers
        )
        dtype = page_dtype(first.kv_cache_dtype, first.kv_cache) if same else None
        if dtype is None:
            return None
        views = [layer.kv_cache.transpose(1, 2).split(self.head_dim, dim=-1) for layer in self.layers]
        return page_table(
            [view[0] for view in views],
            [view[1] for view in views],
            [layer._k_scale for layer in self.layers],
            [layer._v_scale for layer in self.layers],
            dtype,
        )

    def _slot_offsets(self, slots: Sequence[torch.Tensor]) -> torch.Tensor | None:
        # KV groups keep their slots in rows of one buffer: where each layer's row starts is the
        # same at every step, so that the device copy of the offsets is made once. One group needs none: None.
        start = slots[0].data_ptr()
        offsets = tuple((s.data_ptr() - start) // s.element_size() for s in slots)
        if offsets not in self._offsets:
            device = self.k_norm_weights.device
            tensor = torch.tensor(offsets, dtype=torch.int64, device=device) if any(offsets) else None
            self._offsets[offsets] = tensor
        return self._offsets[offsets]
