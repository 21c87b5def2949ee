"""float16 with a DFlash2 draft is refused: the drafter's activations leave float16's range.

Checkpoints are trained in bfloat16. In float16 the hidden states overflow, every draft is NaN and
acceptance is 0 %: slower than no drafter, and nothing says so.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/config/vllm.py"
SCOPE = "VllmConfig._validate_v2_model_runner"

PATCH = Patch(
    name="float16-refused",
    why="a DFlash2 draft overflows in float16: NaN drafts, none accepted, and no error",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        unsupported = self._get_v2_model_runner_unsupported_features()
""",
            new="""\
        if self._is_dflash2_draft() and self.model_config.dtype == torch.float16:
            raise ValueError(
                "dtype float16 cannot serve a DFlash2 draft: its activations overflow it "
                "and no draft is ever accepted. Use --dtype bfloat16."
            )

        unsupported = self._get_v2_model_runner_unsupported_features()
""",
        ),
    ),
)
