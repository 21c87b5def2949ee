"""The flagship's published pair at full size: `python -m tests.gpu.flagship --out DIR`, 3 minutes on one H200.

Starts tests/patched/configs/qwen38 with dummy weights twice side by side, with its drafter and without
(2 x 54 GB of weights), with CUDA graphs, and compares their greedy texts. The drafter is given by its
folder alone. DIR gets a log and the facts of each. Needs the CUDA build of vLLM 0.27.1, as tests.gpu.run.
Exit status: 0 all checks passed, 1 some did not, 3 nothing was checked.
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

import torch

from tests.gpu import hybrid, jobs
from tests.gpu.run import Row, environment, patched_site, print_table, text_row

PAIR = Path(__file__).resolve().parent.parent / "patched/configs/qwen38"
ENGINES = ("drafted", "plain")
LIMIT_S = 180
REQUESTS, PROMPT, TOKENS = 8, 200, 32
VOCABULARY = 248_000  # the last few hundred of 248,320 are special


def options(name: str) -> dict:
    return {
        "model": str(PAIR / "target"),
        "speculative_config": {"model": str(PAIR / "draft")} if name == "drafted" else None,
        "load_format": "dummy",
        "language_model_only": True,
        "skip_tokenizer_init": True,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "gdn_prefill_backend": "triton",  # FlashInfer would be compiled for minutes
        "kernel_config": {"enable_flashinfer_autotune": False},
        # Nothing is compiled, which takes minutes for 64 layers; graphs are captured all the same.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [8, 64, 512] if name == "drafted" else [1, 8, 64],
        },
        # Both share the card: a fixed cache, and no measuring of what the other leaves.
        "gpu_memory_utilization": 0.04,
        "kv_cache_memory_bytes": 4 * jobs.GIB,
        "logprobs_mode": "raw_logits",
        "disable_log_stats": False,
    }


def serve(name: str) -> dict:
    """What one engine did."""
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(**options(name))
    started = time.perf_counter() - begin
    # Dummy weights repeat the last token whatever attention and delta nets do.
    llm.collective_rpc(hybrid.enliven)
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    before = jobs.counters(llm)
    texts = jobs.greedy(llm, prompts, TOKENS, with_top=name == "plain")
    facts = {"seconds": started, "texts": texts, **jobs.acceptance(before, jobs.counters(llm))}
    if name == "drafted":
        spec = llm.llm_engine.vllm_config.speculative_config
        facts |= {"method": spec.method, "steps": spec.num_speculative_tokens, **jobs.draft_graphs(llm)}
    return facts


def rows(facts: dict[str, dict]) -> list[Row]:
    drafted, plain = (facts[name] for name in ENGINES)
    started = ", ".join(f"{name} {facts[name]['seconds']:.0f} s" for name in ENGINES)
    served = f"method {drafted['method']}, S = {drafted['steps']}"
    return [
        Row("both start", started, True),
        Row("served from the checkpoint alone", served, served == "method dflash, S = 7"),
        Row("graphs of the draft", str(drafted["draft_graphs"]), drafted["draft_graphs"] > 0),
        Row("drafts", str(drafted["drafts"]), drafted["drafts"] > 0),
        text_row("greedy text", plain, drafted["texts"], ties=True),
    ]


def run_both(out: Path, site: Path) -> dict[str, dict]:
    processes = {}
    for name in ENGINES:
        with (out / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "tests.gpu.flagship", "--out", str(out), "--engine", name]
            processes[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(site), process_group=0
            )
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes.values():
            process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"error: not done after {LIMIT_S} s, see the logs in {out}", file=sys.stderr)
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = {name: out / f"{name}.json" for name in ENGINES}
    return {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        (arguments.out / f"{arguments.engine}.json").write_text(json.dumps(serve(arguments.engine)))
        return 0
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 3
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dflash2-flagship-", ignore_cleanup_errors=True) as scratch:
        facts = run_both(arguments.out.resolve(), patched_site(Path(scratch)))
    if len(facts) < len(ENGINES):
        for name in set(ENGINES) - set(facts):
            print(f"--- {name}\n{(arguments.out / f'{name}.log').read_text(errors='replace')[-3000:]}", file=sys.stderr)
        return 3
    table = rows(facts)
    print_table(table)
    return int(not all(row.passed for row in table))


if __name__ == "__main__":
    raise SystemExit(main())
