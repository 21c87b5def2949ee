# SPDX-License-Identifier: Apache-2.0
"""The walk: one path through every step's K candidates, and the proposal it was drawn from."""

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noise
from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
from vllm.v1.worker.gpu.spec_decode.speculator import DRAFT_NOISE_OFFSET

# With 4 a draft takes a twentieth longer on an H200, with 16 a sixth.
WALK_WARPS = 8
# Without Triton `tl` is a placeholder, which makes no constants.
_NOISE_OFFSET = tl.constexpr(DRAFT_NOISE_OFFSET) if HAS_TRITON else DRAFT_NOISE_OFFSET


@triton.jit
def _walk_kernel(
    # Outputs
    draft_tokens_ptr,  # [num_reqs, S]
    proposal_ids_ptr,  # [max_num_reqs, S, K] or None, as the next one
    proposal_scores_ptr,  # [max_num_reqs, S, K]
    draft_logits_ptr,  # [max_num_reqs, S, vocab_size] or None: -inf but for the proposal's scores
    draft_logits_stride_req,
    draft_logits_stride_step,
    # Inputs
    candidate_ids_ptr,  # [num_reqs, S, K]
    unary_ptr,  # [num_reqs, S, K]
    projected_ptr,  # [num_reqs, S, rank]
    projected_stride,
    predecessor_ptr,  # [vocab_size, rank]
    successor_ptr,  # [vocab_size, rank]
    anchor_ptr,  # [num_reqs] at a stride
    anchor_stride,
    idx_mapping_ptr,  # [num_reqs * S], -1 for a padded request
    sample_pos_ptr,  # [num_reqs * S]
    temperature_ptr,  # [max_num_reqs]
    seeds_ptr,  # [max_num_reqs]
    top_k_ptr,  # [max_num_reqs] or None, as the next two
    top_p_ptr,
    min_p_ptr,
    vocab_size,
    # Scratch
    noise_ptr,  # [num_reqs, S, K], None if the proposal is
    S: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    PADDED_S: tl.constexpr = triton.next_power_of_2(S)
    PADDED_K: tl.constexpr = triton.next_power_of_2(K)
    PADDED_RANK: tl.constexpr = triton.next_power_of_2(RANK)
    req_idx = tl.program_id(0).to(tl.int64)
    first = req_idx * S
    slot = tl.load(idx_mapping_ptr + first).to(tl.int64)
    token = _load_ids(anchor_ptr + req_idx * anchor_stride, True, vocab_size).to(tl.int64)
    lanes = tl.arange(0, PADDED_K)
    in_k = lanes < K
    # [K, rank], not [rank]: what is loaded with one dimension has a layout of its own, and goes through
    # shared memory at every step to meet the candidates'.
    dims = tl.broadcast_to(tl.arange(0, PADDED_RANK)[None, :], (PADDED_K, PADDED_RANK))
    in_rank = dims < RANK
    gate = tl.load(predecessor_ptr + token * RANK + dims, mask=in_rank, other=0.0)
    next_ids = _load_ids(candidate_ids_ptr + first * K + lanes, in_k, vocab_size)
    next_successors, next_unary, next_projected = _load_step(
        first, next_ids, successor_ptr, unary_ptr, projected_ptr, projected_stride,
        lanes, in_k, dims, in_rank, K, RANK,
    )  # fmt: skip
    later_ids = next_ids
    if S > 1:
        later_ids = _load_ids(candidate_ids_ptr + (first + 1) * K + lanes, in_k, vocab_size)

    temp = 0.0
    next_noise = tl.zeros([PADDED_K], tl.float32)
    if proposal_ids_ptr is not None:
        temp = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
        seed = tl.load(seeds_ptr + slot, mask=slot >= 0, other=0)
        proposal_ids_ptr += slot * S * K
        proposal_scores_ptr += slot * S * K
        steps = tl.arange(0, PADDED_S)[:, None]
        inside = (steps < S) & in_k[None, :]
        if draft_logits_ptr is not None:
            draft_logits_ptr += slot * draft_logits_stride_req
            live = (slot >= 0) & inside
            stale = tl.load(proposal_ids_ptr + steps * K + lanes[None, :], mask=live, other=0)
        # Noise needs no score, so a whole draft's is made at once, spread over all threads, and not
        # within the steps, where it would take as long as everything else.
        cells = (first + steps) * K + lanes[None, :]
        keys = _load_ids(candidate_ids_ptr + cells, inside, vocab_size)
        pos = tl.load(sample_pos_ptr + first + steps, mask=steps < S, other=0) + _NOISE_OFFSET
        noise = tl.where(temp != 0.0, gumbel_noise(keys, seed, pos, USE_FP64), 0.0)
        tl.store(noise_ptr + cells, noise, mask=inside)
        if draft_logits_ptr is not None:
            columns = draft_logits_ptr + steps * draft_logits_stride_step + stale
            tl.store(columns, float("-inf"), mask=live)
        # Other threads read the noise, and write columns that were cleared here.
        tl.debug_barrier()
        next_noise = tl.load(noise_ptr + first * K + lanes, mask=in_k, other=0.0)
    truncates = False
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + slot, mask=slot >= 0, other=K)
        top_p = tl.load(top_p_ptr + slot, mask=slot >= 0, other=1.0)
        min_p = tl.load(min_p_ptr + slot, mask=slot >= 0, other=0.0)
        truncates = (temp != 0.0) & ((top_k < K) | (top_p < 1.0) | (min_p > 0.0))
    divisor = tl.where(temp == 0.0, 1.0, temp)

    # Only the predecessor's row waits for the token before it. The rest of a step is loaded while
    # the step before is being decided, and its ids a step earlier still, or the walk would be a
    # chain of cache misses.
    for step in tl.static_range(S):
        row = first + step
        ids, successors, unary, projected, noise = next_ids, next_successors, next_unary, next_projected, next_noise
        if step + 1 < S:
            next_ids = later_ids
            if step + 2 < S:
                later_ids = _load_ids(candidate_ids_ptr + (row + 2) * K + lanes, in_k, vocab_size)
            next_successors, next_unary, next_projected = _load_step(
                row + 1, next_ids, successor_ptr, unary_ptr, projected_ptr, projected_stride,
                lanes, in_k, dims, in_rank, K, RANK,
            )  # fmt: skip
            if proposal_ids_ptr is not None:
                next_noise = tl.load(noise_ptr + (row + 1) * K + lanes, mask=in_k, other=0.0)
        gated = gate.to(tl.float32) * projected.to(tl.float32)
        scores = unary + tl.sum(successors.to(tl.float32) * gated, axis=1)
        scores = scores / divisor
        # What is drawn from and cached must be a distribution, whatever the logits hold: a score
        # that is no number is never chosen, and a row without any falls to its first candidate.
        scores = tl.where(in_k & (scores == scores), scores, float("-inf"))
        scores = tl.minimum(scores, 3.0e38)
        # Nested: the outer one is decided when the kernel is compiled.
        if top_k_ptr is not None:  # noqa: SIM102
            if truncates:
                scores = _truncate(scores, lanes, top_k, top_p, min_p)
        best, pick = tl.max(scores + noise, axis=0, return_indices=True)
        pick = tl.where(best > float("-inf"), pick, 0)
        # From memory: picking it out of ids would be one more reduction.
        token = _load_ids(candidate_ids_ptr + row * K + pick, True, vocab_size)
        if step + 1 < S:
            # Loaded before the stores, which it would otherwise wait behind.
            gate = tl.load(predecessor_ptr + token * RANK + dims, mask=in_rank, other=0.0)
        tl.store(draft_tokens_ptr + row, token)
        if proposal_ids_ptr is not None:
            hopeless = tl.where(lanes == 0, 0.0, scores)
            scores = tl.where(best > float("-inf"), scores, hopeless)
            keep = (slot >= 0) & in_k
            tl.store(proposal_ids_ptr + step * K + lanes, ids, mask=keep)
            tl.store(proposal_scores_ptr + step * K + lanes, scores, mask=keep)
            if draft_logits_ptr is not None:
                tl.store(draft_logits_ptr + step * draft_logits_stride_step + ids, scores, mask=keep)


@triton.jit
def _truncate(scores, lanes, top_k, top_p, min_p):
    """scores [K] over T, -inf for the candidates that min-p, top-k or top-p leaves out, in the sampler's order."""
    weights = tl.exp(scores - tl.max(scores, axis=0))
    kept = weights >= min_p
    # [candidate, the candidates ranked above it]
    above = (scores[None, :] > scores[:, None]) | (
        (scores[None, :] == scores[:, None]) & (lanes[None, :] < lanes[:, None])
    )
    kept = kept & (tl.sum(above.to(tl.int32), axis=1) < top_k)
    weights = tl.where(kept, weights, 0.0)
    mass_above = tl.sum(tl.where(above, weights[None, :], 0.0), axis=1)
    kept = kept & (mass_above < top_p * tl.sum(weights, axis=0))
    return tl.where(kept, scores, float("-inf"))


@triton.jit
def _load_ids(ptr, mask, vocab_size):
    # An id from a NaN row must not index past a codebook.
    return tl.minimum(tl.maximum(tl.load(ptr, mask=mask, other=0), 0), vocab_size - 1)


@triton.jit
def _load_step(
    row,
    ids,
    successor_ptr,
    unary_ptr,
    projected_ptr,
    projected_stride,
    lanes,
    in_k,
    dims,
    in_rank,
    K: tl.constexpr,
    RANK: tl.constexpr,
):
    """One step's codebook rows [K, rank], unary scores [K] and projected state, the same in all K rows."""
    successors = tl.load(successor_ptr + ids[:, None] * RANK + dims, mask=in_k[:, None] & in_rank, other=0.0)
    unary = tl.load(unary_ptr + row * K + lanes, mask=in_k, other=float("-inf"))
    projected = tl.load(projected_ptr + row * projected_stride + dims, mask=in_rank, other=0.0)
    return successors, unary, projected


def walk(
    draft_tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    unary: torch.Tensor,
    projected: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchors: torch.Tensor,
    idx_mapping: torch.Tensor,
    sample_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    proposal: SparseProposal | None = None,
    draft_logits: torch.Tensor | None = None,
    truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    use_fp64: bool = False,
) -> None:
    """Walk one path through every request's candidates, into draft_tokens [num_reqs, S].

    The score of candidate b after token p is unary(b) + <A[p] * W h, P[b]> in float32, with the
    projected state W h and the codebooks A and P [vocab_size, rank]; only the row A[p] of the token
    chosen last is touched. Without a proposal the best candidate is taken at each step. With one, a
    token is drawn from softmax(scores / T), and the ids and scores / T (the raw scores if T is 0)
    replace what the proposal holds for the request's slot. draft_logits is its dense form, -inf but for those scores.
    `truncation`, the requests' top-k, top-p and min-p, takes candidates out before the draw, and out
    of what is cached: any proposal is verified exactly, and this one is nearer to what is sampled from.

    candidate_ids  [num_reqs * S, K] int64       unary    [num_reqs * S, K] float32
    projected      [num_reqs * S, rank], W h: the hidden states after the selector's projection
    anchors        [num_reqs] int, the last verified token, at any stride
    idx_mapping    [num_reqs * S] int32, the request's slot, -1 for a padded request
    sample_pos     [num_reqs * S] int64, position of the drafted token
    temperature, seeds, and each of truncation  [max_num_reqs]
    draft_logits   [max_num_reqs, S, vocab_size]
    """
    num_reqs, steps = draft_tokens.shape
    k, rank = candidate_ids.shape[-1], projected.shape[-1]
    candidate_ids, unary = candidate_ids.contiguous(), unary.contiguous()
    noise = None
    if proposal is not None:
        noise = torch.empty_like(unary, dtype=torch.float64 if use_fp64 else torch.float32)
    _walk_kernel[(num_reqs,)](
        draft_tokens,
        proposal.ids if proposal is not None else None,
        proposal.scores if proposal is not None else None,
        draft_logits,
        draft_logits.stride(0) if draft_logits is not None else 0,
        draft_logits.stride(1) if draft_logits is not None else 0,
        candidate_ids,
        unary,
        projected,
        projected.stride(0),
        predecessor_codebook,
        successor_codebook,
        anchors,
        anchors.stride(0),
        idx_mapping,
        sample_pos,
        temperature,
        seeds,
        *(truncation or (None, None, None)),
        predecessor_codebook.shape[0],
        noise,
        S=steps,
        K=k,
        RANK=rank,
        USE_FP64=use_fp64,
        num_warps=WALK_WARPS,
    )
