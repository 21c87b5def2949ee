"""Serves the same requests by an engine without a drafter and by one with, and writes down what both answer.

    python -m tests.engine.serve_requests OUT    OUT is read with torch.load

The drafting engine is under pressure: prompts in chunks, a prefix cache, few blocks, priorities.
"""

from tests.support import interpret  # noqa: F401, I001  before vLLM
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.engine.test_requests import END_THINK, MAX_MODEL_LEN, NEW_TOKENS, PROMPTS, ROWS, SAMPLED, THINK
from tests.support.trees import TINY

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

KINDS = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}


def write_target(folder):
    """The tiny target with a tokenizer, whose tokens are the bytes, as the target was trained."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for part in (TINY / "target").iterdir():
        (folder / part.name).symlink_to(part)
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's bytes that stand for themselves
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def start(target, **arguments):
    return LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        block_size=16,
        reasoning_config=ReasoningConfig(reasoning_start_str=THINK, reasoning_end_str=END_THINK),
        **arguments,
    )


def table(rows):
    """[(prompt, parameters)] of rows."""
    for i, row in enumerate(rows.values()):
        prompt, parameters = row if isinstance(row, tuple) else (PROMPTS[i % len(PROMPTS)], row)
        given = {"temperature": 0, "max_tokens": NEW_TOKENS, **parameters}
        for key, kind in KINDS.items():
            if key in given:
                given[key] = kind(**given[key])
        yield {"prompt_token_ids": prompt}, SamplingParams(**given)


def generate(llm, rows, **options):
    prompts, params = zip(*table(rows))
    answers = llm.generate(list(prompts), [p.clone() for p in params], use_tqdm=False, **options)
    return dict(zip(rows, map(answer, answers)))


def answer(output):
    """What a user sees of a finished request."""
    return {
        "texts": [(o.text, o.finish_reason, o.stop_reason) for o in output.outputs],
        "tokens": [list(o.token_ids) for o in output.outputs],
        "logprobs": [plain_logprobs(o.logprobs) for o in output.outputs],
        "prompt_logprobs": plain_logprobs(output.prompt_logprobs),
        "cached": output.num_cached_tokens,
    }


def plain_logprobs(places):
    return places and [place and {token: (p.logprob, p.rank) for token, p in place.items()} for place in places]


def aborted(llm):
    """The greedy row's answer while a request beside it is aborted in the middle of its text."""
    (prompt, params), (other, _) = list(table({"greedy": ROWS["greedy"], "other": {}}))
    engine = llm.llm_engine
    engine.add_request("kept", prompt, params)
    engine.add_request("aborted", other, params.clone())
    finished = []
    for step in range(100):
        if step == 5:
            engine.abort_request(["aborted"])
        finished += [output for output in engine.step() if output.finished]
        if not engine.has_unfinished_requests():
            return [(output.request_id, answer(output)) for output in finished if output.request_id == "kept"]


def metric(llm, name):
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def main(out):
    # The CPU has no pinned memory, which the V2 runner asks for where it copies a grammar's rows.
    tensor = torch.tensor

    def unpinned(*given, pin_memory=False, **named):
        return tensor(*given, **named)

    torch.tensor = unpinned
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import sampler, states

    # The interpreter cannot run the Triton one, which takes its row from a loop's variable.
    states.apply_top_k_top_p = sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p_pytorch
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(Path(folder))
        plain = start(target)
        found = {"plain": generate(plain, ROWS)}
        drafting = start(
            target,
            speculative_config={
                "method": "dflash",
                "model": str(TINY / "draft"),
                "num_speculative_tokens": 7,
                "draft_sample_method": "probabilistic",
            },
            max_num_batched_tokens=128,
            num_gpu_blocks_override=64,
            scheduling_policy="priority",
        )
        found["ours"] = generate(drafting, ROWS, priority=[i * 7 % 5 for i in range(len(ROWS))])
        found["accepted"] = metric(drafting, "vllm:spec_decode_num_accepted_tokens")
        found["sampled"] = [generate(drafting, SAMPLED), generate(drafting, {**SAMPLED, "beside": {}})]
        found["aborted"] = aborted(drafting)
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1])
