"""VLLM_USE_V2_MODEL_RUNNER=0 with a DFlash2 draft is an error, not a silently worse draft.

The candidate selector runs in the V2 speculator only. On the V1 runner the same checkpoint drafts
as DFlash1: nothing raises, acceptance just falls.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/config/vllm.py"
SCOPE = "VllmConfig.__post_init__"

PATCH = Patch(
    name="v1-runner-refused",
    why="VLLM_USE_V2_MODEL_RUNNER=0 silently served DFlash2 without its selector",
    upstream="the features the V1 runner lacks, VllmConfig of vLLM 0.29.0",
    shipped_in="0.29.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
            self._validate_v2_model_runner()
""",
            new="""\
            self._validate_v2_model_runner()
        elif self._is_dflash2_draft():
            raise ValueError(
                "VLLM_USE_V2_MODEL_RUNNER=0 cannot serve a DFlash2 draft: its candidate "
                "selector runs on the V2 model runner only, and the V1 runner would "
                "draft without it. Unset VLLM_USE_V2_MODEL_RUNNER, or serve without "
                "--speculative-config."
            )
""",
        ),
    ),
    shipped=(
        (
            Marker(
                FILE,
                "VllmConfig._get_v1_model_runner_unsupported_features",
                "self._is_dflash2_draft()",
            ),
        ),
        (
            Marker(
                FILE,
                "VllmConfig._get_v1_model_runner_unsupported_features",
                "self._is_dflash_candidate_draft()",
            ),
        ),
    ),
)
