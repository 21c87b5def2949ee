# SPDX-License-Identifier: Apache-2.0
"""Verification from a sparse proposal: K ids and K scores per draft step instead of a row of the vocabulary.

The same decisions as `rejection_sample` of vLLM's dense form makes, with the same noise: a token is
accepted with probability min(1, p / q) (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192) or by
block verification (Sun et al., 2024, https://arxiv.org/abs/2403.10444), and what replaces a rejected one
is drawn from max(p - q, 0). Where q is 0, which is everywhere but at K ids, that is p.
"""

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, tldevice, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_block_argmax, tl_rand32
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import (
    _compute_local_logits_stats_kernel,
    _insert_resampled_kernel,
)

STATS_BLOCK = 8192
RESAMPLE_BLOCK = 1024


@triton.jit
def _target_logsumexp(max_ptr, sumexp_ptr, rows, live, num_blocks, PADDED_BLOCKS: tl.constexpr):
    """Log-sum-exp [rows] over the vocabulary, from its blocks' maxima and sums [num_logits, num_blocks]."""
    blocks = tl.arange(0, PADDED_BLOCKS)[None, :]
    cells = rows[:, None] * num_blocks + blocks
    mask = live[:, None] & (blocks < num_blocks)
    maxima = tl.load(max_ptr + cells, mask=mask, other=float("-inf"))
    sums = tl.load(sumexp_ptr + cells, mask=mask, other=0.0)
    top = tl.max(maxima, axis=1)
    return top + tl.log(tl.sum(sums * tl.exp(maxima - top[:, None]), axis=1))


@triton.jit
def _log_proposal(ids_ptr, scores_ptr, steps, live, K: tl.constexpr, PADDED_K: tl.constexpr):
    """(ids, log q, log-sum-exp) of a request's steps: [steps, K], [steps, K], [steps]; log q is -inf past K."""
    lanes = tl.arange(0, PADDED_K)[None, :]
    cells = steps[:, None] * K + lanes
    mask = live[:, None] & (lanes < K)
    ids = tl.load(ids_ptr + cells, mask=mask, other=-1)
    scores = tl.load(scores_ptr + cells, mask=mask, other=float("-inf"))
    top = tl.max(scores, axis=1)
    logsumexp = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), axis=1))
    return ids, scores - logsumexp[:, None], logsumexp


@triton.jit
def _accept_kernel(
    # Outputs
    sampled_ptr,  # [num_reqs, S + 1]
    num_accepted_ptr,  # [num_reqs]
    target_lse_ptr,  # [num_reqs], of the rejected row
    draft_lse_ptr,  # [num_reqs], of the rejected row
    log_ratio_ptr,  # [num_reqs], the joint ratio of what was accepted; 0 under standard verification
    # Inputs
    target_logits_ptr,  # [num_logits, vocab_size]
    target_stride,
    local_argmax_ptr,  # [num_logits, num_blocks], this one and the next two
    local_max_ptr,
    local_sumexp_ptr,
    draft_sampled_ptr,  # [num_logits]
    ids_ptr,  # [max_num_reqs, S, K]
    scores_ptr,  # [max_num_reqs, S, K]
    cu_num_logits_ptr,  # [num_reqs + 1]
    idx_mapping_ptr,  # [num_reqs]
    temperature_ptr,  # [max_num_reqs]
    seeds_ptr,  # [max_num_reqs]
    pos_ptr,  # [num_logits]
    rates_ptr,  # [S] or None: acceptance rates of synthetic mode
    num_blocks,
    S: tl.constexpr,
    K: tl.constexpr,
    PADDED_S: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    BLOCK_VERIFICATION: tl.constexpr,
):
    """All steps of one request at once: nothing but the joint ratio depends on the step before."""
    req_idx = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + req_idx).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req_idx).to(tl.int64)
    num_drafts = tl.load(cu_num_logits_ptr + req_idx + 1).to(tl.int64) - start - 1
    temperature = tl.load(temperature_ptr + slot).to(tl.float32)
    seed = tl.load(seeds_ptr + slot)
    if BLOCK_VERIFICATION:
        # Drafts that were judged are drawn again next round: u is keyed by the round's anchor too.
        seed ^= tl.load(pos_ptr + start).to(tl.int64) << 32
    steps = tl.arange(0, PADDED_S)
    live = steps < num_drafts
    rows = start + steps
    drafted = tl.load(draft_sampled_ptr + rows + 1, mask=live, other=-1).to(tl.int64)
    # -1 stands for no draft: it is rejected, and its id must not be looked up.
    is_draft = live & (drafted >= 0)
    lookup = tl.maximum(drafted, 0)
    u = tl_rand32(seed, tl.load(pos_ptr + rows, mask=live, other=0), includes_zero=False)
    rates = u
    if rates_ptr is not None:
        rates = tl.load(rates_ptr + steps, mask=live, other=0.0)

    if temperature == 0.0:
        blocks = tl.arange(0, PADDED_BLOCKS)[None, :]
        mask = live[:, None] & (blocks < num_blocks)
        maxima = tl.load(local_max_ptr + rows[:, None] * num_blocks + blocks, mask=mask, other=float("-inf"))
        best = tl.argmax(maxima, axis=1)
        best = tl.load(local_argmax_ptr + rows * num_blocks + best, mask=live, other=0).to(tl.int64)
        accepted = drafted == best
        if rates_ptr is not None:
            accepted = u < rates
        accepted = accepted & is_draft
        num_accepted = tl.min(tl.where(live & (accepted == 0), steps, num_drafts), axis=0)
        # The argmax stands where the first draft was rejected, and nothing is drawn there.
        tokens = tl.where(steps < num_accepted, drafted, best)
        tl.store(sampled_ptr + req_idx * (S + 1) + steps, tokens, mask=live)
        tl.store(num_accepted_ptr + req_idx, num_accepted)
        return

    target_lse = _target_logsumexp(local_max_ptr, local_sumexp_ptr, rows, live, num_blocks, PADDED_BLOCKS)
    target = tl.load(target_logits_ptr + rows * target_stride + lookup, mask=live, other=float("-inf"))
    log_p = target.to(tl.float32) - target_lse
    ids, log_q, draft_lse = _log_proposal(ids_ptr + slot * S * K, scores_ptr + slot * S * K, steps, live, K, PADDED_K)
    chosen = tl.max(tl.where(ids == lookup[:, None], log_q, float("-inf")), axis=1)
    log_ratio = 0.0
    if BLOCK_VERIFICATION:
        ratios = tl.where(is_draft, log_p - chosen, float("-inf"))
        # [S]: the joint ratio after each draft, at most 1. One step waits for the other, but only for an addition.
        joint = tl.zeros([PADDED_S], tl.float32)
        running = 0.0
        for step in tl.static_range(S):
            ratio = tl.sum(tl.where(steps == step, ratios, 0.0), axis=0)
            running = tl.minimum(running + ratio, 0.0)
            joint = tl.where(steps == step, running, joint)
        # What a draft leaves to the step after it: the sum of max(joint * p - q, 0) over the vocabulary, which
        # is the joint ratio less what p and q share, and they share nothing but the K ids.
        after = steps + 1 < num_drafts
        next_lse = _target_logsumexp(local_max_ptr, local_sumexp_ptr, rows + 1, after, num_blocks, PADDED_BLOCKS)
        next_ids, next_log_q, _ = _log_proposal(
            ids_ptr + (slot * S + 1) * K, scores_ptr + (slot * S + 1) * K, steps, after, K, PADDED_K
        )
        known = next_ids >= 0
        cells = (rows[:, None] + 1) * target_stride + tl.where(known, next_ids, 0)
        next_logits = tl.load(target_logits_ptr + cells, mask=known, other=float("-inf")).to(tl.float32)
        next_p = tl.exp(next_logits - next_lse[:, None] + joint[:, None])
        shared = tl.sum(tl.where(known, tl.minimum(next_p, tl.exp(next_log_q)), 0.0), axis=1)
        # A placeholder proposes nothing, so it shares nothing.
        next_drafted = tl.load(draft_sampled_ptr + rows + 2, mask=after, other=-1)
        mass = tl.exp(joint)
        mass = tl.where(next_drafted >= 0, tl.maximum(mass - shared, 0.0), mass)
        remainder = mass + 1.0 - tl.exp(joint)
        threshold = tl.where(remainder > 0.0, mass / remainder, 1.0)
        threshold = tl.where(after, threshold, tl.exp(joint))
        num_accepted = tl.max(tl.where(live & (u <= threshold), steps + 1, 0), axis=0).to(tl.int64)
        # At the first draft nothing has been accepted: p stays as it is.
        log_ratio = tl.sum(tl.where(steps == num_accepted - 1, joint, 0.0), axis=0)
    else:
        accepted = log_p > tl.log(u) + chosen
        if rates_ptr is not None:
            accepted = u < rates
        accepted = accepted & is_draft
        num_accepted = tl.min(tl.where(live & (accepted == 0), steps, num_drafts), axis=0)
    rejected = steps == num_accepted
    tl.store(sampled_ptr + req_idx * (S + 1) + steps, lookup, mask=live)
    tl.store(num_accepted_ptr + req_idx, num_accepted)
    tl.store(target_lse_ptr + req_idx, tl.sum(tl.where(rejected, target_lse, 0.0), axis=0))
    tl.store(draft_lse_ptr + req_idx, tl.sum(tl.where(rejected, draft_lse, 0.0), axis=0))
    tl.store(log_ratio_ptr + req_idx, log_ratio)


@triton.jit
def _resample_kernel(
    # Outputs
    local_argmax_ptr,  # [num_reqs, num_blocks]
    local_max_ptr,  # [num_reqs, num_blocks]
    # Inputs
    num_accepted_ptr,  # [num_reqs], this one and the next three
    target_lse_ptr,
    draft_lse_ptr,
    log_ratio_ptr,
    target_logits_ptr,  # [num_logits, vocab_size]
    target_stride,
    draft_sampled_ptr,  # [num_logits]
    ids_ptr,  # [max_num_reqs, S, K]
    scores_ptr,  # [max_num_reqs, S, K]
    cu_num_logits_ptr,  # [num_reqs + 1]
    expanded_idx_mapping_ptr,  # [num_logits]
    temperature_ptr,  # [max_num_reqs]
    seeds_ptr,  # [max_num_reqs]
    pos_ptr,  # [num_logits]
    vocab_size,
    S: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    """The best of one block of the vocabulary, with noise, for the token after the accepted ones."""
    req_idx, block_idx = tl.program_id(0), tl.program_id(1)
    step = tl.load(num_accepted_ptr + req_idx)
    row = tl.load(cu_num_logits_ptr + req_idx).to(tl.int64) + step
    last = tl.load(cu_num_logits_ptr + req_idx + 1) - 1
    slot = tl.load(expanded_idx_mapping_ptr + row).to(tl.int64)
    is_bonus = row == last
    if tl.load(temperature_ptr + slot) == 0.0 and not is_bonus:
        # The argmax is in place already.
        return
    tokens = block_idx * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    logits = tl.load(target_logits_ptr + row * target_stride + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    drafted = tl.load(draft_sampled_ptr + row + 1, mask=row < last, other=-1)
    if drafted >= 0:
        log_p = logits - tl.load(target_lse_ptr + req_idx) + tl.load(log_ratio_ptr + req_idx)
        logits = log_p
        lanes = tl.arange(0, PADDED_K)
        cells = (slot * S + step) * K + lanes
        ids = tl.load(ids_ptr + cells, mask=lanes < K, other=-1)
        if tl.sum((ids // BLOCK == block_idx).to(tl.int32), axis=0) > 0:
            scores = tl.load(scores_ptr + cells, mask=lanes < K, other=float("-inf"))
            log_q = scores - tl.load(draft_lse_ptr + req_idx)
            log_q = tl.max(tl.where(tokens[:, None] == ids[None, :], log_q[None, :], float("-inf")), axis=1)
            ratio = tl.exp(log_q - log_p)
            logits = tl.where(ratio < 1.0, log_p + tldevice.log1p(-ratio), float("-inf"))
    # NaN loses every comparison: the argmax would be a lane past the vocabulary.
    logits = tl.where(logits == logits, logits, float("-inf"))
    value, index = gumbel_block_argmax(
        logits, tokens, mask, row, expanded_idx_mapping_ptr, temperature_ptr, seeds_ptr, pos_ptr,
        None, 0, None, vocab_size, APPLY_TEMPERATURE=False, USE_FP64=USE_FP64,
    )  # fmt: skip
    tl.store(local_argmax_ptr + req_idx * tl.num_programs(1) + block_idx, block_idx * BLOCK + index)
    tl.store(local_max_ptr + req_idx * tl.num_programs(1) + block_idx, value)


def rejection_sample(
    target_logits: torch.Tensor,
    proposal: "SparseProposal",
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rejection_sample` of rejection_sampler_utils for a sparse proposal; arguments and results are that one's.

    target_logits  [num_logits, vocab_size], processed and divided by T
    Returns sampled [num_reqs, S + 1] int64, of which num_sampled [num_reqs] int32 tokens count.
    """
    assert target_logits.ndim == 2 and target_logits.stride(-1) == 1
    if use_block_verification and synthetic_conditional_rates is not None:
        raise ValueError("Block verification has no synthetic acceptance rates: leave one of the two out.")
    num_reqs, num_logits = cu_num_logits.shape[0] - 1, target_logits.shape[0]
    # The target's rows may be padded past the drafter's vocabulary.
    vocab_size = min(target_logits.shape[1], proposal.vocab_size)
    k = proposal.ids.shape[-1]
    padded_k = triton.next_power_of_2(k)

    num_blocks = triton.cdiv(vocab_size, STATS_BLOCK)
    local_argmax = draft_sampled.new_empty(num_logits, num_blocks, dtype=torch.int64)
    local_max, local_sumexp = target_logits.new_empty(2, num_logits, num_blocks, dtype=torch.float32)
    _compute_local_logits_stats_kernel[(num_logits, num_blocks)](
        local_argmax, num_blocks, local_max, num_blocks, local_sumexp, num_blocks,
        # The draft's share of it: nothing is read or written.
        None, 0, None, 0, target_logits, target_logits.stride(0), None, 0, 0,
        expanded_idx_mapping, expanded_local_pos, temperature, vocab_size, num_speculative_steps,
        BLOCK_SIZE=STATS_BLOCK, HAS_DRAFT_LOGITS=False,
    )  # fmt: skip

    sampled = draft_sampled.new_empty(num_reqs, num_speculative_steps + 1, dtype=torch.int64)
    num_sampled = sampled.new_empty(num_reqs, dtype=torch.int32)
    target_lse, draft_lse, log_ratio = target_logits.new_empty(3, num_reqs, dtype=torch.float32)
    _accept_kernel[(num_reqs,)](
        sampled,
        num_sampled,
        target_lse,
        draft_lse,
        log_ratio,
        target_logits,
        target_logits.stride(0),
        local_argmax,
        local_max,
        local_sumexp,
        draft_sampled,
        proposal.ids,
        proposal.scores,
        cu_num_logits,
        idx_mapping,
        temperature,
        seed,
        pos,
        synthetic_conditional_rates,
        num_blocks,
        S=num_speculative_steps,
        K=k,
        PADDED_S=triton.next_power_of_2(num_speculative_steps),
        PADDED_K=padded_k,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK_VERIFICATION=use_block_verification,
    )

    resample_blocks = triton.cdiv(vocab_size, RESAMPLE_BLOCK)
    resampled = sampled.new_empty(num_reqs, resample_blocks)
    resampled_max = target_lse.new_empty(num_reqs, resample_blocks, dtype=torch.float64 if use_fp64 else torch.float32)
    _resample_kernel[(num_reqs, resample_blocks)](
        resampled,
        resampled_max,
        num_sampled,
        target_lse,
        draft_lse,
        log_ratio,
        target_logits,
        target_logits.stride(0),
        draft_sampled,
        proposal.ids,
        proposal.scores,
        cu_num_logits,
        expanded_idx_mapping,
        temperature,
        seed,
        pos,
        vocab_size,
        S=num_speculative_steps,
        K=k,
        PADDED_K=padded_k,
        BLOCK=RESAMPLE_BLOCK,
        USE_FP64=use_fp64,
    )
    _insert_resampled_kernel[(num_reqs,)](
        sampled, sampled.stride(0), num_sampled,
        resampled, resample_blocks, resampled_max, resample_blocks, resample_blocks,
        cu_num_logits, expanded_idx_mapping, temperature,
        PADDED_RESAMPLE_NUM_BLOCKS=triton.next_power_of_2(resample_blocks),
    )  # fmt: skip
    return sampled, num_sampled


@dataclass(frozen=True)
class SparseProposal:
    """The proposal that each request slot's drafts were drawn from, cached until they are verified.

    ids     [max_num_reqs, S, K] int64, the candidates of each step
    scores  [max_num_reqs, S, K] float32, their scores over T: q is their softmax, and 0 for every other token
    """

    ids: torch.Tensor
    scores: torch.Tensor
    vocab_size: int

    # The rejection sampler asks the proposal for it.
    rejection_sample = staticmethod(rejection_sample)

    @classmethod
    def empty(cls, max_num_reqs: int, steps: int, k: int, vocab_size: int, device: torch.device) -> "SparseProposal":
        """Proposals of slots that nobody has drafted for: all mass on token 0."""
        ids = torch.empty(max_num_reqs, steps, k, dtype=torch.int64, device=device)
        proposal = cls(ids, torch.empty_like(ids, dtype=torch.float32), vocab_size)
        proposal.reset(slice(None))
        return proposal

    def reset(self, slots: int | slice | torch.Tensor) -> None:
        """Nothing was drawn for these slots yet: their padded drafts are token 0, so that is where q is 1."""
        self.ids[slots] = 0
        self.scores[slots] = float("-inf")
        self.scores[slots, :, 0] = 0.0
