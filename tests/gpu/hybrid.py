"""A small target of the flagship's kind (Qwen3.5: gated delta nets and full attention) and a DFlash2 draft
whose head geometry differs from it: folders with config.json only, for load_format="dummy"."""

import json
import zlib
from pathlib import Path

import torch

LAYERS = 8
VOCABULARY = 2048
MAX_MODEL_LEN = 1000

SHARED = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TARGET = SHARED | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": LAYERS,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
DRAFT = SHARED | {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 10000000,
    "is_causal": False,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 256,
    "use_sliding_window": True,
    "block_size": 8,
    "num_target_layers": LAYERS,
    "dflash_config": {
        "mask_token_id": VOCABULARY - 1,
        "target_layer_ids": [1, 3, 6],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 64,
        "selector_top_k": 16,
    },
}


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write both config folders below ``folder`` and return (target, draft)."""
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    return folder / "target", folder / "draft"


def enliven(worker) -> None:
    """Give target and draft, on their worker, random weights of a trained model's size.

    Dummy weights lie within 1e-3 and repeat from layer to layer, the LM head being the embedding again:
    the text just echoes its last token, whatever attention and delta nets do. The same names get the
    same weights in every engine.
    """
    randomise(worker.get_model(), plain_norms=("linear_attn.norm.weight",))
    speculator = getattr(worker.model_runner, "speculator", None)
    if speculator is not None:
        randomise(speculator.model.model, plain_norms=("norm.weight",), skip=("embed_tokens",))
        speculator.model.model._build_fused_kv_buffers()  # a copy of the projections


def randomise(model, plain_norms: tuple[str, ...], skip: tuple[str, ...] = ()) -> None:
    """``plain_norms``: endings of norm weights that multiply as they are; the others are 1 + weight."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-3.0)  # a state that lasts tens of tokens
        elif name.endswith(plain_norms):
            parameter.data.fill_(1.0)
        elif parameter.dim() >= 2 and not any(part in name for part in skip):
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            # Logits spread widely, so that few texts pass a near-tie.
            spread = 8.0 if "lm_head" in name else 1.0
            parameter.data.normal_(0.0, spread / parameter.shape[-1] ** 0.5, generator=generator)
