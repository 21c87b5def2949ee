"""What a serve generates at its edges; what it refuses is in patched/test_drafter_config.py.

Faults tried, and where:
    max_model_len - S ... max_model_len, every request length around block borders   test_served_to_the_last_token
    a prefix hit, a prompt of S + 1 tokens, a one-token prompt that joins a batch    the others
"""

from unittest.mock import patch

import pytest
import torch

from tests.support.serve import LIMIT, PROMPT, STEPS, engine, generate, tokens

pytestmark = pytest.mark.engine

LENGTHS = {
    (1, 7): (48, *range(LIMIT - 8, LIMIT)),
    (8, 15): (15, 16, 17, 31, 32, 33, *range(LIMIT - 16, LIMIT)),
}


@pytest.fixture(scope="module")
def alone():
    """{length of the prompt: what the target says after it, to max_model_len}"""
    lengths = sorted({length for lengths in LENGTHS.values() for length in lengths})
    with engine(steps=None) as llm:
        said = dict(zip(lengths, map(tokens, generate(llm, lengths))))
    assert all(len(text) == LIMIT - length for length, text in said.items())
    return said


@pytest.mark.parametrize(
    "steps", [1, 7, pytest.param(8, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)]
)
def test_served_to_the_last_token(alone, steps):
    """Greedy requests that end at max_model_len say what the target says alone, to its last token."""
    lengths = next(lengths for of, lengths in LENGTHS.items() if steps in of)
    with engine(steps=steps) as llm:
        assert dict(zip(lengths, map(tokens, generate(llm, lengths)))) == {n: alone[n] for n in lengths}


def test_drafts_after_a_prefix_hit_are_those_without():
    """Draft K/V of every block that a hit can return, its last included, is as good as new."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    propose = DFlashSpeculator.propose

    def recorded(self, *args, **kwargs):
        drafts.append(propose(self, *args, **kwargs).tolist())
        return torch.tensor(drafts[-1])

    rounds = [], []
    with engine(enable_prefix_caching=True, max_model_len=128) as llm:
        for length in (33, 48, 49):
            for round in rounds:
                drafts = []
                with patch.object(DFlashSpeculator, "propose", recorded):
                    (answer,) = generate(llm, [length], max_tokens=16)
                round.append((answer.num_cached_tokens, tokens(answer), drafts))
    first, again = rounds
    assert [cached for cached, *_ in again] == [32, 32, 48]
    assert [rest for _, *rest in first] == [rest for _, *rest in again]


@pytest.fixture(scope="module")
def served():
    """A prompt of S + 1 tokens decodes, a prompt of one token joins it, and again, the last time without reset_slot.

    Tokens of those that join, and for each batch [requests, tokens, uniform count] of the runner.
    """
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    batches, dispatch = [], model_runner.dispatch_cg_and_sync_dp

    def recorded(manager, num_reqs, num_tokens, uniform, *rest, **named):
        batches.append([num_reqs, num_tokens, uniform])
        return dispatch(manager, num_reqs, num_tokens, uniform, *rest, **named)

    def add(name, prompt, length):
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, seed=7, detokenize=False)
        core.add_request(name, {"prompt_token_ids": prompt}, params)

    def joined(name):
        """Tokens of a one-token prompt that joins the running batch."""
        add(name, PROMPT[:1], 12)
        while True:
            for output in core.step():
                if output.request_id == name and output.finished:
                    return tokens(output)

    with engine(spec={"draft_sample_method": "probabilistic"}, max_model_len=256) as llm:
        core = llm.llm_engine
        with patch.object(model_runner, "dispatch_cg_and_sync_dp", recorded):
            add("first", PROMPT[: STEPS + 1], 200)
            for _ in range(4):
                core.step()
            found = {"batches": list(batches)}
            batches.clear()
            found["joined"], found["joined batches"] = joined("second"), list(batches)
            found["joined again"] = joined("again")
            with patch.object(DFlash2Speculator, "reset_slot", lambda self, slot: None):
                found["not reset"] = joined("third")
        core = None
    return found


def test_padded_drafts_are_not_emitted_unseen(served):
    """A one-token prompt that joins a decoding batch is verified with S drafts of 0."""
    assert served["joined batches"][0][:2] == [2, 2 * (STEPS + 1)], "the scheduler did not pad"
    assert served["not reset"][:STEPS] == [0] * STEPS, "without the reset they are all accepted: else nothing is proved"
    assert served["joined"][:STEPS] != [0] * STEPS


def test_a_seeded_request_reproduces_in_the_engine(served):
    assert served["joined again"] == served["joined"]


def test_a_prompt_of_a_drafts_size_is_no_decode_batch(served):
    assert served["batches"][0] == [1, STEPS + 1, None], "the prompt of S + 1 tokens"
    assert served["batches"][-1] == [1, STEPS + 1, STEPS + 1], "decoding"
