"""Engines of the tiny pair in this process, one after another."""

import contextlib
import gc
import json

from tests.support.trees import TINY

LIMIT = 64  # max_model_len, four pages of 16
STEPS = 7
PROMPT = json.loads((TINY / "prompts.json").read_text())["prompts"][0]


def clean_up():
    """After an engine, or one that did not start: the next one finds nothing of it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


@contextlib.contextmanager
def engine(draft=TINY / "draft", steps=STEPS, spec=(), **arguments):
    """`LLM` with the tiny target and a drafter of `steps`; without a drafter for None. `spec`: further keys of it."""
    from vllm import LLM

    spec = {"method": "dflash", "model": str(draft), "num_speculative_tokens": steps, **dict(spec)}
    defaults = {"max_model_len": LIMIT, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    try:
        yield LLM(
            model=str(TINY / "target"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            speculative_config=None if steps is None else spec,
            **{**defaults, "enable_prefix_caching": False, **arguments},
        )
    finally:
        clean_up()


def generate(llm, lengths, max_tokens=1000):
    """Greedy answers to prompts of these lengths, as far as the engine lets them run."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(answer):
    return list(answer.outputs[0].token_ids)
