"""A placeholder (-1) among the drafts ends the block; it was drawn from nothing.

Block verification of 0.27.1 reads the logit of token -1, and both methods correct a placeholder with
max(p - q), where q is whatever the slot's cache still holds. Here its joint ratio is 0, so it is never
accepted; the draft before it is judged as the last of the block; the token in its place comes from p.
(Sun et al., Block Verification Accelerates Speculative Decoding, 2024: with no proposal at the next
step the residual mass there is the joint ratio itself, and h becomes that ratio.)
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py"

PATCH = Patch(
    name="block-verify-placeholders",
    why="placeholder drafts are read out of bounds and corrected with another draft's proposal",
    upstream="placeholder handling of the rejection kernels in vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "_compute_global_residual_mass",
            old="""\
    if HAS_DRAFT_LOGITS:
        blocks = tl.arange(0, PADDED_VOCAB_NUM_BLOCKS)
""",
            new="""\
    draft_token = tl.load(draft_sampled_ptr + logit_idx + 1).to(tl.int64)
    is_placeholder = draft_token < 0
    draft_token = tl.maximum(draft_token, 0)
    if HAS_DRAFT_LOGITS:
        blocks = tl.arange(0, PADDED_VOCAB_NUM_BLOCKS)
""",
        ),
        Hunk(
            FILE,
            "_compute_global_residual_mass",
            old="        return tl.sum(partials, axis=0)\n",
            new="        return tl.where(is_placeholder, prefix_joint_ratio, tl.sum(partials, axis=0))\n",
        ),
        Hunk(
            FILE,
            "_compute_global_residual_mass",
            old="""\
        draft_token = tl.load(draft_sampled_ptr + logit_idx + 1).to(tl.int64)
        target_lse = _compute_global_logsumexp(
""",
            new="        target_lse = _compute_global_logsumexp(\n",
        ),
        Hunk(
            FILE,
            "_compute_global_residual_mass",
            old="        return prefix_joint_ratio * (1.0 - m_b)\n",
            new="        return prefix_joint_ratio * tl.where(is_placeholder, 1.0, 1.0 - m_b)\n",
        ),
        Hunk(
            FILE,
            "_compute_cumulative_log_p_kernel",
            old="""\
        draft_token = tl.load(draft_sampled_ptr + logit_idx + 1).to(tl.int64)
""",
            new="""\
        draft_token = tl.load(draft_sampled_ptr + logit_idx + 1).to(tl.int64)
        is_placeholder = draft_token < 0
        draft_token = tl.maximum(draft_token, 0)
""",
        ),
        Hunk(
            FILE,
            "_compute_cumulative_log_p_kernel",
            old="        log_p = tl.minimum(log_p + (target_logprob - draft_logprob), 0.0)\n",
            new="""\
        log_p = tl.minimum(log_p + (target_logprob - draft_logprob), 0.0)
        log_p = tl.where(is_placeholder, float("-inf"), log_p)
""",
        ),
        Hunk(
            FILE,
            "_resample_kernel",
            old="    if is_bonus:\n",
            new="""\
    next_ptr = draft_sampled_ptr + resample_token_idx + 1
    rejected = tl.load(next_ptr, mask=resample_token_idx < end_idx - 1, other=0)
    if is_bonus | (rejected < 0):
        # A placeholder has no proposal to correct for: like the bonus token.
""",
        ),
    ),
    shipped=((Marker(FILE, "_resample_kernel", "is_bonus or not is_valid_rejected_draft"),),),
)
