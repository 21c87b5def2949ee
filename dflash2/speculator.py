# SPDX-License-Identifier: Apache-2.0
"""DFlash2 speculator: one drafter pass, K candidates per step, and a walk that picks one path.

Losslessness at temperature T rests on three things. The walk sees to two: what is cached as q is the
distribution the token was drawn from, scores / T over the K candidates and 0 for every other token; and the
draft's noise is a stream of its own, away from the noise that verification uses for the same position.
The third, that no round draws the noise of another again, is in the seeds the input kernel hands over.
"""

import copy
import os
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.transformers_utils.configs.dflash2 import DFlash2Config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import (
    DFlashSpeculator,
    prepare_dflash_inputs,
)
from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
from vllm.v1.worker.gpu.spec_decode.dflash2.walk import walk
from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)

# The LM head scores so many draft rows at once. More gain it no speed and cost rows x vocabulary: a full
# batch of 1,024 requests x 15 drafts would take 7 GiB from the KV cache at a vocabulary of 248,320.
MAX_LOGIT_ROWS = 2048
# Set to 1, the proposal is cached and verified as a row of the vocabulary per draft token, as other drafters' is.
DENSE_PROPOSAL = "DFLASH2_DENSE_PROPOSAL"


class DFlash2Speculator(DFlashSpeculator):
    _speculator_name = "DFlash2"

    # None if drafts are greedy. `draft_logits` is this, or its dense form.
    proposal: SparseProposal | None = None
    truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    truncated = False
    # The runner's, which knows the requests' sampling parameters.
    sampling_states: SamplingStates | None = None
    vllm_config: VllmConfig
    max_num_tokens: int

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        hf_config = vllm_config.speculative_config.draft_model_config.hf_config
        config = DFlash2Config.from_hf_config(hf_config)
        cache = describe_cache(vllm_config, hf_config.vocab_size, config.selector_top_k)
        if cache:
            logger.info("%s", cache)
        try:
            super().__init__(vllm_config, device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"The DFlash2 speculator's buffers do not fit. {cache} Lower --max-num-seqs, or draft greedily."
            ) from error
        # Every running request drafts in every step, S + 1 rows each, however few tokens the target is
        # given for them: the rows are counted by requests, not by max_num_batched_tokens.
        self.max_num_tokens = max(self.max_num_tokens, self.max_num_reqs * self.num_query_per_req)
        self.input_buffers = InputBuffers(self.max_num_reqs, self.max_num_tokens, device)

    def make_draft_logits(self, vllm_config: VllmConfig) -> "torch.Tensor | SparseProposal":
        hf_config = self.draft_model_config.hf_config
        k = DFlash2Config.from_hf_config(hf_config).selector_top_k
        shape = (self.max_num_reqs, self.num_speculative_steps, k)
        self.proposal = SparseProposal.empty(*shape, self.vocab_size, self.device)
        self.truncation = (
            torch.full((self.max_num_reqs,), k, dtype=torch.int32, device=self.device),
            torch.ones(self.max_num_reqs, device=self.device),
            torch.zeros(self.max_num_reqs, device=self.device),
        )
        return super().make_draft_logits(vllm_config) if dense_proposal() else self.proposal

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        return torch.float32, float("-inf")

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        # A LoRA wrapper reads which adapter each of the target's rows has; draft rows are others, and have none.
        for owner, name in ((model.model, "embed_tokens"), (model, "lm_head")):
            if isinstance(shared := getattr(owner, name, None), BaseLayerWithLoRA):
                delattr(owner, name)
                setattr(owner, name, shared.base_layer)
        return model

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        tables = with_own_slots(block_tables, self.max_num_tokens)
        super().set_attn(model_state, kv_cache_config, tables, target_input_buffers, target_attn_groups)
        logger.info("%s", self.describe_buffers())

    def describe_buffers(self) -> str:
        """What a draft takes of memory beside weights and cached K/V, in words."""
        buffers = (*vars(self.input_buffers).values(), self.block_tables.slot_mappings)
        held = sum(buffer.nbytes for buffer in buffers if isinstance(buffer, torch.Tensor))
        scored = min(self.max_num_reqs * self.num_speculative_steps, MAX_LOGIT_ROWS)
        logits = scored * self.vocab_size * self.dtype.itemsize // self.vllm_config.parallel_config.tensor_parallel_size
        return (
            f"DFlash2 drafts in buffers of its own, {held / 2**20:.2f} MiB for max_num_seqs {self.max_num_reqs} x "
            f"{self.num_query_per_req} rows, and needs {logits / 2**20:.1f} MiB for the logits of {scored} rows at a "
            f"time. The target keeps all of max_num_batched_tokens {self.scheduler_config.max_num_batched_tokens}."
        )

    def reset_slot(self, req_idx: int) -> None:
        """A new request takes the slot: its cached proposal becomes one-hot on token 0.

        The scheduler pads a new request's drafts with token 0, which were never
        drawn; a verifier must read q(0) = 1 for them, or it emits them unseen.
        """
        if self.proposal is not None:
            self.proposal.reset(req_idx)
        if isinstance(self.draft_logits, torch.Tensor):
            super().reset_slot(req_idx)

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._follow_truncation(input_batch.idx_mapping_np)
        return super().propose(input_batch, *args, **kwargs)

    def _follow_truncation(self, slots: np.ndarray) -> None:
        """Copy top-k, top-p and min-p to where the captured walk reads them, if a request of the batch has any."""
        states, buffers = self.sampling_states, self.truncation
        if states is None or buffers is None:
            return
        wanted = bool(
            np.any(states.top_k.np[slots] != states.vocab_size)
            or np.any(states.top_p.np[slots] != 1.0)
            or np.any(states.min_p.np[slots] != 0.0)
        )
        # The batch after one that was truncated has to take it out again.
        if wanted or self.truncated:
            for buffer, state in zip(buffers, (states.top_k, states.top_p, states.min_p), strict=True):
                buffer.copy_(state.gpu)
        self.truncated = wanted

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        if self.speculative_config.enforce_eager:
            cudagraph_mode = CUDAGraphMode.NONE
        # However few drafts a schedule has verified, the block is drafted whole: one query length.
        whole = self.vllm_config
        self.vllm_config = copy.copy(whole)
        self.vllm_config.speculative_config = copy.copy(self.speculative_config)
        self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.vllm_config = whole
        self._compile_input_kernel()

    def _compile_input_kernel(self) -> None:
        """Compile the input kernel for every tile size it may choose.

        The size follows the longest prompt chunk of a batch, and a dummy run
        meets one of them; the others would be compiled while a request waits.
        """
        gid = self.draft_kv_cache_group_id
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        for tile in (16, 32, 64, 128, 256):
            num_tokens = tile - self.num_query_per_req
            if not 0 < num_tokens <= len(self.context_positions):
                continue
            prepare_dflash_inputs(
                input_buffers=self.input_buffers,
                query_slot_mapping=self.block_tables.slot_mappings[gid],
                context_positions=self.context_positions,
                context_slot_mapping=self._context_slot_mappings[0],
                sample_indices=self.sample_indices,
                sample_pos=self.sample_pos,
                sample_idx_mapping=self.sample_idx_mapping,
                temperature=self.temperature,
                seeds=self.seeds,
                input_batch=InputBatch.make_dummy(1, num_tokens, self.input_buffers),
                num_sampled=one,
                num_rejected=torch.zeros_like(one),
                last_sampled=torch.zeros(self.max_num_reqs, 1, dtype=torch.int64, device=self.device),
                next_prefill_tokens=torch.zeros(1, self.max_num_reqs, dtype=torch.int32, device=self.device),
                input_temperature=self.temperature,
                input_seeds=self.seeds,
                block_table=self.block_tables.input_block_tables[gid],
                block_size=self.block_tables.kernel_block_sizes[gid],
                parallel_drafting_token_id=self.parallel_drafting_token_id,
                num_query_per_req=self.num_query_per_req,
                num_speculative_steps=self.num_speculative_steps,
                max_num_reqs=self.max_num_reqs,
                max_num_tokens=self.max_num_tokens,
                max_model_len=self.max_model_len,
                sample_from_anchor=self.sample_from_anchor,
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
        candidate_ids, unary = self._candidates(hidden)
        selector = self.model.model.candidate_selector
        walk(
            draft_tokens=self.draft_tokens[:num_reqs],
            candidate_ids=candidate_ids,
            unary=unary,
            projected=selector.hidden_projection(hidden),
            predecessor_codebook=selector.predecessor_codebook,
            successor_codebook=selector.successor_codebook,
            # The first row of each request: the anchor.
            anchors=self.input_buffers.input_ids[: num_reqs * self.num_query_per_req : self.num_query_per_req],
            idx_mapping=self.sample_idx_mapping[:num_sample],
            sample_pos=self.sample_pos[:num_sample],
            temperature=self.temperature,
            seeds=self.seeds,
            proposal=self.proposal,
            draft_logits=self.draft_logits if isinstance(self.draft_logits, torch.Tensor) else None,
            truncation=self.truncation,
            use_fp64=self.use_fp64_gumbel,
        )

    def _candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and unary scores [rows, K] of hidden [rows, hidden_size], without all rows' logits at once."""
        if len(hidden) <= MAX_LOGIT_ROWS:
            return self.model.compute_candidates(hidden)
        ids, unary = zip(*map(self.model.compute_candidates, hidden.split(MAX_LOGIT_ROWS)))
        return torch.cat(ids), torch.cat(unary)


def with_own_slots(block_tables: BlockTables, rows: int) -> BlockTables:
    """The target's page tables, with slot mappings for `rows` draft rows: the target's hold max_num_batched_tokens."""
    tables = copy.copy(block_tables)
    tables.slot_mappings = block_tables.slot_mappings.new_zeros(block_tables.num_kv_cache_groups, rows)
    return tables


def dense_proposal() -> bool:
    value = os.environ.get(DENSE_PROPOSAL, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{DENSE_PROPOSAL} must be 0 or 1, got {value!r}.")
    return value == "1"


def describe_cache(vllm_config: VllmConfig, vocab_size: int, top_k: int) -> str:
    """What the cached proposal takes, in words; empty if drafting is greedy."""
    spec_config = vllm_config.speculative_config
    if spec_config.draft_sample_method != "probabilistic":
        return ""
    seqs = vllm_config.scheduler_config.max_num_seqs
    steps = spec_config.num_speculative_tokens
    rows = f"max_num_seqs {seqs} x {steps} draft tokens x"
    if dense_proposal():
        gib = seqs * steps * vocab_size * 4 / 2**30
        return (
            f"The cached proposal distribution takes {gib:.2f} GiB: {rows} vocabulary {vocab_size}, float32, "
            f"since {DENSE_PROPOSAL} is 1."
        )
    mib = seqs * steps * top_k * 12 / 2**20
    return f"The cached proposal distribution takes {mib:.2f} MiB: {rows} {top_k} candidates, id and score."
