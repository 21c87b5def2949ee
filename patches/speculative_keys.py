"""Each key of the speculative config is honoured beside a DFlash2 drafter, or refused by name.

0.27.1 takes keys that only other drafters or the V1 runner read, and ignores them: prompt_lookup_max is even
overwritten. What a key does is written in dflash2/spec_decode/dflash2/keys.py; what was given has to be seen
before __post_init__ fills the fields in.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/config/speculative.py"
SCOPE = "SpeculativeConfig.__post_init__"

PATCH = Patch(
    name="speculative-keys",
    why="keys of the speculative config that a DFlash2 drafter does not read were taken and ignored",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="        # default.\n",
            new="""\
        # default.

        # Before defaults are filled in. A pydantic field keeps its default inside a FieldInfo.
        given = {
            name: getattr(self, name)
            for name, field in type(self).__dataclass_fields__.items()
            if getattr(self, name) != getattr(field.default, "default", field.default)
        }
""",
        ),
        Hunk(
            FILE,
            SCOPE,
            old="        return self\n",
            new="""\
        if self.method == "dflash" and any(
            arch.startswith("DFlash2")
            for arch in self.draft_model_config.architectures or ()
        ):
            from vllm.v1.worker.gpu.spec_decode.dflash2.keys import check_keys

            check_keys(self, given)
        return self
""",
        ),
    ),
)
