# SPDX-License-Identifier: Apache-2.0
"""DFlash2 speculator: one drafter pass, K candidates a step, and a walk that picks one path.

Losslessness at temperature T rests on three things. The walk sees to two: what is cached as q is the
distribution the token was drawn from, scores / T over the K candidates and -inf elsewhere; and the
draft's noise is a stream of its own, away from the noise that verification uses for the same position.
The third, that no round draws the noise of another again, is in the seeds the input kernel hands over.
"""

from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Config
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noise, gumbel_noised_argmax
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import (
    DFlashSpeculator,
    prepare_dflash_inputs,
)

logger = init_logger(__name__)

# Added to the position that keys the walk's noise. No sequence is this long, so verification,
# which keys by the bare position, never draws the same numbers.
DRAFT_NOISE_OFFSET = 2**30
# With 4 a draft takes a twentieth longer on an H200, with 16 a sixth.
WALK_WARPS = 8
_NOISE_OFFSET = tl.constexpr(DRAFT_NOISE_OFFSET) if HAS_TRITON else DRAFT_NOISE_OFFSET


@triton.jit
def _walk_kernel(
    # Outputs
    draft_tokens_ptr,  # [num_reqs, S]
    draft_logits_ptr,  # [max_num_reqs, S, vocab_size] or None
    draft_logits_stride_req,
    draft_logits_stride_step,
    cached_ids_ptr,  # [max_num_reqs, S, K]: where draft_logits is not -inf
    # Inputs
    candidate_ids_ptr,  # [num_reqs, S, K]
    unary_ptr,  # [num_reqs, S, K]
    hidden_ptr,  # [num_reqs, S, rank]
    hidden_stride,
    predecessor_ptr,  # [vocab_size, rank]
    successor_ptr,  # [vocab_size, rank]
    anchor_ptr,  # [num_reqs] at a stride
    anchor_stride,
    idx_mapping_ptr,  # [num_reqs * S], -1 for a padded request
    sample_pos_ptr,  # [num_reqs * S]
    temperature_ptr,  # [max_num_reqs]
    seeds_ptr,  # [max_num_reqs]
    vocab_size,
    # Scratch
    noise_ptr,  # [num_reqs, S, K], None where draft_logits is
    S: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_S: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    USE_FP64: tl.constexpr,
):
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
    next_successors, next_unary, next_hidden = _load_step(
        first, next_ids, successor_ptr, unary_ptr, hidden_ptr, hidden_stride,
        lanes, in_k, dims, in_rank, K, RANK,
    )  # fmt: skip
    later_ids = next_ids
    if S > 1:
        later_ids = _load_ids(candidate_ids_ptr + (first + 1) * K + lanes, in_k, vocab_size)

    temp = 0.0
    next_noise = tl.zeros([PADDED_K], tl.float32)
    if draft_logits_ptr is not None:
        temp = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
        seed = tl.load(seeds_ptr + slot, mask=slot >= 0, other=0)
        draft_logits_ptr += slot * draft_logits_stride_req
        cached_ids_ptr += slot * S * K
        steps = tl.arange(0, PADDED_S)[:, None]
        inside = (steps < S) & in_k[None, :]
        live = (slot >= 0) & inside
        stale = tl.load(cached_ids_ptr + steps * K + lanes[None, :], mask=live, other=0)
        # Noise needs no score, so a whole draft's is made at once, spread over all threads, and not
        # within the steps, where it would take as long as everything else.
        cells = (first + steps) * K + lanes[None, :]
        keys = _load_ids(candidate_ids_ptr + cells, inside, vocab_size)
        pos = tl.load(sample_pos_ptr + first + steps, mask=steps < S, other=0) + _NOISE_OFFSET
        noise = tl.where(temp != 0.0, gumbel_noise(keys, seed, pos, USE_FP64), 0.0)
        tl.store(noise_ptr + cells, noise, mask=inside)
        columns = draft_logits_ptr + steps * draft_logits_stride_step + stale
        tl.store(columns, float("-inf"), mask=live)
        # Other threads read the noise, and write columns that were cleared here.
        tl.debug_barrier()
        next_noise = tl.load(noise_ptr + first * K + lanes, mask=in_k, other=0.0)
    divisor = tl.where(temp == 0.0, 1.0, temp)

    # Only the predecessor's row waits for the token before it. The rest of a step is loaded while
    # the step before is being decided, and its ids a step earlier still, or the walk would be a
    # chain of cache misses.
    for step in tl.static_range(S):
        row = first + step
        ids, successors, unary, hidden, noise = next_ids, next_successors, next_unary, next_hidden, next_noise
        if step + 1 < S:
            next_ids = later_ids
            if step + 2 < S:
                later_ids = _load_ids(candidate_ids_ptr + (row + 2) * K + lanes, in_k, vocab_size)
            next_successors, next_unary, next_hidden = _load_step(
                row + 1, next_ids, successor_ptr, unary_ptr, hidden_ptr, hidden_stride,
                lanes, in_k, dims, in_rank, K, RANK,
            )  # fmt: skip
            if draft_logits_ptr is not None:
                next_noise = tl.load(noise_ptr + (row + 1) * K + lanes, mask=in_k, other=0.0)
        gated = gate.to(tl.float32) * hidden.to(tl.float32)
        scores = unary + tl.sum(successors.to(tl.float32) * gated, axis=1)
        scores = scores / divisor
        # What is drawn from and cached must be a distribution, whatever the logits hold: a score
        # that is no number is never chosen, and a row without any falls to its first candidate.
        scores = tl.where(in_k & (scores == scores), scores, float("-inf"))
        scores = tl.minimum(scores, 3.0e38)
        best, pick = gumbel_noised_argmax(scores + noise, ids, in_k, 0, 0, 0.0, USE_FP64)
        pick = tl.where(best > float("-inf"), pick, 0)
        # From memory: picking it out of ids would be one more reduction.
        token = _load_ids(candidate_ids_ptr + row * K + pick, True, vocab_size)
        if step + 1 < S:
            # Loaded before the stores, which it would otherwise wait behind.
            gate = tl.load(predecessor_ptr + token * RANK + dims, mask=in_rank, other=0.0)
        tl.store(draft_tokens_ptr + row, token)
        if draft_logits_ptr is not None:
            hopeless = tl.where(lanes == 0, 0.0, scores)
            scores = tl.where(best > float("-inf"), scores, hopeless)
            keep = (slot >= 0) & in_k
            tl.store(draft_logits_ptr + step * draft_logits_stride_step + ids, scores, mask=keep)
            tl.store(cached_ids_ptr + step * K + lanes, ids, mask=keep)


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
    hidden_ptr,
    hidden_stride,
    lanes,
    in_k,
    dims,
    in_rank,
    K: tl.constexpr,
    RANK: tl.constexpr,
):
    """One step's codebook rows [K, rank], unary scores [K] and hidden state, the same in all K rows."""
    successors = tl.load(successor_ptr + ids[:, None] * RANK + dims, mask=in_k[:, None] & in_rank, other=0.0)
    unary = tl.load(unary_ptr + row * K + lanes, mask=in_k, other=float("-inf"))
    hidden = tl.load(hidden_ptr + row * hidden_stride + dims, mask=in_rank, other=0.0)
    return successors, unary, hidden


def walk(
    draft_tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    unary: torch.Tensor,
    hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchors: torch.Tensor,
    idx_mapping: torch.Tensor,
    sample_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    cached_ids: torch.Tensor | None = None,
    use_fp64: bool = False,
) -> None:
    """Walk one path through every request's candidates, into draft_tokens [num_reqs, S].

    The score of candidate b after token p is unary(b) + <A[p] * h, P[b]> in float32, with the
    codebooks A and P [vocab_size, rank]; only the row A[p] of the token chosen last is touched.
    Without draft_logits the best candidate is taken at each step. With it, a token is drawn from
    softmax(scores / T), and scores / T (the raw scores where T is 0) replace what the request's
    slot holds: -inf but for the K candidates.

    candidate_ids  [num_reqs * S, K] int64       unary    [num_reqs * S, K] float32
    hidden         [num_reqs * S, rank], the projected states (W h)
    anchors        [num_reqs] int, the last verified token, at any stride
    idx_mapping    [num_reqs * S] int32, the request's slot, -1 for a padded request
    sample_pos     [num_reqs * S] int64, position of the drafted token
    temperature, seeds  [max_num_reqs]
    draft_logits   [max_num_reqs, S, vocab_size]  cached_ids  [max_num_reqs, S, K] int64
    """
    num_reqs, steps = draft_tokens.shape
    k, rank = candidate_ids.shape[-1], hidden.shape[-1]
    candidate_ids, unary = candidate_ids.contiguous(), unary.contiguous()
    noise = None
    if draft_logits is not None:
        noise = torch.empty_like(unary, dtype=torch.float64 if use_fp64 else torch.float32)
    _walk_kernel[(num_reqs,)](
        draft_tokens,
        draft_logits,
        draft_logits.stride(0) if draft_logits is not None else 0,
        draft_logits.stride(1) if draft_logits is not None else 0,
        cached_ids,
        candidate_ids,
        unary,
        hidden,
        hidden.stride(0),
        predecessor_codebook,
        successor_codebook,
        anchors,
        anchors.stride(0),
        idx_mapping,
        sample_pos,
        temperature,
        seeds,
        predecessor_codebook.shape[0],
        noise,
        S=steps,
        K=k,
        RANK=rank,
        PADDED_S=triton.next_power_of_2(steps),
        PADDED_K=triton.next_power_of_2(k),
        PADDED_RANK=triton.next_power_of_2(rank),
        USE_FP64=use_fp64,
        num_warps=WALK_WARPS,
    )


class DFlash2Speculator(DFlashSpeculator):
    _speculator_name = "DFlash2"

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        hf_config = vllm_config.speculative_config.draft_model_config.hf_config
        config = DFlash2Config.from_hf_config(hf_config)
        steps = vllm_config.speculative_config.num_speculative_tokens
        check_steps(steps, getattr(hf_config, "block_size", None))
        cache = describe_cache(vllm_config, hf_config.vocab_size)
        if cache:
            logger.info("%s", cache)
        try:
            super().__init__(vllm_config, device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"The DFlash2 speculator's buffers do not fit. {cache} Lower "
                "--max-num-seqs, or draft greedily."
            ) from error
        # The columns of draft_logits that are not -inf, so that a draft clears K
        # of them and not the vocabulary.
        self.cached_ids = torch.zeros(
            self.max_num_reqs, steps, config.selector_top_k, dtype=torch.int64, device=device
        )

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        return torch.float32, float("-inf")

    def reset_slot(self, req_idx: int) -> None:
        """A new request takes the slot: its cached proposal becomes one-hot on token 0.

        The scheduler pads a new request's drafts with token 0, which were never
        drawn; a verifier must read q(0) = 1 for them, or it emits them unseen.
        """
        super().reset_slot(req_idx)
        self.cached_ids[req_idx].zero_()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        self._compile_input_kernel()

    def _compile_input_kernel(self) -> None:
        """Compile the input kernel for every block size it may choose.

        The size follows the longest prompt chunk of a batch, and a dummy run
        meets one of them; the others would be compiled while a request waits.
        """
        gid = self.draft_kv_cache_group_id
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        for block in (16, 32, 64, 128, 256):
            num_tokens = block - self.num_query_per_req
            if not 0 < num_tokens <= self.max_num_tokens:
                continue
            prepare_dflash_inputs(
                self.input_buffers,
                self.block_tables.slot_mappings[gid],
                self.context_positions,
                self._context_slot_mappings[0],
                self.sample_indices,
                self.sample_pos,
                self.sample_idx_mapping,
                self.temperature,
                self.seeds,
                InputBatch.make_dummy(1, num_tokens, self.input_buffers),
                one,
                torch.zeros_like(one),
                torch.zeros(self.max_num_reqs, 1, dtype=torch.int64, device=self.device),
                torch.zeros(1, self.max_num_reqs, dtype=torch.int32, device=self.device),
                self.temperature,
                self.seeds,
                self.block_tables.input_block_tables[gid],
                self.block_tables.kernel_block_sizes[gid],
                self.parallel_drafting_token_id,
                self.num_query_per_req,
                self.num_speculative_steps,
                self.max_num_reqs,
                self.max_num_tokens,
                self.max_model_len,
                self.sample_from_anchor,
            )

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        last_hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        num_sample = num_reqs * self.num_speculative_steps
        hidden = last_hidden_states[self.sample_indices[:num_sample]]
        candidate_ids, unary = self.model.compute_candidates(hidden)
        selector = self.model.model.candidate_selector
        walk(
            self.draft_tokens[:num_reqs],
            candidate_ids,
            unary,
            selector.hidden_projection(hidden),
            selector.predecessor_codebook,
            selector.successor_codebook,
            self.input_buffers.input_ids[: num_reqs * self.num_query_per_req : self.num_query_per_req],
            self.sample_idx_mapping[:num_sample],
            self.sample_pos[:num_sample],
            self.temperature,
            self.seeds,
            self.draft_logits,
            self.cached_ids,
            self.use_fp64_gumbel,
        )


def check_steps(steps: int, block_size: int | None) -> None:
    """Refuse S <= 0; warn once where S is not what the checkpoint was trained for."""
    if steps <= 0:
        raise ValueError(
            f"DFlash2 drafter: num_speculative_tokens must be positive, got {steps}."
        )
    if block_size is not None and steps != block_size - 1:
        logger.warning_once(
            "num_speculative_tokens is %d, but the DFlash2 drafter was trained with "
            "block_size %d (%d draft tokens): expect a lower acceptance.",
            steps,
            block_size,
            block_size - 1,
        )


def describe_cache(vllm_config: VllmConfig, vocab_size: int) -> str:
    """What the cached proposal takes, in words; empty where drafting is greedy."""
    spec_config = vllm_config.speculative_config
    if spec_config.draft_sample_method != "probabilistic":
        return ""
    seqs = vllm_config.scheduler_config.max_num_seqs
    steps = spec_config.num_speculative_tokens
    gib = seqs * steps * vocab_size * 4 / 2**30
    return (
        f"The cached proposal distribution takes {gib:.2f} GiB: max_num_seqs {seqs} "
        f"x {steps} draft tokens x vocabulary {vocab_size}, float32."
    )
