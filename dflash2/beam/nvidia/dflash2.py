# SPDX-License-Identifier: Apache-2.0
"""The DFlash2 drafter of Beam: the Qwen3 one, with every K/V of a draft in one place.

Layers, kernels, candidate head, loading and the checks of a config are inherited. Beam adds

- the selector as a module that scores all K x K edges of a step (serving walks one path only);
- `build_context_kv_weights` under its public name;
- refusals: if the Qwen3 drafter falls back to writing context K/V layer by layer, or serves a
  biased attention, this one raises.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn
from vllm.model_executor.models.qwen3_dflash2 import (
    DFlash2CandidateSelector,
    DFlash2Qwen3ForCausalLM,
    DFlash2Qwen3Model,
)


class DFlash2BeamCandidateSelector(DFlash2CandidateSelector):
    def forward(
        self,
        candidate_ids: torch.Tensor,
        unary_logits: torch.Tensor,
        hidden_states: torch.Tensor,
        anchor_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Edge scores [requests, steps, K, K] float32: how well candidate j of a step
        (last axis) follows candidate i of the step before it (the axis before).

        At step 0 every row is the same: only the anchor comes before it.

        candidate_ids     [requests * steps, K] int, as `compute_candidates` returns
        unary_logits      [requests * steps, K]
        hidden_states     [requests * steps, hidden_size] bfloat16, final-normed
        anchor_token_ids  [requests] int, the last verified tokens

        Raises:
            ValueError: hidden_states are not bfloat16.
        """
        if hidden_states.dtype != torch.bfloat16:
            raise ValueError(
                "DFlash2BeamCandidateSelector scores bfloat16 hidden states, got "
                f"{hidden_states.dtype}: serve with --dtype bfloat16."
            )
        k, requests = candidate_ids.shape[-1], anchor_token_ids.shape[0]
        ids = candidate_ids.reshape(requests, -1, k)
        unary = unary_logits.reshape(ids.shape)
        anchors = anchor_token_ids.to(ids.dtype)[:, None, None].expand(-1, 1, k)
        predecessors = torch.cat([anchors, ids[:, :-1]], dim=1)
        projected = self.hidden_projection(hidden_states).float()
        projected = projected.reshape(*ids.shape[:2], 1, -1)
        gates = self.predecessor_codebook[predecessors].float() * projected
        successors = self.successor_codebook[ids].float()
        return unary.float()[:, :, None] + gates @ successors.transpose(-1, -2)


class DFlash2BeamModel(DFlash2Qwen3Model):
    selector_cls = DFlash2BeamCandidateSelector

    @cached_property
    def attn_layers(self) -> list[nn.Module]:
        # As _attn_layers, which is not there before the first weights are. Finding them costs three times what
        # checking their caches does.
        return [layer.self_attn.attn for layer in self.layers]

    def build_context_kv_weights(self) -> None:
        """Stack what the context K/V of all layers needs: the K/V projections
        [L * 2 * kv_size, hidden_size] and the K-norm weights [L, head_dim].

        The start ends with it, and the first use after `load_weights` does it.
        """
        self._build_fused_kv_buffers()

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """As the Qwen3 drafter's, for layers that share one slot mapping and one
        cache layout; without slots it projects and writes nothing.

        Raises:
            ValueError: the layers' slot mappings or caches differ.
            NotImplementedError: a layer's cache is another layer's.
        """
        slots = one_slot_mapping(context_slot_mapping)
        if slots is not None:
            check_caches(self.attn_layers)
        super().precompute_and_store_context_kv(context_states, context_positions, slots)


class DFlash2BeamForCausalLM(DFlash2Qwen3ForCausalLM):
    model_cls = DFlash2BeamModel


def one_slot_mapping(
    slot_mapping: torch.Tensor | Sequence[torch.Tensor | None] | None,
) -> torch.Tensor | None:
    """The slots that all layers share; None if no layer has any.

    Layers share them when they read the same memory: comparing what it holds
    would wait for the device at every draft.
    """
    if slot_mapping is None or isinstance(slot_mapping, torch.Tensor):
        return slot_mapping
    first = slot_mapping[0]
    if first is None:
        shared = all(slots is None for slots in slot_mapping)
    else:
        shared = all(
            slots is not None and slots.data_ptr() == first.data_ptr() and slots.shape == first.shape
            for slots in slot_mapping
        )
    if not shared:
        raise ValueError(
            "DFlash2 Beam drafter: its layers have different slot mappings, so they lie in "
            "different KV cache groups. Draft with architecture DFlash2DraftModel, which "
            "serves them."
        )
    return first


def check_caches(attn_layers: Sequence[nn.Module]) -> None:
    """Refuse caches that are not laid out alike, or that belong to other layers."""
    layouts = set()
    for layer in attn_layers:
        if layer.kv_sharing_target_layer_name is not None:
            raise NotImplementedError(
                f"DFlash2 Beam drafter: {layer.layer_name} shares the KV cache of "
                f"{layer.kv_sharing_target_layer_name}; each draft layer needs its own."
            )
        cache = layer.kv_cache
        layouts.add((layer.kv_cache_dtype, cache.dtype, cache.shape, cache.stride()))
    if len(layouts) > 1:
        shown = "; ".join(
            f"{name} ({dtype}), shape {tuple(shape)}, strides {stride}"
            for name, dtype, shape, stride in sorted(layouts, key=str)
        )
        raise ValueError(
            f"DFlash2 Beam drafter: its layers' KV caches differ: {shown}. Draft with "
            "architecture DFlash2DraftModel, which serves them."
        )
