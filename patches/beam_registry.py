"""The registry maps DFlash2BeamDraftModel to Beam's drafter, under vLLM's own later import path."""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/model_executor/models/registry.py"

PATCH = Patch(
    name="beam-registry",
    why="a checkpoint whose architecture is DFlash2BeamDraftModel finds its class",
    upstream="_SPECULATIVE_DECODING_MODELS of vLLM 0.33.0",
    shipped_in="0.33.0",
    hunks=(
        Hunk(
            FILE,
            "",
            old="""\
    "DSparkDraftModel": ("vllm.models.deepseek_v4", "DSparkDeepseekV4ForCausalLM"),
""",
            new="""\
    "DFlash2BeamDraftModel": ("vllm.models.beam", "DFlash2BeamForCausalLM"),
    "DSparkDraftModel": ("vllm.models.deepseek_v4", "DSparkDeepseekV4ForCausalLM"),
""",
        ),
    ),
    shipped=((Marker(FILE, "", "'DFlash2BeamDraftModel'"),),),
)
