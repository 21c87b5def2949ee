"""What a kernel's tests and its benchmark share: loading it without vLLM, its cases, and a check against float32."""

import importlib.util
import sys
import types
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent.parent


def load_kernels(name):
    """dflash2/layers/dflash2/<name>.py as a module, with or without vLLM, which it needs for Triton alone."""
    known = sys.modules.get("vllm.triton_utils")
    sys.modules["vllm.triton_utils"] = triton_utils()
    spec = importlib.util.spec_from_file_location(f"dflash2_{name}", REPO / "dflash2/layers/dflash2" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop("vllm.triton_utils")
        if known is not None:
            sys.modules["vllm.triton_utils"] = known
    return module


def triton_utils():
    import triton
    import triton.language as tl

    stub = types.ModuleType("vllm.triton_utils")
    stub.HAS_TRITON, stub.triton, stub.tl = True, triton, tl
    return stub
