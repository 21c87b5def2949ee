"""The registry maps a checkpoint's architecture string to the module that serves it."""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/model_executor/models/registry.py"

PATCH = Patch(
    name="registry",
    why="a checkpoint whose architecture is DFlash2DraftModel finds its class",
    upstream="_SPECULATIVE_DECODING_MODELS of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "",
            old="""\
    "DFlashDraftModel": ("qwen3_dflash", "DFlashQwen3ForCausalLM"),
""",
            new="""\
    "DFlashDraftModel": ("qwen3_dflash", "DFlashQwen3ForCausalLM"),
    "DFlash2DraftModel": ("qwen3_dflash2", "DFlash2Qwen3ForCausalLM"),
""",
        ),
    ),
    shipped=((Marker(FILE, "", "'DFlash2DraftModel'"),),),
    core=True,
)
