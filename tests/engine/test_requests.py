"""Every kind of request, answered with the drafter as without it, on the CPU engine.

serve_requests.py runs the engines. The drafting one is under pressure: prompts in chunks, a prefix cache, few
blocks, priorities. No request was preempted where it was tried. LoRA, sleep and the OpenAI server need a GPU.
"""

import json

import pytest
import torch

from tests.support.trees import TINY

PROMPTS = json.loads((TINY / "prompts.json").read_text())["prompts"]
MAX_MODEL_LEN = 256
NEW_TOKENS = 9
# The first prompt holds the first and not the second: it is thinking.
THINK, END_THINK = "import", "\n#!"
NEWLINE, END = 10, 256


def thought(prompt):
    """How many tokens the prompt has thought."""
    return len(prompt) - bytes(prompt).rindex(THINK.encode()) - len(THINK)


def grammar(**kind):
    return {"structured_outputs": kind, "max_tokens": 20}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
LONG = (PROMPTS[0] + PROMPTS[1])[: MAX_MODEL_LEN - 1]
# name -> parameters, or (prompt, parameters); without a prompt each row takes the next one
ROWS = {
    "greedy": {"max_tokens": 24},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.2},
    "repetition penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {32: -100.0, 101: 5.0, 116: -4.0}},
    "min_p": {"min_p": 0.3},
    "top_k and top_p": {"top_k": 3, "top_p": 0.5},
    "allowed_token_ids": {"allowed_token_ids": list(range(97, 123))},
    "bad_words, one token each": {"bad_words": ["t", "s"]},
    "bad_words, several tokens": (PROMPTS[0], {"bad_words": ["rs im", "port", "ort", "om", "or "]}),
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [NEWLINE, 32, 101]},
    "stop_token_ids": (PROMPTS[0], {"stop_token_ids": [112]}),
    "stop string": (PROMPTS[0], {"stop": ["port", "im"]}),
    "stop string, included": (PROMPTS[0], {"stop": ["mpo"], "include_stop_str_in_output": True}),
    "end of text": (PROMPTS[0], {"logit_bias": {END: 22.0}}),
    "end of text ignored": (PROMPTS[0], {"logit_bias": {END: 22.0}, "ignore_eos": True}),
    "logprobs": {"logprobs": 3},
    "logprobs with penalties": {"logprobs": 2, "presence_penalty": 1.0},
    "logprob_token_ids": {"logprob_token_ids": [1, 2, 97]},
    "prompt_logprobs": {"prompt_logprobs": 2, "max_tokens": 3},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2": {"max_tokens": 2},
    "one-token prompt": ([NEWLINE], {}),
    "one-token prompt, prompt_logprobs": ([105], {"prompt_logprobs": 1}),
    "two-token prompt, prompt_logprobs": ([105, 109], {"prompt_logprobs": 1}),
    "prompt of max_model_len - 1": (LONG, {}),
    "prompt of max_model_len - 5": (LONG[4:], {}),
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "logit_bias": {32: 100.0},
    },
    "choice": grammar(choice=["import torch", "from x", "zebra"]),
    "regex": grammar(regex="[a-f]{3}[0-9]+x"),
    "json": grammar(json=SCHEMA),
    "thinking_token_budget 0": (PROMPTS[0], {"thinking_token_budget": 0}),
    "thinking_token_budget, ends in a block": (PROMPTS[0], {"thinking_token_budget": thought(PROMPTS[0]) + 5}),
    "thinking_token_budget, not reached": (PROMPTS[0], {"thinking_token_budget": 1000}),
}
SAMPLED = {
    "seed": {"temperature": 0.8, "seed": 5, "min_p": 0.05, "top_k": 40},
    "n": {"temperature": 0.9, "seed": 6, "n": 2},
}


@pytest.fixture(scope="module")
def served(run_patched, tmp_path_factory):
    """What serve_requests.py wrote down."""
    out = tmp_path_factory.mktemp("requests") / "out.pt"
    run_patched(f"from tests.engine import serve_requests; serve_requests.main({str(out)!r})", timeout=1800)
    return torch.load(out)


@pytest.mark.parametrize("name", ROWS)
def test_the_answer_is_that_without_the_drafter(served, name):
    plain, ours = served["plain"][name], served["ours"][name]
    assert ours["texts"] == plain["texts"], "text, finish reason, stop reason"
    assert ours["tokens"] == plain["tokens"]
    for key in ("logprobs", "prompt_logprobs"):
        assert_same_logprobs(ours[key], plain[key])


def assert_same_logprobs(ours, plain):
    """Nested lists of {token: (logprob, rank)}; engines add up in other orders."""
    if isinstance(plain, list):
        assert len(ours) == len(plain)
        for pair in zip(ours, plain):
            assert_same_logprobs(*pair)
    elif isinstance(plain, dict):
        assert {token: rank for token, (_, rank) in ours.items()} == {token: rank for token, (_, rank) in plain.items()}
        assert all(ours[token][0] == pytest.approx(logprob, abs=1e-3) for token, (logprob, _) in plain.items())
    else:
        assert ours is plain is None


def test_the_rows_show_what_they_are_for(served):
    """A row that the parameter does not touch would be equal with any sampler."""
    plain = served["plain"]

    def ending(name):
        (ended,) = plain[name]["texts"]
        return ended

    words = ROWS["bad_words, several tokens"][1]["bad_words"]
    assert any(word in ending("greedy")[0] for word in words)
    assert not any(word in ending("bad_words, several tokens")[0] for word in words)
    assert ending("end of text")[1] == "stop" and ending("end of text ignored")[1] == "length"
    assert ending("stop_token_ids")[1:] == ("stop", 112) and ending("stop string")[1:] == ("stop", "im")
    assert ending("repetition_detection")[1] == "repetition"
    assert json.loads(ending("json")[0])["b"] in ("x", "yy") and ending("choice")[0] == "import torch"
    assert ending("thinking_token_budget 0")[0].startswith(END_THINK)
    assert ending("thinking_token_budget, ends in a block")[0].index(END_THINK) == 5
    assert END_THINK not in ending("thinking_token_budget, not reached")[0]
    assert len(plain["prompt of max_model_len - 1"]["tokens"][0]) == 1
    assert len(plain["logprob_token_ids"]["logprobs"][0][-1]) in (3, 4)


def test_the_drafter_was_under_pressure(served):
    assert served["accepted"] > 100
    assert any(answer["cached"] for answer in served["ours"].values())


def test_seeds_reproduce_whatever_the_batch(served):
    once, again = served["sampled"]
    for name in SAMPLED:
        assert once[name]["tokens"] == again[name]["tokens"]
    assert len(set(map(tuple, once["n"]["tokens"]))) == 2


def test_an_abort_leaves_the_others_alone(served):
    ((_, answer),) = served["aborted"]
    assert answer["tokens"] == served["plain"]["greedy"]["tokens"]
