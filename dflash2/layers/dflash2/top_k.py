# SPDX-License-Identifier: Apache-2.0
"""Exact, sorted top-k of every row of a [rows, vocabulary] tensor in one Triton launch.

The selector needs the K largest logits of each draft position, with K far smaller than the
vocabulary. Sorting or histogramming the row touches every logit several times; this touches it
once. A streaming pass keeps one maximum per group of consecutive logits, at the speed of memory.
The last program to finish a row then needs a few microseconds:

    the k-th largest maximum of any k or more disjoint sets of logits is a lower bound of the
    row's k-th largest logit

(each of those k sets holds a logit at least as large). Maxima of groups dealt out to a few dozen
sets give a bound that little more than k logits reach; only they, found by way of the groups whose
maxima reach it, are ranked, by counting for each how many are before it.

From a row in which too many reach the bound (many ties, fewer than k finite logits) the best k are
taken one after another, each from the group whose maximum is best; that takes about a microsecond
per logit, whatever the row holds. Groups are consecutive logits, so that of equal maxima the one of
the lower group has the lower id.
"""

from functools import cache
from typing import NamedTuple

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

MAX_K = 64
# Two programs of 8 warps per multiprocessor, and little spilled.
PROGRAMS_PER_MULTIPROCESSOR = 2
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}


class Tile(NamedTuple):
    """How a row is cut. All powers of two; `piece` is a multiple of `group`."""

    piece: int  # logits a program loads at once
    group: int  # logits behind one maximum
    sets: int  # of groups, whose maxima give the lower bound; at least k
    slots: int  # groups, and logits, that may reach the bound; at least k
    warps: int


class Counters:
    """How many programs have finished each row: what a caller of `top_k` keeps from launch to launch.

    They are zero between launches, so that none has to clear them first. One stream at a time may use
    them, CUDA graphs included, which hold their addresses: the object must outlive every graph that has
    captured a call with it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], torch.Tensor] = {}

    def get(self, rows: int, device: torch.device) -> torch.Tensor:
        """Zeros, int32, for at least `rows` rows; the same ones for the same power of two."""
        key = (triton.next_power_of_2(rows), device)
        if key in self._kept:
            return self._kept[key]
        zeros = torch.zeros(key[0], dtype=torch.int32, device=device)
        # Under capture they are cleared whenever the graph is replayed, and not before: they are that graph's alone.
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._kept[key] = zeros
        return zeros


def choose_tile(k: int) -> Tile:
    """Small groups for large k: they decide how many logits are looked at again."""
    if k <= 16:
        return Tile(piece=16384, group=128, sets=64, slots=32, warps=8)
    return Tile(piece=16384, group=32, sets=128, slots=128, warps=8)


def choose_pieces(rows: int, row_pieces: int, programs: int) -> int:
    """Pieces per program: few enough that all of them run at once, as `programs` do; with more rows than those,
    two programs per row."""
    return triton.cdiv(row_pieces, min(programs // rows or 2, row_pieces))


@cache
def programs_at_once(device: torch.device) -> int:
    return PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def top_k(
    logits: torch.Tensor, k: int, valid: int | None = None, counters: Counters | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the k largest logits of each row are, and the logits.

    logits [rows, vocabulary], bf16, float16 or float32; rows may have any stride, columns are
    contiguous. Only columns below `valid` (default: all) are looked at. Returns ids
    [rows, k] int64 and values [rows, k] float32, descending; equal values come by ascending id.
    NaN counts as -inf and is returned as -inf; ids are distinct and in range whatever the row holds.

    A caller that passes its own `counters` saves clearing some at every call. Raises ValueError for a
    k or valid that the logits cannot serve.
    """
    valid = logits.shape[1] if valid is None else valid
    if not 0 < valid <= logits.shape[1]:
        raise ValueError(f"top_k: valid = {valid}; it must be in 1 .. {logits.shape[1]}, the logits' width")
    if not 0 < k <= valid:
        raise ValueError(f"top_k: k = {k}; it must be in 1 .. {valid}")
    if HAS_TRITON and logits.is_cuda and k <= MAX_K:
        return launch(logits, k, valid, choose_tile(k), counters)
    return reference_top_k(logits, k, valid)


def reference_top_k(logits: torch.Tensor, k: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` in PyTorch, for devices without Triton and for k above MAX_K: the same order, made
    total by packed keys."""
    x = logits[:, :valid].float()
    x = torch.where(x.isnan(), float("-inf"), x) + 0.0  # -0.0 + 0.0 is +0.0: equal values, equal bits
    bits = x.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    column = torch.arange(valid, device=x.device)
    ids = torch.topk((order << 32) - column, k, dim=1).indices
    return ids, x.gather(1, ids)


def launch(
    logits: torch.Tensor,
    k: int,
    valid: int,
    tile: Tile,
    counters: Counters | None = None,
    pieces: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k` with a given cut and no checks of k and valid (the benchmark sweeps cuts)."""
    rows, device = logits.shape[0], logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    values = torch.empty(rows, k, dtype=torch.float32, device=device)
    if rows == 0:
        return ids, values
    row_pieces = triton.cdiv(valid, tile.piece)
    pieces = pieces or choose_pieces(rows, row_pieces, programs_at_once(device))
    _top_k_kernel[(rows * triton.cdiv(row_pieces, pieces),)](
        logits,
        logits.stride(0),
        valid,
        # Scratch: the groups' maxima, and which groups and logits reach the bound.
        torch.empty(rows * row_pieces * (tile.piece // tile.group), dtype=logits.dtype, device=device),
        torch.empty(rows, 2, tile.slots, dtype=torch.int32, device=device),
        (counters or Counters()).get(rows, device),
        values,
        ids,
        k,
        pieces,
        PIECE=tile.piece,
        GROUP=tile.group,
        FAN=triton.next_power_of_2(triton.cdiv(valid, tile.group * tile.sets)),
        SETS=tile.sets,
        SLOTS=tile.slots,
        num_warps=tile.warps,
        **REGISTERS,
    )
    return ids, values


@triton.jit(do_not_specialize=["k", "pieces"])
def _top_k_kernel(
    logits_ptr,
    row_stride,
    valid,
    maxima_ptr,
    found_ptr,
    arrived_ptr,
    values_ptr,
    ids_ptr,
    k,
    pieces,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    FAN: tl.constexpr,
    SETS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row_pieces = tl.cdiv(valid, PIECE)
    programs = tl.cdiv(row_pieces, pieces)
    row = tl.program_id(0) // programs
    first = tl.program_id(0) % programs * pieces
    last = tl.minimum(first + pieces, row_pieces)
    stored = row_pieces * (PIECE // GROUP)
    logits_ptr += row.to(tl.int64) * row_stride
    maxima_ptr += row.to(tl.int64) * stored
    found_ptr += row.to(tl.int64) * 2 * SLOTS

    group = tl.arange(0, PIECE // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    whole = tl.minimum(last, valid // PIECE)
    for piece in tl.range(first, whole, num_stages=1):
        x = tl.load(logits_ptr + piece * PIECE + column)
        tl.store(maxima_ptr + piece * (PIECE // GROUP) + group, _maximum(x))
    # Apart, because a mask that is not a multiple of the vector width makes every load scalar.
    if whole < last:
        column += whole * PIECE
        x = tl.load(logits_ptr + column, mask=column < valid, other=float("-inf"))
        tl.store(maxima_ptr + whole * (PIECE // GROUP) + group, _maximum(x))

    # Every warp's maxima must be written before the row's count says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
    if arrived == programs - 1:
        tl.store(arrived_ptr + row, 0)  # ready for the next launch
        values_ptr += row.to(tl.int64) * k
        ids_ptr += row.to(tl.int64) * k
        count = _find(logits_ptr, maxima_ptr, found_ptr, valid, stored, k, GROUP, FAN, SETS, SLOTS)
        if count <= SLOTS:
            _write_ranked(logits_ptr, found_ptr + SLOTS, values_ptr, ids_ptr, count, k, SLOTS)
        else:
            _write_one_by_one(logits_ptr, maxima_ptr, values_ptr, ids_ptr, valid, stored, k, GROUP, FAN, SETS)


@triton.jit
def _maximum(x):
    """Of each group: NaN is passed over, and -inf where there is nothing else."""
    best = tl.max(x.to(tl.float32), axis=1)
    return tl.where(best == best, best, float("-inf"))


@triton.jit
def _find(
    logits_ptr,
    maxima_ptr,
    found_ptr,
    valid,
    stored,
    k,
    GROUP: tl.constexpr,
    FAN: tl.constexpr,
    SETS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Finds the logits that may be among the best k and returns how many.

    Their columns are at found_ptr + SLOTS, ascending, if they are SLOTS or fewer.
    `stored` maxima lie in memory, -inf past the row's last group: a multiple of a power of two, so
    that loads bounded by it stay wide.
    """
    group = tl.arange(0, FAN * SETS)
    best = tl.load(maxima_ptr + group, mask=group < stored, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    # Neighbours go to different sets, for the common tokens of a vocabulary are neighbours.
    maxima = tl.max(tl.reshape(best, [FAN, SETS]), axis=0)
    as_good = tl.sum((maxima[None, :] >= maxima[:, None]).to(tl.int32), axis=1)
    bound = tl.max(tl.where(as_good >= k, maxima, float("-inf")), axis=0)
    count = _compact(found_ptr, group, (best >= bound) & (group * GROUP < valid), SLOTS)
    if count <= SLOTS:
        count = _find_in_groups(logits_ptr, found_ptr, valid, count, bound, GROUP, SLOTS)
    return count


@triton.jit
def _find_in_groups(logits_ptr, found_ptr, valid, count, bound, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """`_find`'s second half: from `count` groups at found_ptr to the columns of their logits that reach the bound."""
    slot = tl.arange(0, SLOTS)
    group = tl.load(found_ptr + slot, mask=slot < count, other=0)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (slot[:, None] < count) & (column < valid)
    x = tl.load(logits_ptr + column, mask=exists, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    reaches = tl.reshape(exists & (x >= bound), [SLOTS * GROUP])
    return _compact(found_ptr + SLOTS, tl.reshape(column, [SLOTS * GROUP]), reaches, SLOTS)


@triton.jit
def _compact(ptr, values, wanted, SLOTS: tl.constexpr):
    """Writes the wanted values one after another, at most SLOTS of them, and returns how many there are."""
    wanted = wanted.to(tl.int32)
    slot = tl.cumsum(wanted, axis=0) - 1
    tl.store(ptr + slot, values, mask=(wanted != 0) & (slot < SLOTS))
    tl.debug_barrier()  # other threads will read them
    return tl.sum(wanted, axis=0)


@triton.jit
def _write_ranked(logits_ptr, columns_ptr, values_ptr, ids_ptr, count, k, SLOTS: tl.constexpr):
    """The best k of the logits at `count` ascending columns, each put where its rank says."""
    slot = tl.arange(0, SLOTS)
    column = tl.load(columns_ptr + slot, mask=slot < count, other=0)
    x = tl.load(logits_ptr + column, mask=slot < count, other=0.0).to(tl.float32)
    order = _order(x, slot < count)
    before = (order[None, :] > order[:, None]) | ((order[None, :] == order[:, None]) & (slot[None, :] < slot[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    tl.store(values_ptr + rank, _value(order), mask=rank < k)
    tl.store(ids_ptr + rank, column.to(tl.int64), mask=rank < k)


@triton.jit
def _write_one_by_one(
    logits_ptr,
    maxima_ptr,
    values_ptr,
    ids_ptr,
    valid,
    stored,
    k,
    GROUP: tl.constexpr,
    FAN: tl.constexpr,
    SETS: tl.constexpr,
):
    """The best k of the row without a bound, from all groups' best logits that are not taken yet."""
    NOWHERE: tl.constexpr = 0x7FFFFFFF
    group = tl.arange(0, FAN * SETS)
    maxima = tl.load(maxima_ptr + group, mask=group < stored, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    best = _order(maxima, group * GROUP < valid)
    last, taken = NOWHERE, -1
    for rank in range(k):
        top = tl.max(best, axis=0)
        chosen = tl.min(tl.where(best == top, group, NOWHERE), axis=0)
        column = chosen * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits_ptr + column, mask=column < valid, other=float("-inf")).to(tl.float32)
        order = _order(x, column < valid)
        # Equal logits are taken in the order of their ids, so that only those behind the last one are left.
        taken = tl.where(top == last, taken, -1)
        taken = tl.min(tl.where((order == top) & (column > taken), column, NOWHERE), axis=0)
        left = (order < top) | ((order == top) & (column > taken))
        left = tl.max(tl.where(left, order, -2147483648), axis=0)
        best = tl.where(group == chosen, left, best)
        last = top
        tl.store(values_ptr + rank, _value(top))
        tl.store(ids_ptr + rank, taken.to(tl.int64))


@triton.jit
def _order(x, exists):
    """int32 in the order of the values, NaN as -inf, what does not exist below everything."""
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0, 0.0, x)  # -0.0 equals 0.0 but has other bits
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(exists, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def _value(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
