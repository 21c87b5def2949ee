"""One engine, one process: `python jobs.py JOB --out FILE ...` runs the phases of a job.

What happened is written to FILE after every phase, so that a crash loses no more than its own phase.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.gpu import hybrid

STEPS = 7
SAMPLE_PROMPTS = (0, 2)
TEMPERATURES = (0.6, 1.0)
GIB = 2**30


class Job(NamedTuple):
    name: str
    target: str  # tiny, beam or hybrid; none: no engine
    drafter: str | None  # how it samples: greedy, probabilistic; None: plain decoding
    graphs: bool
    phases: tuple[str, ...]
    options: Mapping = MappingProxyType({})
    limit: int = 200  # seconds; the soak's own time comes on top

    @property
    def gpus(self) -> int:
        return self.options.get("tensor_parallel_size", 1)


CHUNKED = {"max_num_batched_tokens": 72, "max_num_seqs": 8}
CACHING = {"enable_prefix_caching": True}
FP8 = {"kv_cache_dtype": "fp8"}
# All-reduces by NCCL alone: the others want peer access or NVLink multicast, which not every pair of cards has.
TWO_GPUS = {
    "tensor_parallel_size": 2,
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
# In the order they start, as `run.next_job` lets them. The first runs alone until its latencies are known; the
# others share the card. On an H200 a hybrid engine takes 150 to 190 s to start, most of it for the delta nets'
# kernels, and one of the tiny pair 25 to 55 s, so the two hybrid engines with CUDA graphs, one after the other, are
# the longest way to the end: what they need comes first. Then the other engines with graphs, and last those without,
# which wait for nothing but a free place.
JOBS = [
    Job("graphs-serve", "tiny", "probabilistic", True, ("latency", "prefix", "abort", "soak"), CACHING),
    Job("hybrid-graphs", "hybrid", "probabilistic", True, ("hybrid", "hybrid_chunks", "hybrid_accepted"), limit=300),
    Job("hybrid-graphs-plain", "hybrid", None, True, ("hybrid", "hybrid_chunks"), limit=300),
    Job("hybrid-eager-plain", "hybrid", None, False, ("hybrid", "hybrid_chunks"), limit=300),
    Job("hybrid-eager", "hybrid", "probabilistic", False, ("hybrid", "hybrid_chunks", "hybrid_accepted"), limit=300),
    Job("graphs-plain", "tiny", None, True, ("text", "sampled")),
    Job("graphs-probabilistic", "tiny", "probabilistic", True, ("text", "sampled")),
    Job("graphs-greedy", "tiny", "greedy", True, ("text", "sampled")),
    Job("graphs-tensor-parallel-plain", "tiny", None, True, ("text",), TWO_GPUS),
    Job("graphs-tensor-parallel", "tiny", "probabilistic", True, ("text",), TWO_GPUS),
    Job("graphs-fp8", "tiny", "greedy", True, ("text",), FP8),
    Job("graphs-beam", "beam", "greedy", True, ("text",)),
    Job("graphs-beam-fp8", "beam", "greedy", True, ("text",), FP8),
    Job("eager-probabilistic", "tiny", "probabilistic", False, ("text", "sampled")),
    Job("eager-greedy", "tiny", "greedy", False, ("text", "sampled")),
    Job("eager-plain", "tiny", None, False, ("text",)),
    Job("eager-chunked", "tiny", "probabilistic", False, ("text",), CHUNKED),
    Job("eager-beam", "beam", "greedy", False, ("text",)),
    Job("upstream", "none", None, False, ("upstream",), limit=400),
]


class Run(NamedTuple):
    """What a phase works with."""

    llm: object
    prompts: list[list[int]]
    arguments: argparse.Namespace
    compiled: list[str]  # kernels that Triton compiled after the start


def engine_options(job: Job, arguments) -> dict:
    """Keyword arguments of vllm.LLM for the job. Raises SystemExit when the models are missing."""
    import torch

    options = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "enable_prefix_caching": False,
        "enforce_eager": not job.graphs,
        "disable_log_stats": False,
        "logprobs_mode": "raw_logits",
        "jit_monitor_verbose": True,
        "max_model_len": 2048,
        "max_num_seqs": 256,
    }
    if torch.cuda.is_available():
        # Several engines share the card: a fixed cache, and no measuring of what the others leave.
        options |= {"gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 2 * GIB}
    if job.target in ("tiny", "beam"):
        target, draft = (Path(arguments.tiny) / name for name in ("target", "draft"))
        if job.target == "beam":
            draft = beam_drafter(draft, Path(arguments.scratch) / f"{job.name}-draft")
    else:
        target, draft = hybrid.write_pair(Path(arguments.scratch) / f"{job.name}-pair")
        options |= {"load_format": "dummy", "max_model_len": hybrid.MAX_MODEL_LEN, "max_num_seqs": 16}
        options |= {"gdn_prefill_backend": "triton"}  # FlashInfer would be compiled for minutes
    if not (target / "config.json").exists():
        raise SystemExit(f"error: no model in {target}: give the folder of the tiny pair with --tiny")
    options["model"] = str(target)
    if job.drafter:
        options["speculative_config"] = {
            "method": "dflash",
            "model": str(draft),
            "num_speculative_tokens": STEPS,
            "draft_sample_method": job.drafter,
        }
    return {**options, **job.options}


def beam_drafter(draft: Path, folder: Path) -> Path:
    """``folder``, with the same checkpoint under Beam's architecture string."""
    folder.mkdir()
    config = json.loads((draft / "config.json").read_text()) | {"architectures": ["DFlash2BeamDraftModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to((draft / "model.safetensors").resolve())
    return folder


def start(job: Job, arguments):
    """The engine, if the job has one; a hybrid one with weights that matter."""
    from vllm import LLM

    if job.target == "none":
        return None
    llm = LLM(**engine_options(job, arguments))
    if job.target == "hybrid":
        llm.collective_rpc(hybrid.enliven)
    return llm


def parameters(tokens: int, **options):
    from vllm import SamplingParams

    return SamplingParams(
        **({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False} | options)
    )


def generate(llm, prompts, settings) -> list:
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, settings, use_tqdm=False)


def greedy(llm, prompts, tokens: int, with_top: bool) -> list[dict]:
    """Greedy texts; ``with_top`` adds the two largest logits of every position."""
    settings = parameters(tokens, logprobs=2 if with_top else None)
    texts = []
    for output in generate(llm, prompts, settings):
        answer = output.outputs[0]
        text = {"tokens": list(answer.token_ids), "cached": output.num_cached_tokens}
        if with_top:
            text["top"] = [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in answer.logprobs]
        texts.append(text)
    return texts


def counters(llm) -> dict:
    """Values of the engine's counters, without vLLM's prefix of the name."""
    return {m.name.removeprefix("vllm:"): m.value for m in llm.get_metrics() if hasattr(m, "value")}


def acceptance(before: dict, after: dict) -> dict:
    drafts, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    )
    return {"drafts": drafts, "acceptance": 1 + accepted / drafts if drafts else None}


def is_plain(llm) -> bool:
    return llm.llm_engine.vllm_config.speculative_config is None


def text(run: Run) -> dict:
    before = counters(run.llm)
    texts = greedy(run.llm, run.prompts, run.arguments.tokens, is_plain(run.llm))
    return {"texts": texts, **acceptance(before, counters(run.llm)), **draft_graphs(run.llm)}


def draft_graphs(llm) -> dict:
    """How many full CUDA graphs the speculator has captured, on the worker with the fewest."""
    if is_plain(llm):
        return {}
    return {"draft_graphs": min(llm.collective_rpc(count_draft_graphs))}


def count_draft_graphs(worker) -> int:
    return len(worker.model_runner.speculator.query_cudagraph_manager.graphs)


def sampled(run: Run) -> dict:
    """{temperature: {"prompt:t1,t2,t3,t4": count}}. Plain decoding and each drafter use seeds of their own."""
    first_seed = 0 if is_plain(run.llm) else 10**6
    results = {}
    for temperature in TEMPERATURES:
        each = run.arguments.samples // len(SAMPLE_PROMPTS)
        numbers = [number for number in SAMPLE_PROMPTS for _ in range(each)]
        settings = [parameters(6, temperature=temperature, seed=first_seed + i) for i in range(len(numbers))]
        outputs = generate(run.llm, [run.prompts[number] for number in numbers], settings)
        keys = (list(output.outputs[0].token_ids[:4]) for output in outputs)
        results[str(temperature)] = Counter(f"{n}:{','.join(map(str, k))}" for n, k in zip(numbers, keys, strict=True))
    return results


def latency(run: Run) -> dict:
    """Seconds of ten requests, the first one being the engine's first, and the kernels compiled during each."""
    seconds, compiled = [], []
    for number in range(10):
        known, begin = len(run.compiled), time.perf_counter()
        generate(run.llm, [run.prompts[number]], parameters(run.arguments.tokens, temperature=0.8, seed=number))
        seconds.append(time.perf_counter() - begin)
        compiled.append(run.compiled[known:])
    return {"seconds": seconds, "compiled": compiled}


def prefix(run: Run) -> dict:
    """The greedy texts twice: the second time the prompts' pages come from the cache."""
    cold = greedy(run.llm, run.prompts, run.arguments.tokens, False)
    before = counters(run.llm)
    warm = greedy(run.llm, run.prompts, run.arguments.tokens, False)
    # Not the engine's counter: it misses the hits of a step that gives out no token.
    hits = sum(text.pop("cached") for text in warm)
    return {"texts": cold, "again": warm, "hits": hits, **acceptance(before, counters(run.llm))}


def abort(run: Run) -> dict:
    """Greedy requests, every other one aborted on the way and submitted again; their texts in order."""
    engine = run.llm.llm_engine
    settings = parameters(run.arguments.tokens, output_kind=final_only())
    for number, prompt in enumerate(run.prompts):
        engine.add_request(f"first-{number}", {"prompt_token_ids": prompt}, settings)
    done = {}
    for _ in range(3):
        done |= finished(engine.step())
    victims = [n for n in range(0, len(run.prompts), 2) if f"first-{n}" not in done]
    engine.abort_request([f"first-{number}" for number in victims])
    for number in victims:
        engine.add_request(f"again-{number}", {"prompt_token_ids": run.prompts[number]}, settings)
    while engine.has_unfinished_requests():
        done |= finished(engine.step())
    names = [f"{'again' if n in victims else 'first'}-{n}" for n in range(len(run.prompts))]
    return {
        "texts": [{"tokens": list(done[name].token_ids)} for name in names if name in done],
        "aborted": len(victims),
        "revenants": sorted(f"first-{n}" for n in victims if f"first-{n}" in done),
    }


def final_only():
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def finished(outputs) -> dict:
    return {output.request_id: output.outputs[0] for output in outputs if output.finished}


def soak(run: Run) -> dict:
    """64 requests of mixed lengths and temperatures in flight for the given time, then run dry."""
    engine, chance = run.llm.llm_engine, random.Random(0)
    before, wanted, results = counters(run.llm), {}, {}
    text = [token for prompt in run.prompts for token in prompt]
    begin = time.perf_counter()
    while True:
        while time.perf_counter() - begin < run.arguments.seconds and len(wanted) - len(results) < 64:
            name = str(len(wanted))
            prompt, settings = random_request(chance, text)
            wanted[name] = settings.max_tokens
            engine.add_request(name, {"prompt_token_ids": prompt}, settings)
        if not engine.has_unfinished_requests():
            break
        results |= finished(engine.step())
    seconds = time.perf_counter() - begin
    bad = [name for name, answer in results.items() if is_malformed(answer, wanted[name])]
    tokens = sum(len(answer.token_ids) for answer in results.values())
    return {
        "requests": len(wanted),
        "lost": len(wanted) - len(results),
        "malformed": [[name, list(results[name].token_ids)[:12]] for name in bad[:20]],
        "malformed_count": len(bad),
        "seconds": seconds,
        "tokens": tokens,
        **acceptance(before, counters(run.llm)),
    }


def random_request(chance, text: list[int]):
    # One in four is a single-token prompt: it joins a decoding batch as if it were decoding itself.
    length = 1 if chance.random() < 0.25 else int(2 ** chance.uniform(1, 10.5))
    begin = chance.randrange(len(text) - length)
    return text[begin : begin + length], parameters(
        int(2 ** chance.uniform(0, 8)),
        temperature=chance.choice((0.0, 0.3, 0.6, 1.0)),
        top_p=chance.choice((1.0, 1.0, 0.9)),
        top_k=chance.choice((0, 0, 20)),
        seed=chance.randrange(2**31),
        output_kind=final_only(),
    )


def is_malformed(answer, wanted: int) -> bool:
    """Too few or too many tokens, one that is no byte of text, or a start with the token 0 that pads drafts."""
    tokens = list(answer.token_ids)
    outside = any(not 0 <= token < 320 for token in tokens)
    return answer.finish_reason != "length" or len(tokens) != wanted or outside or tokens[0] == 0


def hybrid_prompts() -> list[list[int]]:
    """Prompts of every kind of length, the first ones filling the model's context but for the answer.

    In chunks of S + 1 tokens the long ones keep pieces of a prompt in front of requests that decode.
    The last two wait for a slot: prompts of one token that join a decoding batch.
    """
    chance = random.Random(1)
    full = hybrid.MAX_MODEL_LEN
    lengths = [full - left for left in (1, 2, 8, 9, 64, 65)] + [544, 400, 255, 128, 64, 16, 9, 8, 7, 1, 1, 1]
    return [[chance.randrange(2, hybrid.VOCABULARY - 1) for _ in range(length)] for length in lengths]


def hybrid_run(run: Run) -> dict:
    before = counters(run.llm)
    # Where the context ends first, so does the answer.
    texts = greedy(run.llm, hybrid_prompts(), run.arguments.tokens, is_plain(run.llm))
    return {"texts": texts, **acceptance(before, counters(run.llm)), **nan_rows(run.llm)}


def hybrid_chunks(run: Run) -> dict:
    """The same, with every prefill cut into chunks of S + 1 tokens, the size of a decoding request."""
    scheduler = run.llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.scheduler_config.long_prefill_token_threshold = STEPS + 1
    return hybrid_run(run)


def hybrid_accepted(run: Run) -> dict:
    """As hybrid_chunks, but drafted from the texts themselves: 0 to S drafts are accepted a step."""
    texts = [text["tokens"] for text in greedy(run.llm, hybrid_prompts(), run.arguments.tokens, False)]
    run.llm.collective_rpc(draft_from, args=(texts, run.llm.request_counter.counter))
    return hybrid_chunks(run)


def draft_from(worker, texts: list[list[int]], first: int) -> None:
    """From request number ``first`` on, every draft is the start of what its text goes on with, and wrong behind."""
    import torch

    speculator, done, chance = worker.model_runner.speculator, Counter(), random.Random(2)
    propose = speculator.propose

    def continued(input_batch, *others, **more):
        drafts = propose(input_batch, *others, **more).clone()
        for row, (name, sampled) in enumerate(zip(input_batch.req_ids, others[4].tolist(), strict=True)):
            number = int(name.split("-")[0]) - first
            done[number] += sampled
            good = texts[number][done[number] :][: chance.randrange(STEPS + 1)]
            drafts[row] = torch.tensor([*good, *[0] * STEPS][:STEPS])
        return drafts

    speculator.propose = continued


def nan_rows(llm) -> dict:
    """How many rows of the cached q hold a NaN."""
    if is_plain(llm):
        return {}
    return {"nan_rows": llm.collective_rpc(count_nan_rows)[0]}


def count_nan_rows(worker) -> int:
    return int(worker.model_runner.speculator.proposal.scores.isnan().any(-1).sum())


def upstream(run: Run) -> dict:
    """vLLM's own tests, by their script; it makes its own copies, a pristine one and a patched one."""
    command = [sys.executable, "-m", "tests.upstream", "gpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return {"status": done.returncode, "said": (done.stdout.splitlines() or [""])[-1]}


PHASES = {
    "upstream": upstream,
    "text": text,
    "sampled": sampled,
    "latency": latency,
    "prefix": prefix,
    "abort": abort,
    "soak": soak,
    "hybrid": hybrid_run,
    "hybrid_chunks": hybrid_chunks,
    "hybrid_accepted": hybrid_accepted,
}


class CompileLog(logging.Handler):
    """Notes every kernel that vLLM's monitor sees being compiled after the start."""

    def __init__(self):
        super().__init__()
        self.kernels: list[str] = []

    def emit(self, record):
        if "during inference" in record.getMessage():
            self.kernels.append(record.getMessage().split("inference: ")[-1].split(".")[0].split(" ")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=[job.name for job in JOBS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    job = next(job for job in JOBS if job.name == arguments.job)
    facts: dict = {}

    def save(name, value):
        facts[name] = value
        temporary = arguments.out.with_suffix(".part")
        temporary.write_text(json.dumps(facts))
        temporary.rename(arguments.out)

    log = CompileLog()
    begin = time.perf_counter()
    llm = start(job, arguments)
    logging.getLogger("vllm.utils.jit_monitor").addHandler(log)
    save("start_seconds", time.perf_counter() - begin)
    prompts = json.loads((Path(arguments.tiny) / "prompts.json").read_text())["prompts"]
    run = Run(llm, prompts, arguments, log.kernels)
    for name in job.phases:
        begin = time.perf_counter()
        try:
            save(name, PHASES[name](run))
        except Exception:
            # The next phases still have something to say, if the engine lives.
            traceback.print_exc()
            save(name, {"error": traceback.format_exc(limit=-3)})
        save(f"{name}_seconds", time.perf_counter() - begin)
    save("compiled", log.kernels)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
