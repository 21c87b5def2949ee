"""Runs one vLLM engine and writes down what it did. A script that the demo and the tests start.

    engine.py JOB OUT    JOB is JSON: what `Job` below holds; OUT is read with torch.load

Where no GPU is to be seen, Triton's interpreter stands in for one (interpret.py).
"""

import contextlib
import inspect
import json
import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

from tests.support.settings import ENGINE_ENVIRONMENT

os.environ.update(ENGINE_ENVIRONMENT)

import torch

if not torch.cuda.is_available():
    from tests.support import interpret  # noqa: F401  before vLLM

from vllm import LLM, SamplingParams

if not torch.cuda.is_available():
    # The ranks' shared memory gathers no integers; gloo does. Here, because workers import this file, too.
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False


@dataclass
class Job:
    """target, draft  checkpoint folders; draft None decodes without a drafter
    prompts         token ids
    runs            a sampling run each: temperature, max_tokens, seed
    speculative     further keys of the speculative config; the checkpoint alone is enough
    break_tensors   also try to load the drafter's weights with each tensor deleted, then misshapen
    tensor_parallel_size  ranks; more than one are processes of their own, whose drafts are not recorded
    """

    target: str
    prompts: list
    runs: list
    draft: str | None = None
    dtype: str = "float32"
    speculative: dict = field(default_factory=dict)
    break_tensors: bool = False
    tensor_parallel_size: int = 1


def start(job):
    speculative = job.draft and {"model": job.draft, **job.speculative}
    return LLM(
        job.target,
        dtype=job.dtype,
        tensor_parallel_size=job.tensor_parallel_size,
        speculative_config=speculative,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=512,
        max_num_seqs=8,  # the profiling run drafts for as many, and the interpreter is slow
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.3,
        kernel_config={"enable_flashinfer_autotune": False},  # minutes of compilation at a first start
    )


def cached(proposal, slot):
    return proposal.ids[slot].to("cpu", copy=True), proposal.scores[slot].to("cpu", copy=True)


@contextlib.contextmanager
def recorded_drafts():
    """The list to which the speculator's walk appends what it got and what it did."""
    from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator

    drafts, walk = [], speculator.walk
    signature = inspect.signature(walk)

    def recorded(*arguments, **named):
        walk(*arguments, **named)
        call = SimpleNamespace(**signature.bind(*arguments, **named).arguments)
        steps = call.draft_tokens.shape[1]
        for row, slot in enumerate(call.idx_mapping[::steps].tolist()):
            here = slice(row * steps, (row + 1) * steps)
            drafts.append(
                {
                    "slot": slot,
                    "anchor": int(call.anchors[row]),
                    "position": int(call.sample_pos[row * steps]) - 1,  # the anchor's
                    "ids": call.candidate_ids[here].to("cpu", copy=True),
                    "unary": call.unary[here].to("cpu", copy=True),
                    "tokens": call.draft_tokens[row].tolist(),
                    "temperature": float(call.temperature[slot]),
                    # Ids and scores that the slot's proposal now holds.
                    "cached": None if call.proposal is None else cached(call.proposal, slot),
                }
            )

    with patch.object(speculator, "walk", recorded):
        yield drafts


def counters(llm):
    """The engine's counts of speculative decoding so far."""
    return {
        metric.name.removeprefix("vllm:spec_decode_num_"): getattr(metric, "value", getattr(metric, "values", None))
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }


@contextlib.contextmanager
def load_errors():
    """What the drafter's loading says to each tensor deleted, each misshapen, and one too many; None if it loads.

    Each is tried before it loads what it is given; the dict is filled then.
    """
    from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

    errors, load = {}, DFlash2Qwen3ForCausalLM.load_weights

    def attempt(model, weights):
        try:
            load(model, weights.items())
        except ValueError as error:
            return str(error)

    def break_then_load(model, weights):
        weights = dict(weights)
        errors["unexpected"] = attempt(model, weights | {"layers.0.self_attn.extra": torch.zeros(1)})
        for name, w in weights.items():
            errors[f"without {name}"] = attempt(model, {k: v for k, v in weights.items() if k != name})
            errors[f"misshapen {name}"] = attempt(model, weights | {name: w[:-1]})
        return load(model, weights.items())

    with patch.object(DFlash2Qwen3ForCausalLM, "load_weights", break_then_load):
        yield errors


def run(job):
    """Starts the engine, does the runs, ends it. Returns {"runs": one per run, "load_errors": see there}."""
    results = []
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(load_errors()) if job.break_tensors else {}
        drafts = stack.enter_context(recorded_drafts()) if job.draft else []
        llm = start(job)
        drafts.clear()  # of the profiling run
        for given in job.runs:
            before = counters(llm)
            params = SamplingParams(ignore_eos=True, detokenize=False, **given)
            outputs = llm.generate([{"prompt_token_ids": p} for p in job.prompts], params, use_tqdm=False)
            after = counters(llm)
            results.append(
                {
                    "texts": [list(o.outputs[0].token_ids) for o in outputs],
                    "drafts": drafts[:],
                    "num_drafts": after.get("drafts", 0) - before.get("drafts", 0),
                    "num_accepted": after.get("accepted_tokens", 0) - before.get("accepted_tokens", 0),
                }
            )
            drafts.clear()
    return {"runs": results, "load_errors": errors}


if __name__ == "__main__":
    torch.save(run(Job(**json.loads(sys.argv[1]))), sys.argv[2])
