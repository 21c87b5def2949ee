"""The drafter is loaded as draft_load_config says, not as the target is.

0.27.1's V2 runner hands every drafter the target's load config: a target with dummy weights gave its
drafter dummy weights, too, and drafts that are never accepted.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/dflash/utils.py"
SCOPE = "load_dflash_model"

PATCH = Patch(
    name="draft-load-config",
    why="draft_load_config was ignored: beside a target with dummy weights the drafter had random ones",
    upstream="load_dflash_model of vLLM 0.31.0",
    shipped_in="0.31.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
            vllm_config=draft_vllm_config, model_config=draft_model_config
""",
            new="""\
            vllm_config=draft_vllm_config,
            model_config=draft_model_config,
            load_config=speculative_config.draft_load_config,
""",
        ),
    ),
    shipped=((Marker(FILE, SCOPE, "get_draft_load_config(vllm_config)"),),),
)
