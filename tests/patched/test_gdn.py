"""A gated delta net gives every request what it would give it alone, whoever else is in the batch.

The target of DFlash2's largest checkpoint is a hybrid; its delta nets are vLLM's, and on 0.27.1 three
kinds of batch went wrong with speculative decoding, plain decoding being right. Each case here is a
batch of one kind; its name is a function of gdn_probes.py.

Faults tried: fewer drafts than S behind another request, no drafts at all after some were accepted,
a prompt's piece of S + 1 tokens in front, a one-token prompt that is padded, or alone.
"""

from pathlib import Path

import pytest

from tests.support.answers import last_line

PROBES = Path(__file__).with_name("gdn_probes.py")


@pytest.fixture(scope="module")
def errors(run_patched):
    return last_line(run_patched(PROBES, interpret=True, env={"VLLM_LOGGING_LEVEL": "ERROR"}).stdout)


@pytest.mark.parametrize(
    "case",
    [
        "uniform",
        "one_row_before_fewer_drafts",  # spec-gates and undrafted-rows
        "prompt_piece_of_a_drafts_size_first",  # spec-gates
        "short_prompt_before_fewer_drafts",  # spec-gates
        "nobody_has_drafts",  # undrafted-rows
        "one_token_prompt_joins_with_padding",  # fresh-states
        "one_token_prompts_alone",  # fresh-states
    ],
)
def test_every_row_is_as_if_alone(errors, case):
    assert errors[case] < 1e-5
