"""A draft and the residual that replaces it must not be drawn with the same noise.

0.27.1 keys both by the position of the token's predecessor. A rejected draft then says how large the
residual's noise is, and sampled output is biased at every temperature, for DFlash, EAGLE, MTP and
DSpark alike. Adding 2**30 to the draft's position moves it to a stream of its own: positions are
int64 and no context is that long.
"""

from _patchlib import Hunk, Marker, Patch

BASE = "vllm/v1/worker/gpu/spec_decode/speculator.py"
DSPARK = "vllm/v1/worker/gpu/spec_decode/dspark/speculator.py"
GUMBEL = "vllm/v1/worker/gpu/sample/gumbel.py"

PATCH = Patch(
    name="draft-noise",
    why="the noise of a draft must be independent of its verification, or sampled output is biased",
    upstream="_DRAFT_NOISE_SALT of vLLM 0.29.0",
    shipped_in="0.29.0",
    hunks=(
        Hunk(
            BASE,
            "",
            old="logger = init_logger(__name__)\n",
            new="""\
logger = init_logger(__name__)

# Added to the position that keys a draft's noise, so that it shares none with its verification.
DRAFT_NOISE_OFFSET = 2**30
""",
        ),
        Hunk(
            BASE,
            "DraftModelSpeculator.sample_draft",
            old="""\
            # NOTE(woosuk): We must add 1 to the positions to match the Gumbel noise
            # used for draft and target sampling.
""",
            new="            # Keyed like the target's noise for this token, in a stream of the draft's own.\n",
        ),
        Hunk(
            BASE,
            "DraftModelSpeculator.sample_draft",
            old="                positions + 1,\n",
            new="                positions + (1 + DRAFT_NOISE_OFFSET),\n",
        ),
        Hunk(
            DSPARK,
            "",
            old="from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model\n",
            new="""\
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
from vllm.v1.worker.gpu.spec_decode.speculator import DRAFT_NOISE_OFFSET
""",
        ),
        Hunk(
            DSPARK,
            "DSparkSpeculator._sample_sequential",
            old="""\
                # sample_pos is the predicted token's position Q; the target
                # verifies it with the predecessor's Gumbel key (Q-1). Pass Q-1.
""",
            new="""\
                # Keyed like the target's noise for this token (the predecessor's
                # position), in a stream of the draft's own.
""",
        ),
        Hunk(
            DSPARK,
            "DSparkSpeculator._sample_sequential",
            old="                    sample_pos[:, i] - 1,\n",
            new="                    sample_pos[:, i] + (DRAFT_NOISE_OFFSET - 1),\n",
        ),
    ),
    defines=((BASE, "DRAFT_NOISE_OFFSET"),),
    shipped=((Marker(GUMBEL, "gumbel_noised_argmax", "pos + _DRAFT_NOISE_SALT"),),),
)
