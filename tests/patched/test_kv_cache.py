"""Which blocks of the KV cache are zeroed for their next owner, and which are found again by a prefix."""

from types import SimpleNamespace as Namespace

import pytest
import torch

from tests.support.configs import engine_config


def hybrid_specs(block_size=16, **mamba):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    heads = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    state = ((16 * block_size,),)  # as many bytes as a page of K/V
    return {
        "mamba": MambaSpec(block_size=block_size, shapes=state, dtypes=(torch.float32,), **mamba),
        "full": FullAttentionSpec(**heads),
        "window": SlidingWindowSpec(sliding_window=32, **heads),
    }


RECORDED = {
    "hybrid": {"mamba": (3, 0), "full": (3, 3), "window": (3, 3)},
    "plain": {"full": (3, 0), "window": (3, 0)},  # only a shared pool needs zeroing
}


@pytest.mark.parametrize("case", [pytest.param("hybrid", marks=pytest.mark.needs_patch("zero-window-blocks")), "plain"])
def test_window_blocks_of_a_hybrid_are_recorded(case):
    """Per group: blocks allocated to a request of 40 tokens, of those told to the worker to zero."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    kinds = RECORDED[case]
    groups = [KVCacheGroupSpec([kind], hybrid_specs()[kind]) for kind in kinds]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=256,
        scheduler_block_size=16,
        hash_block_size=16,
        enable_caching=False,
    )
    request = Request("0", list(range(40)), SamplingParams(max_tokens=8), None)
    blocks = manager.allocate_slots(request, 40).get_block_ids()
    zeroed = set(manager.take_new_block_ids())
    assert {kind: (len(ids), len(zeroed & set(ids))) for kind, ids in zip(kinds, blocks)} == kinds


@pytest.mark.needs_patch("zero-window-blocks")
def test_window_blocks_are_zeroed():
    """Of 8 blocks of NaN, blocks 2 and 5 are zeroed, and no others."""
    from vllm.v1.worker.utils import AttentionGroup, KVBlockZeroer

    backend = Namespace(get_kv_cache_block_dim=lambda *args, **kwargs: 0)
    caches = {kind: torch.full((8, 16, 16), float("nan")) for kind in ("full", "window")}
    zeroer = KVBlockZeroer(
        torch.device("cpu"),
        [AttentionGroup(backend, [kind], hybrid_specs()[kind], i) for i, kind in enumerate(caches)],
        [16, 16],
        "auto",
        {kind: Namespace(kv_cache=cache) for kind, cache in caches.items()},
    )
    zeroer.zero_block_ids([2, 5])
    zeroed = {kind: [i for i in range(8) if not cache[i].isnan().any()] for kind, cache in caches.items()}
    assert zeroed == {"full": [2, 5], "window": [2, 5]}


@pytest.fixture(scope="module")
def serve(block_size=64):
    """serve(name, prompt) -> how much of the prompt was found cached, under a hybrid target."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    config = engine_config(enable_prefix_caching=True, max_model_len=1024, block_size=block_size)
    config.cache_config.mamba_cache_mode, config.cache_config.num_gpu_blocks = "align", 256
    specs = hybrid_specs(block_size, mamba_cache_mode="align", num_speculative_blocks=7)
    groups = [KVCacheGroupSpec([kind], spec) for kind, spec in specs.items()]
    scheduler = Scheduler(
        config,
        KVCacheConfig(num_blocks=256, kv_cache_tensors=[], kv_cache_groups=groups),
        StructuredOutputManager(config),
        block_size=block_size,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)

    def run(name, prompt):
        """One token after the prompt; returns how much of the prompt was found cached."""
        request = Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        scheduler.add_request(request)
        cached = None
        while not request.is_finished():
            step = scheduler.schedule()
            if cached is None:
                cached = request.num_computed_tokens - step.num_scheduled_tokens[name]
            done = request.num_computed_tokens >= len(prompt)
            scheduler.update_from_output(
                step,
                ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=[[1] if done else []]),
            )
        return cached

    return run


@pytest.mark.parametrize("length, hit", [(100, 64), (129, 128), (200, 192), (500, 448)])
def test_prefix_hits_of_a_hybrid_keep_their_last_block(serve, length, hit):
    """Whole blocks of 64 of a prompt but its last token; a dropped block would leave 100 tokens no hit."""
    prompt = [length + i for i in range(length)]
    serve(f"{length} first", prompt)
    assert serve(f"{length} again", prompt) == hit
