"""What test_speculative_keys.py runs against the patched vLLM. Prints one line of JSON: {probe: what it found}.

`key_probes.py CASES` (JSON: key -> value) makes one configuration per key. `key_probes.py serve` starts engines.
"""

from tests.support import interpret  # noqa: F401, I001  before vLLM
import dataclasses
import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.config import CUDAGraphMode, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.configs import TINY, refusal

DRAFT = {"method": "dflash", "model": str(TINY / "draft"), "num_speculative_tokens": 7}


def config_with(**keys):
    return EngineArgs(
        model=str(TINY / "target"),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=16,
        enforce_eager=keys.pop("target_enforce_eager", False),
        tensor_parallel_size=keys.pop("target_tensor_parallel_size", 1),
        speculative_config=DRAFT | keys,
    ).create_engine_config()


def fields():
    """Every field of the SpeculativeConfig of this vLLM, and what ours says about each."""
    from vllm.v1.worker.gpu.spec_decode.dflash2 import keys

    said = [*keys.HONOURED, *keys.REFUSED, *keys.VLLM, *keys.ENGINE]
    return {"fields": [field.name for field in dataclasses.fields(SpeculativeConfig)], "said": said}


def answers(cases):
    """{case: {"served": the value that the configuration has} or {"refused": error}}"""
    found = {}
    for name, keys in cases.items():
        key = next(iter(keys))
        found[name] = refusal(lambda key=key, keys=keys: str(getattr(config_with(**keys).speculative_config, key)))
    return found


def drafter_model():
    """revision and code_revision in the drafter's ModelConfig."""
    model = config_with(revision="r1", code_revision="c1").speculative_config.draft_model_config
    return [model.revision, model.code_revision]


def loader():
    """What the drafter is loaded with: [load format, attention backend, KV cache dtype], keys given and not."""
    from vllm.v1.worker.gpu.spec_decode.dflash import utils

    given = {
        "draft_load_config": {"load_format": "dummy"},
        "attention_backend": "TRITON_ATTN",
        "kv_cache_dtype": "fp8",
    }
    found = []
    for keys in (given, {}):
        with mock.patch.object(utils, "get_model", side_effect=StopIteration) as get_model:
            try:
                utils.load_dflash_model(None, config_with(**keys))
            except StopIteration:
                call = get_model.call_args.kwargs
        load, vllm_config = call.get("load_config"), call["vllm_config"]
        backend = vllm_config.attention_config.backend
        found.append([load and load.load_format, backend and backend.name, vllm_config.cache_config.cache_dtype])
    return found


def draft_graphs():
    """[mode of the speculator's graphs, their schedule] without keys, with enforce_eager, with a schedule."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator as base
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    found = []
    for keys in ({}, {"enforce_eager": True}, {"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 16, 2]]}):
        config = config_with(**keys)
        speculator = DFlash2Speculator(config, torch.device("cpu"))
        speculator.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport.ALWAYS)
        with (
            mock.patch.object(base, "DFlashCudaGraphManager") as manager,
            mock.patch.object(DFlash2Speculator, "_compile_input_kernel"),
        ):
            speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
        given, _, mode = manager.call_args.args
        found.append([mode.name, given.speculative_config.num_speculative_tokens_per_batch_size])
        assert speculator.vllm_config is config
    return found


def target_graphs():
    """[[S, requests, drafts + 1 of the graph that is replayed, its requests], ...] for a schedule of 7, 2 and 0."""
    from vllm.v1.worker.gpu import cudagraph_utils

    config = config_with(num_speculative_tokens_per_batch_size=[[1, 4, 7], [5, 12, 2], [13, 16, 0]])
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, *range(8, 65, 8)]
    config.compilation_config.max_cudagraph_capture_size = 64
    with (
        mock.patch.object(cudagraph_utils, "get_pp_group"),
        mock.patch.object(cudagraph_utils, "current_platform"),
    ):
        manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, 8)
    manager._graphs_captured = True
    found = []
    for steps, most in ((7, 8), (2, 16), (0, 16)):
        for requests in range(1, most + 1):
            desc = manager.dispatch(requests, requests * (steps + 1), steps + 1, 0)
            found.append([steps, requests, desc.uniform_token_count, desc.num_reqs])
    mixed = manager.dispatch(3, 20, None, 0)
    return [*found, [None, mixed.num_tokens, mixed.uniform_token_count, mixed.num_reqs]]


def serve():
    """{schedule: texts, drafts that were verified and how many of them accepted}; no schedule, then one."""
    from vllm import LLM, SamplingParams

    found = {}
    for name, keys in (("none", {}), ("2, then 0", {"num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 8, 0]]})):
        llm = LLM(
            str(TINY / "target"),
            dtype="float32",
            speculative_config=DRAFT | keys,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        )
        # Three requests run, the last two of them for longer.
        settings = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (4, 12, 16)]
        outputs = llm.generate([{"prompt_token_ids": [5 + i]} for i in range(3)], settings, use_tqdm=False)
        counted = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in llm.get_metrics() if "spec_dec" in m.name}
        found[name] = {
            "texts": [list(output.outputs[0].token_ids) for output in outputs],
            **{key: counted[key].value for key in ("drafts", "draft_tokens", "accepted_tokens")},
        }
        del llm
    return found


if __name__ == "__main__":
    job = sys.argv[1]
    if job == "serve":
        print(json.dumps(serve()))
    else:
        probes = (fields, drafter_model, loader, draft_graphs, target_graphs)
        found = {probe.__name__: refusal(probe) for probe in probes}
        print(json.dumps(found | {"answers": answers(json.loads(job))}))
