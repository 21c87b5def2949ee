"""A DFlash2 draft gets its own speculator, and the V2 model runner that has one.

Both halves are needed: on the V1 runner the same checkpoint drafts as DFlash1, without its
selector, and raises nothing.
"""

from _patchlib import Hunk, Marker, Patch

CONFIG = "vllm/config/vllm.py"
SPECULATORS = "vllm/v1/worker/gpu/spec_decode/__init__.py"

PATCH = Patch(
    name="selection",
    why="a DFlash2 draft is given DFlash2Speculator and the V2 runner; V1 would drop its selector",
    upstream="_is_dflash2_draft and init_speculator of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            CONFIG,
            "VllmConfig.use_v2_model_runner",
            old="""\
        if self._dflash_needs_multi_kv_group():
            return True
""",
            new="""\
        if self._dflash_needs_multi_kv_group():
            return True

        if self._is_dflash2_draft():
            return True
""",
        ),
        Hunk(
            CONFIG,
            "VllmConfig",
            old="""\
    def _dflash_needs_multi_kv_group(self) -> bool:
""",
            new='''\
    def _is_dflash2_draft(self) -> bool:
        """Whether the draft is a DFlash2 one, which only the V2 runner serves."""
        spec = self.speculative_config
        if spec is None or spec.method != "dflash":
            return False
        draft_config = getattr(spec, "draft_model_config", None)
        architectures = getattr(draft_config, "architectures", None) or []
        return any(arch.startswith("DFlash2") for arch in architectures)

    def _dflash_needs_multi_kv_group(self) -> bool:
''',
        ),
        Hunk(
            SPECULATORS,
            "init_speculator",
            old="""\
    if speculative_config.method == "dflash":
""",
            new="""\
    if vllm_config._is_dflash2_draft():
        from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import (
            DFlash2Speculator,
        )

        return DFlash2Speculator(vllm_config, device)
    elif speculative_config.method == "dflash":
""",
        ),
    ),
    defines=((CONFIG, "VllmConfig._is_dflash2_draft"),),
    # From 0.29 the V2 decision stands elsewhere in VllmConfig; from 0.31 the helper has another name.
    shipped=(
        (
            Marker(CONFIG, "VllmConfig", "self._is_dflash2_draft()"),
            Marker(SPECULATORS, "init_speculator", "DFlash2Speculator("),
        ),
        (
            Marker(CONFIG, "VllmConfig", "self._is_dflash_candidate_draft()"),
            Marker(SPECULATORS, "init_speculator", "DFlash2Speculator("),
        ),
    ),
    core=True,
)
