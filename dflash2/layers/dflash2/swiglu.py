# SPDX-License-Identifier: Apache-2.0
"""The activation of a gated MLP: silu(gate) * up.

vLLM's kernel runs one block per row, so that the few rows of a draft step leave most of the GPU idle;
this one also cuts the row.
"""

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

COLUMNS = 1024  # of one program
WARPS = 4


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [rows, 2 * n], gate in the first n columns: [rows, n] in its dtype.

    Rows may have any stride. Arithmetic is float32, rounded once. Raises ValueError for an odd width.
    """
    width = gate_up.shape[1]
    if width % 2:
        raise ValueError(f"silu_and_mul: gate_up has {width} columns; gate and up need the same number each")
    if HAS_TRITON and gate_up.is_cuda:
        return launch(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def launch(gate_up: torch.Tensor, columns: int = COLUMNS, warps: int = WARPS) -> torch.Tensor:
    """`silu_and_mul` without the check (the benchmark sweeps columns and warps)."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    grid = (rows, triton.cdiv(n, columns))
    _silu_and_mul_kernel[grid](gate_up, gate_up.stride(0), out, n, COLUMNS=columns, num_warps=warps)
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, row_stride, out_ptr, n, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    gate_up_ptr += row * row_stride + column
    gate = tl.load(gate_up_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + column, gate * tl.sigmoid(gate) * up, mask=inside)
