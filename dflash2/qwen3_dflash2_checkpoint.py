# SPDX-License-Identifier: Apache-2.0
"""The tensors that a DFlash2 checkpoint must hold."""

import torch
from transformers import PretrainedConfig
from vllm.transformers_utils.configs.dflash2 import DFlash2Config


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


def check_tensors(
    found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], hf_config: PretrainedConfig, *, whole: bool
) -> dict[str, torch.Tensor]:
    """The tensors to load: those of `found` without maps of the vocabulary that map every token to itself.

    whole  whether none of the expected tensors may be missing

    Raises ValueError naming the tensors that are missing, unexpected or misshapen.
    """
    vocab = (hf_config.vocab_size, hf_config.hidden_size)
    allowed = expected | {"embed_tokens.weight": vocab, "lm_head.weight": vocab}
    own = {name: tensor for name, tensor in found.items() if not maps_to_itself(name, tensor, hf_config.vocab_size)}
    faults = [f"{name} is missing" for name in expected if name not in own] if whole else []
    for name, tensor in own.items():
        if name in ("t2d", "d2t"):
            faults.append(f"{name} maps tokens to others, and the drafter's vocabulary must be the target's")
        elif name not in allowed:
            faults.append(f"{name} is not a DFlash2 tensor")
        elif tuple(tensor.shape) != allowed[name]:
            faults.append(f"{name} has shape {tuple(tensor.shape)}, config.json asks for {allowed[name]}")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"DFlash2 checkpoint does not fit its config: {shown}.")
    return own


def maps_to_itself(name: str, tensor: torch.Tensor, vocab_size: int) -> bool:
    """Whether a tensor is a map between draft and target vocabulary under which no token changes.

    t2d tells which of the target's tokens the drafter has, d2t what to add to each of the drafter's.
    """
    if tuple(tensor.shape) != (vocab_size,):
        return False
    return bool(tensor.all()) if name == "t2d" else name == "d2t" and not tensor.any()
