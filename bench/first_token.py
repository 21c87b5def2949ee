"""Time to first token beside plain decoding, engines side by side on one card.

    python -m bench.first_token [--out DIR] [--rounds N] [--eager]

Needs a GPU with 110 GB free and a vLLM 0.27.1 that this tool was applied to. The target has the dimensions of
Qwen3-8B with 28 of its layers, the drafter five layers, both with dummy weights. Each pair of engines is one without
and one with the drafter, the same flags otherwise, each in a process of its own; they take turns, prompt by prompt.
A figure is the median over the rounds of the time until the last prompt of a case has its first token, in ms;
the goal is ours / plain <= 1.10 in every row. --eager starts sooner, without torch.compile and CUDA graphs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEPS = 7
GOAL = 1.10
GIB = 2**30
TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
DRAFT = TARGET | {
    "architectures": ["DFlash2DraftModel"],
    "num_hidden_layers": 5,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "dflash_config": {
        "block_size": STEPS + 1,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 7, 13, 19, 25],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
# None: vLLM's own flags for a server on this card.
PAIRS = {"256 sequences, 2,048 tokens": {"max_num_seqs": 256, "max_num_batched_tokens": 2048}, "default flags": None}
CASES = {"one prompt of 6,000": (1, 6000), "eight of 6,000": (8, 6000), "eight of 1,000": (8, 1000)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for first_token.md and first_token.json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    from bench._common import require_gpu, table, write

    require_gpu()
    with tempfile.TemporaryDirectory() as scratch:
        engines = {}
        try:
            for pair, flags in PAIRS.items():
                for name in ("plain", "ours"):
                    engines[pair, name] = Engine(Path(scratch), name == "ours", flags, arguments.eager)
            rows = measure(engines, arguments.rounds)
        finally:
            for engine in engines.values():
                engine.end()
    if arguments.out:
        write(arguments.out, "first_token", {"Time to first token": rows}, lambda axes: plot(axes, rows))
    else:
        print(table(rows))
    return int(any(row["ours / plain"] > GOAL for row in rows))


def measure(engines: dict, rounds: int) -> list[dict]:
    rows = []
    for pair in PAIRS:
        one, other = engines[pair, "plain"], engines[pair, "ours"]
        flags = one.answer()
        assert other.answer() == flags, "the two engines have other flags"
        for case, (count, length) in CASES.items():
            seconds: dict[str, list[float]] = {"plain": [], "ours": []}
            for number in range(-2, rounds):  # two to warm up
                prompts = make_prompts(number, count, length)
                for name, engine in (("plain", one), ("ours", other)):
                    taken = engine.ask(prompts)
                    if number >= 0:
                        seconds[name].append(taken)
            plain, ours = (1e3 * median(seconds[name]) for name in ("plain", "ours"))
            rows.append(
                {
                    "flags": pair,
                    "max_num_seqs": flags["max_num_seqs"],
                    "max_num_batched_tokens": flags["max_num_batched_tokens"],
                    "prompts": case,
                    "plain, ms": round(plain, 1),
                    "ours, ms": round(ours, 1),
                    "ours / plain": round(ours / plain, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def make_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    chance = random.Random(f"{seed} {count} {length}")
    return [[chance.randrange(1000, 100000) for _ in range(length)] for _ in range(count)]


def plot(axes, rows: list[dict]) -> None:
    places = range(len(rows))
    for name, shift in (("plain", -0.2), ("ours", 0.2)):
        axes.bar([place + shift for place in places], [row[f"{name}, ms"] for row in rows], 0.4, label=name)
    axes.set_xticks(list(places), [f"{row['flags']}\n{row['prompts']}" for row in rows], fontsize=6)
    axes.set_ylabel("time to first token, ms")


class Engine:
    """An engine in a process of its own: a line of JSON in, a line of JSON out."""

    def __init__(self, scratch: Path, drafts: bool, flags: dict | None, eager: bool):
        job = {"folder": str(scratch), "drafts": drafts, "flags": flags, "eager": eager}
        self.log = (scratch / f"{len(list(scratch.glob('*.log')))}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.first_token", "--serve", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            process_group=0,
        )

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self.log.seek(0)
        raise SystemExit(f"error: an engine ended:\n{self.log.read()[-4000:]}")

    def ask(self, prompts: list[list[int]]) -> float:
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def serve(job: dict) -> None:
    """Answer with the flags that the engine runs with, then with the seconds of each list of prompts."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**options(job)), usage_context=UsageContext.OPENAI_API_SERVER)
    scheduler = engine.vllm_config.scheduler_config
    flags = {name: getattr(scheduler, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    print("answer", json.dumps(flags), flush=True)
    for line in sys.stdin:
        print("answer", json.dumps(until_first_tokens(engine, json.loads(line))), flush=True)


def options(job: dict) -> dict:
    folder = Path(job["folder"])
    speculative = {"method": "dflash", "model": write_model(folder / "draft", DRAFT), "num_speculative_tokens": STEPS}
    return {
        "model": write_model(folder / "target", TARGET),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": job["eager"],
        "max_model_len": 8192,
        # Engines share the card: a fixed cache, and no measuring of what the others leave.
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 8 * GIB,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "speculative_config": speculative if job["drafts"] else None,
        **(job["flags"] or {}),
    }


def write_model(folder: Path, config: dict) -> str:
    folder.mkdir(exist_ok=True)
    # By rename: another engine may be reading it.
    written = folder / f"config.{os.getpid()}"
    written.write_text(json.dumps(config))
    written.rename(folder / "config.json")
    return str(folder)


def until_first_tokens(engine, prompts: list[list[int]]) -> float:
    """Seconds until each prompt has a token; then the requests are run dry."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    begin, first = time.perf_counter(), {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter())
    assert len(first) == len(prompts)
    return max(first.values()) - begin


if __name__ == "__main__":
    raise SystemExit(main())
