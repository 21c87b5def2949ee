"""What a config of the engine becomes, or why it is refused, with a DFlash2 drafter; nothing is started."""

import pytest

from tests.support.configs import drafter, engine_config


@pytest.mark.parametrize("own, rows", [(128, 256), (256, 256), (4096, 4096)])
def test_rotary_cache_reaches_the_targets_length(own, rows):
    """The target has 256 positions, the drafter `own` max_position_embeddings."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with drafter(max_position_embeddings=own) as folder:
        config = engine_config(draft=folder)
    hf = config.speculative_config.draft_model_config.hf_config
    with set_current_vllm_config(config):
        rope = get_rope(hf.head_dim, hf.max_position_embeddings, rope_parameters=hf.rope_parameters)
    assert rope.cos_sin_cache.shape[0] == rows


def test_compile_cache_key_has_s():
    seven, again, fifteen = (engine_config(steps).compute_hash() for steps in (7, 7, 15))
    assert seven == again != fifteen


@pytest.mark.parametrize("value", [None, "1"])
def test_the_v2_runner_is_chosen(monkeypatch, value):
    if value:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    assert engine_config().use_v2_model_runner


def test_v1_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        engine_config().use_v2_model_runner  # noqa: B018  a property


def test_bfloat16_is_served():
    assert str(engine_config(dtype="bfloat16").model_config.dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"dtype": "float16"}, "--dtype bfloat16"),
        ({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported"),
    ],
    ids=["float16", "pipeline parallel"],
)
def test_refused_at_start(arguments, says):
    with pytest.raises(Exception, match=says):
        engine_config(**arguments)


@pytest.mark.parametrize("seqs", [1, 64, 1024])
def test_cache_estimate(seqs):
    """The cache of S x K candidates in words; nothing if drafting is greedy."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import describe_cache

    config = engine_config(15, max_num_seqs=seqs, max_num_batched_tokens=16384)
    assert describe_cache(config, 320, 16) == ""
    config.speculative_config.draft_sample_method = "probabilistic"
    sparse = describe_cache(config, 320, 16)
    assert f"max_num_seqs {seqs} x 15 draft tokens x 16 candidates" in sparse
    # K ids of 8 bytes and K scores of 4 for each draft token.
    assert f"takes {seqs * 15 * 16 * 12 / 2**20:.2f} MiB" in sparse


def test_cache_estimate_of_the_dense_form(monkeypatch):
    """The vocabulary in float32 for each draft token."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import describe_cache

    config = engine_config(15, max_num_seqs=1024, max_num_batched_tokens=16384)
    config.speculative_config.draft_sample_method = "probabilistic"
    monkeypatch.setenv("DFLASH2_DENSE_PROPOSAL", "1")
    dense = describe_cache(config, 320, 16)
    assert "max_num_seqs 1024 x 15 draft tokens x vocabulary 320" in dense and "takes 0.02 GiB" in dense
    monkeypatch.setenv("DFLASH2_DENSE_PROPOSAL", "yes")
    with pytest.raises(ValueError, match="DFLASH2_DENSE_PROPOSAL must be 0 or 1, got 'yes'"):
        describe_cache(config, 320, 16)
