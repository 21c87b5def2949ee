"""Decodes two prompts with and without the drafter, and prints what one draft looked like.

Runs in an environment with a patched vLLM. The tiny pair reads bytes, so its tokens are text.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.support import reference

HERE = Path(__file__).resolve().parent

TINY = HERE / "tiny"
PROMPTS, NEW_TOKENS, STEPS = 2, 40, 7


def main():
    torch.set_num_threads(1)  # the tensors are tiny, and two engines run beside it
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="fail rather than draft on the CPU")
    if parser.parse_args().gpu and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; leave --gpu out to draft on the CPU")
    where = (
        "on the GPU" if torch.cuda.is_available() else "on the CPU, through Triton's interpreter: half a minute or so"
    )
    print(f"decoding {PROMPTS} prompts x {NEW_TOKENS} tokens, without and with the drafter, {where}", flush=True)
    prompts = json.loads((TINY / "prompts.json").read_text())["prompts"][:PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        engines = [start_engine(prompts, draft, Path(folder)) for draft in (None, str(TINY / "draft"))]
        wanted = reference_counts(prompts)
        plain, drafted = map(finish, engines)
    print(report(prompts, plain, drafted, wanted))
    if plain["texts"] != drafted["texts"]:
        raise SystemExit("error: the drafter changed the text; run `python tests/run.py` to see what is broken")


def start_engine(prompts, draft, folder):
    """Starts tests/support/engine.py on one greedy run. Returns its process, its log and what it will write."""
    job = {
        "target": str(TINY / "target"),
        "draft": draft,
        "dtype": "bfloat16",
        "prompts": prompts,
        "runs": [{"temperature": 0, "max_tokens": NEW_TOKENS}],
    }
    out = folder / ("drafted" if draft else "plain")
    log = out.with_suffix(".log")
    command = [sys.executable, HERE.parent / "tests/support/engine.py", json.dumps(job), out]
    with log.open("w") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream), log, out


def finish(engine):
    """What the engine wrote down; its log is shown only if it failed."""
    process, log, out = engine
    if process.wait():
        sys.stderr.write(log.read_text()[-6000:])
        raise SystemExit("error: vLLM did not run the tiny pair; its own words are above")
    return torch.load(out)["runs"][0]


@torch.no_grad()
def reference_counts(prompts):
    """Accepted tokens of each draft that the float32 reference makes on the same prompts."""
    target, drafter = reference.load(TINY / "target"), reference.load(TINY / "draft")
    return [
        n
        for prompt in prompts
        for n in reference.verified(reference.greedy_decode(drafter, target, prompt, NEW_TOKENS, STEPS)[1], NEW_TOKENS)
    ]


def report(prompts, plain, drafted, wanted):
    """What happened, for people: each prompt's text, one draft, and how many tokens a draft gave."""
    lines = []
    for prompt, alone, with_drafter in zip(prompts, plain["texts"], drafted["texts"]):
        same = "the same" if alone == with_drafter else "DIFFERENT"
        lines += [
            "",
            f"prompt (tail)      {show(prompt[-48:])}",
            f"target alone       {show(alone)}",
            f"with DFlash2       {show(with_drafter)}   <- {same}",
        ]
    lines += ["", *describe(drafted["drafts"], prompts, drafted["texts"]), ""]
    drafts, tokens = drafted["num_drafts"], drafted["num_drafts"] + drafted["num_accepted"]
    lines += [
        f"{drafts} drafts gave {tokens} tokens: {tokens / drafts:.2f} tokens per target pass instead of 1",
        f"float32 reference: {len(wanted)} drafts, {1 + sum(wanted) / len(wanted):.2f} tokens per target pass",
    ]
    return "\n".join(lines)


def describe(drafts, prompts, texts):
    """The draft of which the target took most, but not all: what was drafted, what was accepted."""
    for draft in sorted(drafts, key=lambda draft: -accepted_of(draft, prompts, texts)):
        n, steps = accepted_of(draft, prompts, texts), len(draft["tokens"])
        if n < steps:
            break
    return [
        f"one draft, after   {show([draft['anchor']])}",
        f"drafted            {show(draft['tokens'])}   ({len(draft['ids'][0])} candidates per step, one path)",
        f"accepted           {show(draft['tokens'][:n])}   ({n} of {steps})",
    ]


def accepted_of(draft, prompts, texts):
    """How many of a draft's tokens the text went on with; -1 if it ends before one can tell."""
    for prompt, text in zip(prompts, texts):
        at = draft["position"] - len(prompt)
        if 0 <= at < len(text) - len(draft["tokens"]) and text[at] == draft["anchor"]:
            follows = text[at + 1 :]
            return next((n for n, token in enumerate(draft["tokens"]) if follows[n] != token), len(draft["tokens"]))
    return -1


def show(tokens):
    return repr(bytes(token for token in tokens if token < 256).decode(errors="replace"))


if __name__ == "__main__":
    main()
