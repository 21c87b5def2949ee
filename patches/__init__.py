"""Every seam, in the order it is applied, and every file that is copied in."""

from patches import causality

PATCHES = (causality.PATCH,)

# source, below this repo -> destination, below site-packages
INSTALLED = {
    "dflash2/qwen3_dflash2.py": "vllm/model_executor/models/qwen3_dflash2.py",
    "dflash2/__init__.py": "vllm/v1/worker/gpu/spec_decode/dflash2/__init__.py",
    "dflash2/speculator.py": "vllm/v1/worker/gpu/spec_decode/dflash2/speculator.py",
}
