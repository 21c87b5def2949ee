"""Acceptance of sampled drafts whose proposal follows the request's top-k, top-p and min-p, and of those that do not.

    python -m bench.acceptance [--out DIR]

Needs a GPU and a vLLM 0.27.1 that this tool was applied to. One engine serves the bundled tiny pair; between two
runs of the same requests it is told to leave their truncation to verification.
"""

import argparse
import json
import os
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's worker is reached into

from vllm import LLM, SamplingParams

from bench._common import require_gpu, write

TINY = Path(__file__).resolve().parent.parent / "demo/tiny"
STEPS, REPEATS = 7, 32
CASES = {
    "T 1": {},
    "T 1, top_p 0.9": {"top_p": 0.9},
    "T 1, top_p 0.5": {"top_p": 0.5},
    "T 1, top_k 4": {"top_k": 4},
    "T 1, min_p 0.1": {"min_p": 0.1},
}


def counts(llm):
    """(drafts, accepted tokens) so far."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    names = ("num_drafts", "num_accepted_tokens")
    return [metrics[f"vllm:spec_decode_{name}"].value for name in names]


def accepted(llm, prompts, case):
    """Mean tokens per target pass over the same seeded requests."""
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=64, ignore_eos=True, detokenize=False, **case)
        for seed in range(REPEATS * len(prompts))
    ]
    before = counts(llm)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts] * REPEATS, params, use_tqdm=False)
    drafts, tokens = (now - then for now, then in zip(counts(llm), before, strict=True))
    return 1 + tokens / drafts


def do_not_follow(worker):
    """From here on nothing is left out of a proposal, as before the speculator was told of sampling parameters."""
    speculator = worker.model_runner.speculator
    speculator.sampling_states = None
    top_k, top_p, min_p = speculator.truncation
    top_k.fill_(2**31 - 1)
    top_p.fill_(1.0)
    min_p.zero_()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for acceptance.md, acceptance.json and acceptance.png")
    args = parser.parse_args()
    require_gpu()
    prompts = json.loads((TINY / "prompts.json").read_text())["prompts"]
    llm = LLM(
        model=str(TINY / "target"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kernel_config={"enable_flashinfer_autotune": False},
        speculative_config={
            "method": "dflash",
            "model": str(TINY / "draft"),
            "num_speculative_tokens": STEPS,
            "draft_sample_method": "probabilistic",
        },
    )
    rows = {
        name: {"request": name, "tokens per pass, followed": accepted(llm, prompts, case)}
        for name, case in CASES.items()
    }
    llm.collective_rpc(do_not_follow)
    for name, case in CASES.items():
        rows[name]["tokens per pass, not followed"] = accepted(llm, prompts, case)

    def plot(axes):
        for name in ("tokens per pass, followed", "tokens per pass, not followed"):
            axes.plot([*rows], [row[name] for row in rows.values()], marker="o", label=name)

    write(
        args.out,
        "acceptance",
        {f"Tiny pair, S {STEPS}, {REPEATS * len(prompts)} requests of 64 tokens": [*rows.values()]},
        plot,
    )


if __name__ == "__main__":
    main()
