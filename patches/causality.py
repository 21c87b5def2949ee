"""A DFlash2 checkpoint says `is_causal` at the top level of its config; 0.27.1 never reads it.

Without this every sliding-window layer drafts causally: no error, only a worse draft.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/model_executor/models/qwen3_dflash.py"

PATCH = Patch(
    name="causality",
    why="a top-level is_causal decides the draft's attention; sliding layers would draft causally",
    upstream="_dflash_layer_causal of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "_dflash_layer_causal",
            old="""\
    override = (getattr(config, "dflash_config", None) or {}).get("causal")
""",
            new="""\
    override = getattr(config, "is_causal", None)
    if override is None:
        override = (getattr(config, "dflash_config", None) or {}).get("causal")
""",
        ),
    ),
    shipped=((Marker(FILE, "_dflash_layer_causal", "getattr(config, 'is_causal'"),),),
    core=True,
)
