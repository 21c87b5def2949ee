"""A random pair for Beam's drafter: scaled embeddings, scaled and capped logits, two layers with a window."""

BEAM = "DFlash2BeamDraftModel"
STEPS = 3
SCALED = {
    "mask_token_id": 149,
    "target_layer_ids": [0, 2],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 5,
    "input_embedding_scale": 1.5,
    "output_multiplier": 0.7,
    "final_logit_softcapping": 3.0,
}
LAYERS = {
    "num_hidden_layers": 2,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 8,
    "use_sliding_window": True,
    "block_size": 4,
}
