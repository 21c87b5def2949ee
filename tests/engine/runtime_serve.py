"""Starts the real engine under Triton's interpreter, once a case, and prints what it generates.

    python runtime_serve.py CASES

CASES is JSON, a list of objects whose keys may be
    steps    num_speculative_tokens; without it the target is served alone
    lengths  lengths of the prompts
    engine   further arguments of `LLM`
    spec     further keys of its speculative_config
    draft    keys that replace those of the tiny drafter's config.json
    twice    serve the prompts one by one, and each once more
The last line is JSON: for each case {"served": tokens of each prompt}, or {"refused": type and text}
where the engine does not start; "twice" gives {"first": [...], "again": [...]}, for each prompt its
tokens, how many of the prompt were found cached, and every draft.
"""

from tests.support import interpret  # noqa: I001  before vLLM
import gc
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

TINY = Path(interpret.__file__).parent.parent.parent / "demo/tiny"


def generate(llm, lengths, max_tokens=1000):
    """Greedy answers to prompts of these lengths, as far as the engine lets them run."""
    text = json.loads((TINY / "prompts.json").read_text())["prompts"][0]
    prompts = [{"prompt_token_ids": text[:length]} for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(answer):
    return list(answer.outputs[0].token_ids)


def generate_twice(llm, lengths):
    """Every prompt alone, and again, its prefix in the cache by then."""
    found = {"first": [], "again": []}
    for length in lengths:
        for round in found.values():
            drafts, propose = [], DFlashSpeculator.propose

            def recorded(self, *args, **kwargs):
                drafts.append(propose(self, *args, **kwargs).tolist())
                return torch.tensor(drafts[-1])

            DFlashSpeculator.propose = recorded
            (answer,) = generate(llm, [length], max_tokens=16)
            DFlashSpeculator.propose = propose
            round.append([tokens(answer), answer.num_cached_tokens, drafts])
    return found


def start(drafter, steps=None, engine=None, spec=None):
    spec = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": steps, **(spec or {})}
    defaults = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    defaults["enable_prefix_caching"] = False
    return LLM(
        model=str(TINY / "target"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config=spec if steps else None,
        **{**defaults, **(engine or {})},
    )


def run(case):
    lengths, keys, twice = case.pop("lengths", ()), case.pop("draft", {}), case.pop("twice", False)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TINY / "draft", folder, dirs_exist_ok=True)
        config = Path(folder, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | keys))
        try:
            llm = start(folder, **case)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return generate_twice(llm, lengths) if twice else {"served": list(map(tokens, generate(llm, lengths)))}


def main(cases):
    answers = []
    for case in cases:
        answers.append(run(case))
        gc.collect()
        cleanup_dist_env_and_memory()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
