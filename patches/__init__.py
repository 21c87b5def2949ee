"""Every seam, in the order it is applied, and every file that is copied in."""

from patches import (
    causality,
    draft_logits,
    noised_argmax,
    registry,
    selection,
    subclass_seams,
    vocab_parallel_top_k,
)

PATCHES = (
    # The port itself: vLLM has all of it from 0.28.0.
    causality.PATCH,
    subclass_seams.PATCH,
    registry.PATCH,
    vocab_parallel_top_k.PATCH,
    noised_argmax.PATCH,
    selection.PATCH,
    draft_logits.PATCH,
    # Further fixes that a serve on 0.27.1 needs.
)

# source, below this repo -> destination, below site-packages
INSTALLED = {
    "dflash2/qwen3_dflash2.py": "vllm/model_executor/models/qwen3_dflash2.py",
    "dflash2/__init__.py": "vllm/v1/worker/gpu/spec_decode/dflash2/__init__.py",
    "dflash2/speculator.py": "vllm/v1/worker/gpu/spec_decode/dflash2/speculator.py",
    "dflash2/layers.py": "vllm/model_executor/layers/dflash2/__init__.py",
    "dflash2/top_k.py": "vllm/model_executor/layers/dflash2/top_k.py",
    "dflash2/conv.py": "vllm/model_executor/layers/dflash2/conv.py",
}
