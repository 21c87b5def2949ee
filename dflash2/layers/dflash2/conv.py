# SPDX-License-Identifier: Apache-2.0
"""The grouped dynamic convolution around a DFlash2 sublayer.

    out[i, c] = sum_t (base[side, t, c] + delta[i, side, t, c // group]) * x[i - t, c]

with x = 0 before the first of each request's `num_query_per_req` rows, so that nothing crosses requests.
Side 0 filters the sublayer's input. Side 1 filters its output and is fused with what always
follows it: the residual add and the RMSNorm before the next sublayer. The two cannot share a
kernel with the norm in front of side 0, because `delta` is a projection of that norm's output.
All arithmetic is float32; bf16 is rounded to once, when a result is stored.
"""

from math import prod

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

SIDE_0_COLUMNS = 1024  # columns of one program
SIDE_0_WARPS = 4


def conv_side0(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, num_query_per_req: int) -> torch.Tensor:
    """Filter a sublayer's normed input.

    x [rows, hidden]; delta [rows, 2, taps, groups] or the projection's flat output
    [rows, 2 * taps * groups]; base [2, taps, hidden]; row r is row r % num_query_per_req of
    its request. Rows may have any stride. Returns [rows, hidden] in x's dtype. Raises ValueError for shapes
    that do not belong together.
    """
    groups = _groups(x, delta, base, num_query_per_req)
    if HAS_TRITON and x.is_cuda:
        return launch_side0(x, delta, base, num_query_per_req, groups)
    return _convolve(x, delta, base, num_query_per_req, groups, 0).to(x.dtype)


def conv_side1_add_norm(
    y: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    num_query_per_req: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter a sublayer's output, add the residual, apply the next RMSNorm.

    y and residual [rows, hidden], norm_weight [hidden], delta and base as for `conv_side0`.
    Returns (normed, residual), new tensors in y's dtype. As in vLLM's fused_add_rms_norm the
    norm is of the float32 sum, the returned residual is that sum rounded.
    """
    groups = _groups(y, delta, base, num_query_per_req)
    if residual.shape != y.shape or norm_weight.shape != y.shape[1:]:
        raise ValueError(
            f"conv_side1_add_norm: residual {tuple(residual.shape)} and norm_weight "
            f"{tuple(norm_weight.shape)} do not fit y {tuple(y.shape)}"
        )
    if HAS_TRITON and y.is_cuda:
        return launch_side1(y, delta, base, residual, norm_weight, eps, num_query_per_req, groups)
    total = _convolve(y, delta, base, num_query_per_req, groups, 1) + residual.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return (total * scale * norm_weight.float()).to(y.dtype), total.to(y.dtype)


def _groups(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, num_query_per_req: int) -> int:
    """Number of channel groups, from shapes that were checked against each other."""
    hidden, taps = x.shape[1], base.shape[1]
    width = prod(delta.shape[1:])
    groups = width // (2 * taps)
    fits = base.shape == (2, taps, hidden) and len(delta) == len(x) and num_query_per_req > 0
    if not (fits and groups and width == 2 * taps * groups and hidden % groups == 0):
        raise ValueError(
            f"DFlash2 convolution: x {tuple(x.shape)}, delta {tuple(delta.shape)}, base "
            f"{tuple(base.shape)} and num_query_per_req {num_query_per_req} do not fit; expected delta "
            "[rows, 2, taps, groups] and base [2, taps, hidden] with groups dividing hidden"
        )
    return groups


def _convolve(x, delta, base, num_query_per_req: int, groups: int, side: int) -> torch.Tensor:
    """One side in PyTorch, float32 [rows, hidden], for devices without Triton."""
    rows, hidden = x.shape
    taps = base.shape[1]
    delta = delta.reshape(rows, 2, taps, groups)[:, side].float()
    position = torch.arange(rows, device=x.device)[:, None] % num_query_per_req
    out = torch.zeros(rows, hidden, device=x.device)
    for tap in range(taps):
        kernel = base[side, tap].float() + delta[:, tap].repeat_interleave(hidden // groups, -1)
        out += torch.where(position >= tap, kernel * x.float().roll(tap, 0), 0.0)
    return out


def launch_side0(
    x: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    num_query_per_req: int,
    groups: int,
    columns: int = SIDE_0_COLUMNS,
    warps: int = SIDE_0_WARPS,
) -> torch.Tensor:
    """`conv_side0` without the checks (the benchmark sweeps columns and warps)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = min(columns, triton.next_power_of_2(x.shape[1]))
    _launch(
        _conv_kernel,
        x,
        delta,
        base,
        out,
        num_query_per_req=num_query_per_req,
        groups=groups,
        columns=columns,
        num_warps=warps,
    )
    return out


def launch_side1(
    y: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    num_query_per_req: int,
    groups: int,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`conv_side1_add_norm` without the checks (the benchmark sweeps warps)."""
    normed, total = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for _ in range(2))
    residual = _unit_columns(residual)
    columns = triton.next_power_of_2(y.shape[1])
    _launch(
        _conv_add_norm_kernel,
        y,
        delta,
        base,
        residual,
        residual.stride(0),
        norm_weight,
        normed,
        total,
        eps,
        num_query_per_req=num_query_per_req,
        groups=groups,
        columns=columns,
        num_warps=warps or side1_warps(columns),
        **side1_registers(columns * base.shape[1] * y.element_size()),
    )
    return normed, total


def _launch(kernel, x, delta, base, *arguments, num_query_per_req, groups, columns, **options):
    """One program of `kernel` per row of x and `columns` of its columns."""
    rows, hidden = x.shape
    if rows == 0:
        return
    x, delta = _unit_columns(x), _unit_columns(delta.flatten(1))
    kernel[(rows, triton.cdiv(hidden, columns))](
        x,
        x.stride(0),
        delta,
        delta.stride(0),
        base.contiguous(),
        *arguments,
        NUM_QUERY=num_query_per_req,
        HIDDEN=hidden,
        GROUPS=groups,
        TAPS=base.shape[1],
        COLUMNS=columns,
        RUN=_run(x, groups),
        **options,
    )


def side1_warps(columns: int) -> int:
    """One program owns a row: a load of 16 bytes in bf16 per thread, and more of them beyond 2048 columns."""
    return max(1, min(8, columns // 256))


def side1_registers(tap_bytes: int) -> dict[str, int]:
    """Left alone, ptxas saves registers and puts off a thread's loads: a tenth of a small batch's time, against
    as much of a batch of 64 at H 5120, where more programs fit. Beyond four taps at H 8192 it would spill."""
    return {"maxnreg": 128} if tap_bytes <= 2**16 and not torch.version.hip else {}


def _run(x: torch.Tensor, groups: int) -> int:
    """Consecutive columns of one group that a thread loads at once: 16 bytes or as many as divide the group.

    Exactly a load's: then the layout of one delta per run is that of the loads, and nothing is
    moved between threads.
    """
    group = x.shape[1] // groups
    return min(group & -group, 16 // x.element_size())


def _unit_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _conv_kernel(
    x_ptr,
    x_stride,
    delta_ptr,
    delta_stride,
    base_ptr,
    out_ptr,
    NUM_QUERY: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
):
    row = tl.program_id(0)
    start, column = _columns(tl.program_id(1), COLUMNS, RUN)
    zero = tl.zeros(column.shape, tl.float32)
    out = _filter(
        zero,
        x_ptr,
        x_stride,
        delta_ptr,
        delta_stride,
        base_ptr,
        row,
        start,
        column,
        0,
        NUM_QUERY,
        HIDDEN,
        GROUPS,
        TAPS,
    )
    tl.store(out_ptr + row.to(tl.int64) * HIDDEN + column, out, mask=start < HIDDEN)


@triton.jit
def _conv_add_norm_kernel(
    y_ptr,
    y_stride,
    delta_ptr,
    delta_stride,
    base_ptr,
    residual_ptr,
    residual_stride,
    weight_ptr,
    normed_ptr,
    total_ptr,
    eps,
    NUM_QUERY: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
):
    row = tl.program_id(0)
    start, column = _columns(0, COLUMNS, RUN)
    inside = start < HIDDEN
    residual = tl.load(residual_ptr + row.to(tl.int64) * residual_stride + column, mask=inside, other=0.0).to(
        tl.float32
    )
    # ptxas sinks a load to its first use, but not past a store. So the residual starts the sum, and the
    # weight is loaded before total's store: it arrives while the norm waits for all warps.
    total = _filter(
        residual,
        y_ptr,
        y_stride,
        delta_ptr,
        delta_stride,
        base_ptr,
        row,
        start,
        column,
        1,
        NUM_QUERY,
        HIDDEN,
        GROUPS,
        TAPS,
    )
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    out = row.to(tl.int64) * HIDDEN + column
    tl.store(total_ptr + out, total, mask=inside)
    scale = tl.rsqrt(tl.sum(total * total) / HIDDEN + eps)
    tl.store(normed_ptr + out, total * scale * weight.to(tl.float32), mask=inside)


@triton.jit
def _columns(program, COLUMNS: tl.constexpr, RUN: tl.constexpr):
    """The first column of each run, [runs, 1], and COLUMNS consecutive columns as [runs, RUN].

    RUN divides the group, so that a run needs one delta: loading that for every column again
    costs more instructions than all other loads together.
    """
    start = (program * (COLUMNS // RUN) + tl.arange(0, COLUMNS // RUN)[:, None]) * RUN
    return start, start + tl.arange(0, RUN)[None, :]


@triton.jit
def _filter(
    out,
    x_ptr,
    x_stride,
    delta_ptr,
    delta_stride,
    base_ptr,
    row,
    start,
    column,
    SIDE: tl.constexpr,
    NUM_QUERY: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """`out` and one side's output at `row` and `column`, float32; just `out` at columns beyond HIDDEN."""
    inside = start < HIDDEN
    group = start // (HIDDEN // GROUPS)
    position = tl.zeros(start.shape, tl.int32) + row % NUM_QUERY
    x_ptr += row.to(tl.int64) * x_stride + column
    delta_ptr += row.to(tl.int64) * delta_stride + SIDE * TAPS * GROUPS + group
    base_ptr += SIDE * TAPS * HIDDEN + column
    for tap in tl.static_range(TAPS):
        reaches = inside & (tap <= position)
        x = tl.load(x_ptr - tap * x_stride, mask=reaches, other=0.0).to(tl.float32)
        kernel = tl.load(base_ptr + tap * HIDDEN, mask=reaches, other=0.0).to(tl.float32)
        kernel += tl.load(delta_ptr + tap * GROUPS, mask=reaches, other=0.0).to(tl.float32)
        out += kernel * x
    return out
