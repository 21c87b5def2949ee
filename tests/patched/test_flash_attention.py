"""What FlashAttention is asked for on behalf of a draft: the schedule of FA3, and each layer's own window.

There is no FlashAttention here: its metadata builder and its `forward` run up to the call of a kernel.
"""

from types import SimpleNamespace as Namespace
from unittest.mock import patch

import pytest
import torch

from tests.support.configs import engine_config


def attention_layer(num_heads, window):
    """An attention layer as far as FlashAttention's metadata builder looks at it."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    layer, impl = Attention.__new__(Attention), FlashAttentionImpl.__new__(FlashAttentionImpl)
    torch.nn.Module.__init__(layer)
    impl.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    impl.num_heads = layer.num_heads = num_heads
    layer.impl = impl
    return layer


def draft_builder(config, window):
    """FlashAttention's builder for a draft of 8 query heads, 4 KV heads and head size 32, FA3 assumed."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    heads = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(**heads) if window is None else SlidingWindowSpec(sliding_window=window, **heads)
    config.compilation_config.static_forward_context["draft"] = attention_layer(8, window)
    builder = FlashAttentionMetadataBuilder(spec, ["draft"], config, torch.device("cpu"))
    builder.aot_schedule = True
    return builder


def scheduled(builder):
    """Head counts, head size and window that the builder's schedule is made for, or None: no schedule."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import flash_attn

    calls = []
    starts = torch.tensor([0, 8], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([100], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=8,
        max_query_len=8,
        max_seq_len=100,
        block_table_tensor=torch.zeros(1, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(8, dtype=torch.int64),
        causal=False,
    )
    with patch.object(flash_attn, "get_scheduler_metadata", lambda **asked: calls.append(asked), create=True):
        builder.build(0, batch)
    keys = ("num_heads_q", "num_heads_kv", "headdim", "window_size")
    return [calls[0][key] for key in keys] if calls else None


def test_fa3_schedules_the_draft_with_its_own_geometry():
    """A draft of 8 / 4 heads of 32 beside the tiny target's 4 / 2 heads of 64."""
    assert scheduled(draft_builder(engine_config(), None)) == [8, 4, 32, (-1, -1)]


@pytest.mark.parametrize("window", [None, 64])
def test_fa3_makes_no_schedule_for_a_windowed_draft(window):
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.utils import AttentionGroup

    builder = draft_builder(engine_config(), window)
    group = AttentionGroup(Namespace(), ["draft"], builder.kv_cache_spec, 0, [builder])
    speculator = DFlashSpeculator.__new__(DFlashSpeculator)
    speculator.attn_groups = [[group]]
    speculator.max_num_tokens, speculator.device = 8, torch.device("cpu")
    speculator.requires_non_causal, speculator.model = True, object()
    with patch.object(DraftModelSpeculator, "set_attn", lambda *args: None):
        speculator.set_attn(None, Namespace(kv_cache_groups=[]), None, None, None)
    assert (scheduled(builder) is None) is (window is not None)


@pytest.mark.parametrize(
    "window, causal, used",
    [
        (None, True, [-1, -1]),
        (512, True, [511, 0]),
        (256, True, [255, 0]),
        (256, False, [255, 255]),
        (None, False, [-1, -1]),
    ],
)
def test_a_layers_own_window_wins(window, causal, used):
    """... over its cache group's, which is 256 here."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn

    asked = {}
    with set_current_vllm_config(engine_config()):
        impl = flash_attn.FlashAttentionImpl(2, 32, 1.0, 2, None, window, "auto")
    impl.vllm_flash_attn_version, impl.dcp_world_size = 3, 1
    group_window = flash_attn._maybe_symmetrize_window((255, 0), causal)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    metadata = flash_attn.FlashAttentionMetadata(
        num_actual_tokens=1,
        max_query_len=1,
        query_start_loc=starts,
        max_seq_len=16,
        seq_lens=torch.tensor([16], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        use_cascade=False,
        common_prefix_len=0,
        cu_prefix_query_lens=None,
        prefix_kv_lens=None,
        suffix_kv_lens=None,
        causal=causal,
        sliding_window=group_window,
    )
    row, scale = torch.zeros(1, 2, 32), torch.ones(())
    layer = Namespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)
    with patch.object(flash_attn, "flash_attn_varlen_func", lambda **given: asked.update(given), create=True):
        impl.forward(layer, row, row, row, torch.zeros(1, 2, 16, 64), metadata, row)
    assert list(asked["window_size"]) == used
