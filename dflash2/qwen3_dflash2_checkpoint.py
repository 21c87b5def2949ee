# SPDX-License-Identifier: Apache-2.0
"""What a DFlash2 checkpoint must hold: the keys of its config, its tensors, and its fit to the target."""

from dataclasses import MISSING, dataclass, fields

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import get_draft_quant_config


@dataclass(frozen=True)
class DFlash2Config:
    """The keys of `dflash_config` that shape a DFlash2 drafter."""

    mask_token_id: int
    target_layer_ids: list[int]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    @classmethod
    def from_hf_config(cls, hf_config: PretrainedConfig) -> "DFlash2Config":
        """Read the keys from a draft model's config and check them.

        Raises:
            ValueError: a key is missing or cannot be served; names it and its value.
        """
        given = getattr(hf_config, "dflash_config", None) or {}
        if not given.get("use_aux_hidden_state", True):
            raise ValueError(
                "DFlash2 drafter: dflash_config.use_aux_hidden_state must be left out or true, "
                "got False: it drafts from the target's hidden states."
            )
        values = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        for f in fields(cls):
            if f.default is MISSING and f.name not in values:
                raise ValueError(
                    f"DFlash2 drafter: dflash_config.{f.name} is missing from the draft model's config.json."
                )
        config = cls(**values)
        config._check(hf_config.hidden_size, hf_config.vocab_size)
        return config

    def _check(self, hidden_size: int, vocab_size: int) -> None:
        def demand(holds: bool, key: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"DFlash2 drafter: dflash_config.{key} {rule}, got {getattr(self, key)!r}.")

        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            value = getattr(self, key)
            demand(type(value) is int and value > 0, key, "must be a positive integer")
        demand(
            hidden_size % self.conv_group_size == 0,
            "conv_group_size",
            f"must divide hidden_size {hidden_size}",
        )
        demand(
            self.selector_top_k <= vocab_size,
            "selector_top_k",
            f"must be at most vocab_size {vocab_size}",
        )
        demand(
            type(self.mask_token_id) is int and 0 <= self.mask_token_id < vocab_size,
            "mask_token_id",
            f"must be a token id below vocab_size {vocab_size}",
        )
        layers = self.target_layer_ids
        demand(
            isinstance(layers, (list, tuple)) and len(layers) > 0 and all(type(i) is int and i >= 0 for i in layers),
            "target_layer_ids",
            "must be a list of target layers, counted from 0",
        )
        for key in ("input_embedding_scale", "output_multiplier"):
            value = getattr(self, key)
            demand(
                isinstance(value, (int, float)) and 0 < value < float("inf"),
                key,
                "must be a positive number",
            )
        cap = self.final_logit_softcapping
        demand(
            isinstance(cap, (int, float)) and 0 <= cap < float("inf"),
            "final_logit_softcapping",
            "must be a number, 0 for none",
        )


def check_drafter(vllm_config: VllmConfig, config: DFlash2Config) -> None:
    """Refuse at start-up what would draft garbage or fail inside a kernel later.

    Raises:
        ValueError: drafter and target do not fit each other.
        NotImplementedError: the checkpoint is quantised.
    """
    spec_config = vllm_config.speculative_config
    hf_config = spec_config.draft_model_config.hf_config
    target_vocab = vllm_config.model_config.get_vocab_size()
    for key in ("vocab_size", "draft_vocab_size"):
        vocab = getattr(hf_config, key, None)
        if vocab is not None and vocab != target_vocab:
            raise ValueError(
                f"DFlash2 drafter: {key} {vocab} is not the target's {target_vocab}. "
                "The drafter uses the target's embedding and LM head; use the "
                "drafter that was trained for this target."
            )
    target_hidden = vllm_config.model_config.get_hidden_size()
    if hf_config.hidden_size != target_hidden:
        raise ValueError(
            f"DFlash2 drafter: hidden_size {hf_config.hidden_size} is not the target's "
            f"{target_hidden}. The drafter uses the target's embedding and LM head; use "
            "the drafter that was trained for this target."
        )
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if max(config.target_layer_ids) >= num_layers:
        raise ValueError(
            f"DFlash2 drafter: dflash_config.target_layer_ids {list(config.target_layer_ids)} "
            f"name a layer that the target does not have: it has {num_layers}."
        )
    if get_draft_quant_config(vllm_config) is not None:
        raise NotImplementedError(
            "DFlash2 drafter: quantization_config is set, and a quantised DFlash2 "
            "drafter cannot be served on vLLM 0.27.1; use the bf16 checkpoint."
        )


def expected_tensors(
    hf_config: PretrainedConfig, config: DFlash2Config, fc_input_size: int
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a DFlash2 checkpoint holds.

    vLLM's own tracking cannot tell a missing tensor here: it counts a layer
    with a quant_method as loaded, and a lone k_proj hides inside qkv_proj.
    """
    hidden, inter = hf_config.hidden_size, hf_config.intermediate_size
    head_dim = getattr(hf_config, "head_dim", None) or hidden // hf_config.num_attention_heads
    q = hf_config.num_attention_heads * head_dim
    kv = hf_config.num_key_value_heads * head_dim
    taps = config.conv_kernel_size
    groups = hidden // config.conv_group_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
    }
    if getattr(hf_config, "attention_bias", False):
        layer |= {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.bias": (hidden,),
        }
    for conv in ("attention_conv", "mlp_conv"):
        layer[f"{conv}.base_kernel"] = (2, taps, hidden)
        layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    rank, vocab = config.selector_rank, hf_config.vocab_size
    tensors: dict[str, tuple[int, ...]] = {
        f"layers.{i}.{name}": shape for i in range(hf_config.num_hidden_layers) for name, shape in layer.items()
    }
    return tensors | {
        "fc.weight": (hidden, fc_input_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }


def check_tensors(found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError naming the tensors that are missing, unexpected or misshapen."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not a DFlash2 tensor" for name in found if name not in expected]
    faults += [
        f"{name} has shape {tuple(found[name].shape)}, config.json asks for {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"DFlash2 checkpoint does not fit its config: {shown}.")
