"""FlashAttention 3's schedule is made for the heads of the layers it schedules.

The schedule is computed ahead of the launch, from head counts and head size. 0.27.1 takes the
target's for every group; a draft of another shape (32 query heads, 8 KV heads, head size 128 beside
24, 4, 256) is launched on a schedule of the wrong tiles.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/attention/backends/flash_attn.py"
SCOPE = "FlashAttentionMetadataBuilder.__init__"

PATCH = Patch(
    name="fa3-geometry",
    why="the draft's attention was scheduled with the target's head counts and head size",
    upstream="FlashAttentionMetadataBuilder.__init__ of vLLM 0.29.0",
    shipped_in="0.29.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        self.num_heads_q = self.model_config.get_num_attention_heads(
            self.parallel_config
        )
        self.num_heads_kv = self.model_config.get_num_kv_heads(self.parallel_config)
""",
            new="""\
        # A draft's layers need not have the target's geometry. The runner groups
        # layers by query heads, so the first one speaks for all.
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.num_heads_q = next(
            (layer.num_heads for layer in layers.values()),
            self.model_config.get_num_attention_heads(self.parallel_config),
        )
        self.num_heads_kv = kv_cache_spec.num_kv_heads
""",
        ),
        Hunk(
            FILE,
            SCOPE,
            old="""\
        self.headdim = self.model_config.get_head_size()
""",
            new="""\
        self.headdim = kv_cache_spec.head_size
""",
        ),
    ),
    shipped=(
        (
            Marker(FILE, SCOPE, "kv_cache_spec.num_kv_heads"),
            Marker(FILE, SCOPE, "kv_cache_spec.head_size"),
        ),
    ),
)
