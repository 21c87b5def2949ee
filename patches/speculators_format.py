"""`vllm serve DRAFTER` for a checkpoint in the format of speculators serves its verifier with it.

0.27.1 passes speculators' own name of the algorithm on as the method, and has no method "dflash2".
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/transformers_utils/configs/speculators/base.py"
SCOPE = "SpeculatorsConfig.build_vllm_speculative_config"

PATCH = Patch(
    name="speculators-format",
    why="a drafter in the format of speculators, served by its own path, had a method that vLLM does not know",
    upstream="SpeculatorsConfig.build_vllm_speculative_config of vLLM 0.29.0",
    shipped_in="0.29.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        if result["method"] == "peagle":
""",
            new="""\
        if result["method"] == "dflash2":
            result["method"] = "dflash"
        if result["method"] == "peagle":
""",
        ),
    ),
    shipped=((Marker(FILE, SCOPE, "result['method'] == 'dflash2'"),),),
)
