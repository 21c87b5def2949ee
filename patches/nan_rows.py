"""A row of NaN logits must not produce a token id outside the vocabulary.

NaN loses every comparison, so the argmax of such a row ends in the block's padding and vLLM emits
id >= vocab_size; the next embedding gather is out of bounds. Here NaN counts as -inf whenever a token is
chosen, which makes the worst row choose token 0. A proposal of NaN is rejected for certain; the token
is then drawn from p, which keeps standard verification exact.
"""

from _patchlib import Hunk, Marker, Patch

REJECTION = "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py"
GUMBEL = "vllm/v1/worker/gpu/sample/gumbel.py"

PATCH = Patch(
    name="nan-rows",
    why="an all-NaN row would emit a token id past the vocabulary and crash the next step",
    upstream="NaN handling of _insert_resampled_kernel in vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            REJECTION,
            "_compute_local_logits_stats_kernel",
            old="        value, idx = tl.max(target_logits, axis=0, return_indices=True)\n",
            new="""\
        # NaN loses every comparison: the argmax would be a lane past the vocabulary.
        is_nan = target_logits != target_logits
        target_logits = tl.where(is_nan, float("-inf"), target_logits)
        value, idx = tl.max(target_logits, axis=0, return_indices=True)
""",
        ),
        Hunk(
            REJECTION,
            "_resample_kernel",
            old="        ratio = tl.exp(draft_log_probs - target_log_probs)\n",
            new="""\
        ratio = tl.exp(draft_log_probs - target_log_probs)
        # A proposal of NaN was rejected for certain, so the token comes from p.
        ratio = tl.where(draft_lse != draft_lse, 0.0, ratio)
""",
        ),
        Hunk(
            REJECTION,
            "_resample_kernel",
            old="    # Resample the rejected/bonus token.\n",
            new="""\
    # NaN loses every comparison: the argmax would be a lane past the vocabulary.
    is_nan = residual_logits != residual_logits
    residual_logits = tl.where(is_nan, float("-inf"), residual_logits)

    # Resample the rejected/bonus token.
""",
        ),
        Hunk(
            GUMBEL,
            "_gumbel_sample_kernel",
            old="    logits = logits.to(tl.float32)\n",
            new="""\
    logits = logits.to(tl.float32)
    # NaN loses every comparison: the argmax would be a lane past the vocabulary.
    logits = tl.where(logits != logits, float("-inf"), logits)
""",
        ),
    ),
    shipped=(
        (
            Marker(REJECTION, "_compute_global_target_argmax", "tl.where(local_max != local_max, "),
            Marker(
                REJECTION,
                "_insert_resampled_kernel",
                "tl.where(resampled_local_max != resampled_local_max, ",
            ),
        ),
    ),
)
