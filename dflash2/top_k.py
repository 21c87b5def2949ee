"""Exact, sorted top-k of every row of a [rows, vocabulary] tensor in one Triton launch.

The selector needs the K largest logits of each draft position, with K far smaller than the
vocabulary. Sorting or histogramming the row touches every logit several times; this touches it
once, because

    the k best elements of a row lie in the k groups whose best elements are best

(a group that is not among those k has k groups before it, each holding an element that beats all
of its own). A streaming pass keeps one maximum per group of consecutive logits, at the speed of
memory. The last program to finish a row applies the statement twice, to groups of groups and to
groups, which leaves a few thousand logits to sort. Bounded for every input: nothing is a threshold
or a guess that ties or outliers could overflow.

Groups are consecutive logits, so ordering equal maxima by lower group is ordering them by lower
id; that is what makes ties exact.
"""

from typing import NamedTuple

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton

MAX_K = 64


class Tile(NamedTuple):
    """How a row is cut. All powers of two; `chunk` is a multiple of `group`."""

    chunk: int  # logits a program streams
    group: int  # logits behind one maximum
    fan: int  # maxima behind one maximum of maxima
    warps: int


class Workspace(NamedTuple):
    """Scratch of `top_k`. One stream at a time may use it; it survives CUDA graph replays."""

    maxima: torch.Tensor  # flat, of the logits' dtype
    arrived: torch.Tensor  # [rows] int32, programs done with the row; zero between launches


def choose_tile(k: int) -> Tile:
    """Small groups for large k: the final sort is over k * group logits."""
    if k <= 16:
        return Tile(chunk=32768, group=64, fan=64, warps=16)
    if k <= 32:
        return Tile(chunk=16384, group=32, fan=32, warps=8)
    return Tile(chunk=16384, group=32, fan=16, warps=8)


def make_workspace(
    max_rows: int, vocab_size: int, k: int, dtype: torch.dtype, device, tile: Tile | None = None
) -> Workspace:
    """Scratch for `top_k` of up to `max_rows` rows of `vocab_size` logits of `dtype`."""
    tile = tile or choose_tile(k)
    row = triton.cdiv(vocab_size, tile.chunk) * (tile.chunk // tile.group)
    return Workspace(
        torch.empty(max_rows * row, dtype=dtype, device=device),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


def top_k(
    logits: torch.Tensor, k: int, valid: int | None = None, workspace: Workspace | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of each row and where they are.

    logits [rows, vocabulary], bf16, float16 or float32; rows may have any stride, columns are
    contiguous. Only columns below `valid` (default: all) are looked at. Returns values
    [rows, k] float32, descending, and ids [rows, k] int64; equal values come by ascending id.
    NaN counts as -inf and is returned as -inf; ids are distinct and in range whatever the row holds.

    Pass a `make_workspace` result where launches repeat: without it scratch is allocated and
    cleared on every call. Raises ValueError for a k or valid that the logits cannot serve.
    """
    valid = logits.shape[1] if valid is None else valid
    if not 0 < valid <= logits.shape[1]:
        raise ValueError(f"top_k: valid = {valid}; it must be in 1 .. {logits.shape[1]}, the logits' width")
    if not 0 < k <= min(MAX_K, valid):
        raise ValueError(f"top_k: k = {k}; it must be in 1 .. {min(MAX_K, valid)}")
    if HAS_TRITON and logits.is_cuda:
        return launch(logits, k, valid, choose_tile(k), workspace)
    return reference_top_k(logits, k, valid)


def reference_top_k(logits: torch.Tensor, k: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` in PyTorch, for devices without Triton: the same order, made total by packed keys."""
    x = logits[:, :valid].float()
    x = torch.where(x.isnan(), float("-inf"), x) + 0.0  # -0.0 + 0.0 is +0.0: equal values, equal bits
    bits = x.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    column = torch.arange(valid, device=x.device)
    ids = torch.topk((order << 32) - column, k, dim=1).indices
    return x.gather(1, ids), ids


def launch(
    logits: torch.Tensor, k: int, valid: int, tile: Tile, workspace: Workspace | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` with a given tile and no checks of k and valid (the benchmark sweeps tiles)."""
    rows = logits.shape[0]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if workspace is None:
        workspace = make_workspace(rows, valid, k, logits.dtype, logits.device, tile)
    chunks = triton.cdiv(valid, tile.chunk)
    needed = rows * chunks * (tile.chunk // tile.group)
    maxima, arrived = workspace
    if arrived.numel() < rows or maxima.numel() < needed or maxima.dtype != logits.dtype:
        raise ValueError(
            f"top_k: the workspace is for {arrived.numel()} rows and {maxima.numel()} {maxima.dtype} maxima; "
            f"these logits need {rows} and {needed} {logits.dtype}. Make it for the largest batch."
        )
    values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return values, ids
    k_padded = max(2, triton.next_power_of_2(k))
    roots = triton.next_power_of_2(triton.cdiv(valid, tile.group * tile.fan))
    _top_k_kernel[(rows * chunks,)](
        logits,
        logits.stride(0),
        valid,
        maxima,
        arrived,
        values,
        ids,
        k,
        K_PADDED=k_padded,
        CHUNK=tile.chunk,
        GROUP=tile.group,
        FAN=tile.fan,
        ROOTS=max(roots, k_padded),
        num_warps=tile.warps,
    )
    return values, ids


@triton.jit(do_not_specialize=["k"])
def _top_k_kernel(
    logits_ptr,
    row_stride,
    valid,
    maxima_ptr,
    arrived_ptr,
    values_ptr,
    ids_ptr,
    k,
    K_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    FAN: tl.constexpr,
    ROOTS: tl.constexpr,
):
    PER_CHUNK: tl.constexpr = CHUNK // GROUP
    chunks = tl.cdiv(valid, CHUNK)
    row = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    logits_ptr += row.to(tl.int64) * row_stride
    maxima_ptr += row.to(tl.int64) * chunks * PER_CHUNK

    in_chunk = tl.arange(0, PER_CHUNK)
    column = chunk * CHUNK + in_chunk[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Two loads because a mask that is not a multiple of the vector width makes every load scalar.
    if chunk * CHUNK + CHUNK <= valid:
        x = tl.load(logits_ptr + column).to(tl.float32)
    else:
        x = tl.load(logits_ptr + column, mask=column < valid, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=1)  # passes over NaN, so only a group of nothing else yields it
    best = tl.where(best == best, best, float("-inf"))
    tl.store(maxima_ptr + chunk * PER_CHUNK + in_chunk, best)

    # Every warp's maxima must be written before the row's count says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
    if arrived == chunks - 1:
        tl.store(arrived_ptr + row, 0)  # ready for the next launch
        keys = _best_of_row(logits_ptr, maxima_ptr, valid, chunks * PER_CHUNK, GROUP, FAN, ROOTS, K_PADDED)
        rank = tl.arange(0, K_PADDED)
        out = row.to(tl.int64) * k + rank
        tl.store(values_ptr + out, _value(keys), mask=rank < k)
        tl.store(ids_ptr + out, _index(keys).to(tl.int64), mask=rank < k)


@triton.jit
def _best_of_row(
    logits_ptr,
    maxima_ptr,
    valid,
    stored,
    GROUP: tl.constexpr,
    FAN: tl.constexpr,
    ROOTS: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    """Sorted keys [K_PADDED] of the row's best logits, down from groups of groups.

    `stored` maxima lie in memory, -inf past the row's last group: a multiple of a power of two, so
    that loads bounded by it stay wide.
    """
    groups = tl.cdiv(valid, GROUP)
    root = tl.arange(0, ROOTS)
    child = root[:, None] * FAN + tl.arange(0, FAN)[None, :]
    x = tl.load(maxima_ptr + child, mask=child < stored, other=float("-inf"), cache_modifier=".cg")
    keys = _sort_key(tl.max(x.to(tl.float32), axis=1), root, root * FAN < groups)
    keys = tl.topk(keys, K_PADDED)
    keys = _best_children(maxima_ptr, _index(keys), stored, groups, FAN, K_PADDED)
    return _best_children(logits_ptr, _index(keys), valid, valid, GROUP, K_PADDED)


@triton.jit
def _best_children(ptr, parents, stored, count, FAN: tl.constexpr, K_PADDED: tl.constexpr):
    """Sorted keys [K_PADDED] of the best among the FAN consecutive children of each parent."""
    child = parents[:, None] * FAN + tl.arange(0, FAN)[None, :]
    x = tl.load(ptr + child, mask=child < stored, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    keys = _sort_key(x, child, child < count)
    return tl.topk(tl.reshape(keys, [K_PADDED * FAN]), K_PADDED)


@triton.jit
def _sort_key(x, index, exists):
    """int64 keys: by value, equal values by lower index, padding after everything, all distinct."""
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0, 0.0, x)  # -0.0 equals 0.0 but has other bits
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(exists, order, -2147483648)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value(keys):
    order = (keys >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
