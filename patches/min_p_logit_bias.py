"""min_p and logit_bias beside a DFlash2 draft.

vLLM refuses both beside any drafter, since the V1 runner applies them to no verified row. The V2
runner, which every DFlash2 draft has, applies them to each row before it is verified, so that p is
what it is without a drafter. Whoever verifies on V1 is refused as before.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/sampling_params.py"
SCOPE = "SamplingParams._validate_spec_decode"

PATCH = Patch(
    name="min-p-logit-bias",
    why="min_p and logit_bias were refused beside a DFlash2 draft, whose verification applies both",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        # Some sampling parameters are not yet compatible with spec decoding.
""",
            new="""\
        # A DFlash2 draft is verified on the V2 runner, which applies both to each row.
        draft_config = getattr(speculative_config, "draft_model_config", None)
        architectures = getattr(draft_config, "architectures", None) or []
        if speculative_config.method == "dflash" and any(
            arch.startswith("DFlash2") for arch in architectures
        ):
            return

        # Some sampling parameters are not yet compatible with spec decoding.
""",
        ),
    ),
)
