"""Writes small random targets and drafters: the shapes that the trained pair in demo/tiny does not have."""

import json

import torch
from safetensors.torch import save_file

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 150,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 148,
    "eos_token_id": 148,
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
}


def write_pair(folder, dflash_config, **draft_keys):
    """Writes folder/target and folder/draft with random weights; keys as in a DFlash2 config.json."""
    target = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3}
    draft = SHAPE | {"architectures": ["DFlash2DraftModel"], "dflash_config": dflash_config} | draft_keys
    generator = torch.Generator().manual_seed(0)
    write(folder / "target", target, target_shapes(target), generator)
    write(folder / "draft", draft, draft_shapes(draft), generator)


def write(folder, config, shapes, generator):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def random_weight(name, shape, generator):
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        noise = 1 + 0.1 * noise
    elif "embed_tokens" in name or "codebook" in name:
        pass
    elif "base_kernel" in name:
        noise = 0.5 * noise
    else:  # keeps a layer's output about as large as its input
        noise = noise / shape[-1] ** 0.5
    return noise.bfloat16()


def layer_shapes(c):
    h, inner, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    return {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h),
        "mlp.down_proj.weight": (h, inner),
    }


def target_shapes(c):
    outer = (c["vocab_size"], c["hidden_size"])
    layers = range(c["num_hidden_layers"])
    return {
        "model.embed_tokens.weight": outer,
        "lm_head.weight": outer,
        "model.norm.weight": (c["hidden_size"],),
        **{f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer_shapes(c).items()},
    }


def draft_shapes(c):
    cfg, h = c["dflash_config"], c["hidden_size"]
    taps, rank = cfg["conv_kernel_size"], cfg["selector_rank"]
    layer = layer_shapes(c)
    for conv in ("attention_conv", "mlp_conv"):
        layer[f"{conv}.base_kernel"] = (2, taps, h)
        layer[f"{conv}.kernel_projection.weight"] = (2 * taps * h // cfg["conv_group_size"], h)
    return {
        **{f"layers.{i}.{name}": shape for i in range(c["num_hidden_layers"]) for name, shape in layer.items()},
        "fc.weight": (h, len(cfg["target_layer_ids"]) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
        "candidate_selector.predecessor_codebook": (c["vocab_size"], rank),
        "candidate_selector.successor_codebook": (c["vocab_size"], rank),
        "candidate_selector.hidden_projection.weight": (rank, h),
    }
