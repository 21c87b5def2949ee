"""Finds what a Triton kernel touches outside the tensors it was given, under Triton's interpreter.

A kernel sees addresses only: one that lies past the end of its tensor is somebody else's memory and looks
like any other. While `watch` is on, each access of each kernel is compared with the extent of the views
that the kernel was launched with; a row of a larger tensor ends where the row ends.

Kernels that read addresses out of memory follow them to tensors they were not given, and are let off.
"""

import contextlib
import inspect

import numpy as np


def extent(tensor):
    """[first byte, last byte + 1] of the elements of a view."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextlib.contextmanager
def watch():
    """Gives a dict {(kernel, "reads" or "writes"): bytes past the nearest view}, filled as kernels run."""
    from triton.runtime import interpreter  # the test has set it up before (interpret.py)

    faults = {}
    launched = []  # the kernel that runs, its extents or None
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def check(what, ptrs, mask):
        name, extents = launched[-1]
        if extents is None:
            return
        touched = np.asarray(ptrs.data).ravel()[np.asarray(mask.data, dtype=bool).ravel()].astype(np.int64)
        if not touched.size:
            return
        width = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(touched.shape, bool)
        for first, end in extents:
            inside |= (touched >= first) & (touched + width <= end)
        if not inside.all():
            lost = touched[~inside]
            ends = [end for _, end in extents if end <= lost.max()]
            faults[name, what] = max(faults.get((name, what), 0), int(lost.max()) + width - max(ends, default=0))

    def checked_load(self, ptrs, mask, *rest):
        check("reads", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        check("writes", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def checked_launch(self, *arguments, **named):
        source = inspect.getsource(self.fn)
        indirect = "_load_ptr(" in source or "_address(" in source
        given = [a for a in (*arguments, *named.values()) if hasattr(a, "data_ptr") and a.numel()]
        launched.append((self.fn.__name__, None if indirect else [extent(tensor) for tensor in given]))
        try:
            return launch(self, *arguments, **named)
        finally:
            launched.pop()

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor.__call__ = checked_launch
    try:
        yield faults
    finally:
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = load, store, launch
