"""Starts the real engine under Triton's interpreter, once a case, and prints what it generates.

    python runtime_serve.py CASES

CASES is JSON, a list of objects whose keys may be
    steps    num_speculative_tokens; without it the target is served alone
    lengths  lengths of the prompts
    engine   further arguments of `LLM`
    spec     further keys of its speculative_config
    draft    keys that replace those of the tiny drafter's config.json
The last line is JSON: for each case {"served": tokens of each prompt}, or {"refused": type and text}
where the engine does not start.
"""

import interpret  # noqa: F401, I001  before vLLM
import gc
import json
import shutil
import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TINY = Path(interpret.__file__).parent / "tiny"


def generate(llm, lengths):
    """Greedy tokens after prompts of these lengths, as far as the engine lets them run."""
    text = json.loads((TINY / "prompts.json").read_text())["prompts"][0]
    prompts = [{"prompt_token_ids": text[:length]} for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]


def start(drafter, steps=None, engine=None, spec=None):
    spec = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": steps, **(spec or {})}
    defaults = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    return LLM(
        model=str(TINY / "target"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=spec if steps else None,
        **{**defaults, **(engine or {})},
    )


def run(case):
    lengths, keys = case.pop("lengths", ()), case.pop("draft", {})
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TINY / "draft", folder, dirs_exist_ok=True)
        config = Path(folder, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | keys))
        try:
            llm = start(folder, **case)
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"served": generate(llm, lengths)}


def main(cases):
    answers = []
    for case in cases:
        answers.append(run(case))
        gc.collect()
        cleanup_dist_env_and_memory()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
