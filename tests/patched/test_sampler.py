"""Each row of a verified block is processed as plain decoding would process it after the same tokens.

vLLM's sampler, on a block of drafts at once and again token by token. What looks back must count the drafts
before its row; each case also shows that it would be seen if it did not. (top_k and top_p look at one row
only, and Triton's interpreter cannot run their kernel; test_lossless.py has them.)
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  the CPU's stand-ins for pinned memory and streams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

V = 64
PROMPT = [7, 8, 9, 7]
OUTPUT = [10, 11, 12]
DRAFTS = [20, 21, 20, 22, 23]

# Words inside the block, across its start and before it, and some that are there only if read one place early.
WORDS = [
    [21, 20, 5],
    [20, 21, 6],
    [12, 20, 21, 30],
    [11, 12, 31],
    [12, 12, 32],
    [12, 20, 33],
    [40],
    [9, 7, 34],
    [22, 23, 35],
]
CASES = {
    "bad words": {"bad_words": WORDS},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "min_tokens": {"min_tokens": len(OUTPUT) + 3, "stop_token_ids": [3, 20]},
    "all together": {
        "bad_words": WORDS,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "repetition_penalty": 0.8,
        "min_tokens": len(OUTPUT) + 2,
        "stop_token_ids": [3, 21],
        "logit_bias": {20: 1.5, 6: -2.0, 50: 4.0},
        "allowed_token_ids": list(range(2, 60)),
        "min_p": 0.02,
        "temperature": 0.7,
    },
}


class Slots:
    """One sampler with `count` requests, all with the same parameters and the history PROMPT + output."""

    def __init__(self, parameters, outputs):
        given = dict(parameters)
        words = given.pop("bad_words", None)
        params = SamplingParams(temperature=given.pop("temperature", 0), **given)
        params._bad_words_token_ids = words
        params._all_stop_token_ids = set(given.get("stop_token_ids", ()))
        self.states = RequestState(len(outputs), 64, 64, len(DRAFTS), V, torch.device("cpu"))
        self.sampler = Sampler(len(outputs), V, torch.device("cpu"), self.states)
        for i, output in enumerate(outputs):
            self.states.add_request(str(i), len(PROMPT), PROMPT + output, 0, 32)
            slot = self.states.req_id_to_index[str(i)]
            self.sampler.add_request(slot, len(PROMPT), params)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def process(self, logits, requests, inputs, local_pos):
        """Processed logits of rows that belong to `requests`, whose inputs and places in a block are given."""
        slots = np.array([self.states.req_id_to_index[str(r)] for r in requests], np.int32)
        positions = [len(PROMPT + OUTPUT) - 1 + i for i in range(len(requests))]
        return self.sampler.apply_sampling_params(
            logits,
            torch.from_numpy(slots),
            np.unique(slots),
            torch.tensor(positions),
            torch.tensor(inputs),
            torch.tensor(local_pos, dtype=torch.int32),
        )


@pytest.fixture
def logits():
    rows = np.random.default_rng(0).normal(size=(len(DRAFTS) + 1, V))
    return torch.from_numpy(rows.astype(np.float32))


NEED = {name: pytest.mark.needs_patch("bad-words") for name, given in CASES.items() if "bad_words" in given}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEED.get(name, ())) for name in CASES])
def test_a_block_is_processed_as_its_tokens_one_by_one(name, logits):
    rows = len(DRAFTS) + 1
    inputs = [OUTPUT[-1], *DRAFTS]
    block = Slots(CASES[name], [OUTPUT]).process(logits, [0] * rows, inputs, list(range(rows)))
    plain = Slots(CASES[name], [OUTPUT + DRAFTS[:i] for i in range(rows)])
    one_by_one = plain.process(logits, range(rows), inputs, [0] * rows)
    torch.testing.assert_close(block, one_by_one, rtol=0, atol=0)
    # A sampler that sees no drafts would differ, or this case shows nothing.
    unseen = Slots(CASES[name], [OUTPUT] * rows).process(logits, range(rows), inputs, [0] * rows)
    assert name == "min_tokens" or not torch.equal(unseen, one_by_one)


def drafter(architecture, method):
    return SimpleNamespace(method=method, draft_model_config=SimpleNamespace(architectures=[architecture]))


ASKED = pytest.mark.parametrize("parameters", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}], ids=str)


@ASKED
@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "DFlash2BeamDraftModel"])
@pytest.mark.needs_patch("min-p-logit-bias", raises=VLLMValidationError)
def test_a_dflash2_draft_takes_min_p_and_logit_bias(architecture, parameters):
    SamplingParams(temperature=1, **parameters)._validate_spec_decode(drafter(architecture, "dflash"))


@ASKED
@pytest.mark.parametrize("architecture, method", [("DFlashDraftModel", "dflash"), ("EagleLlamaForCausalLM", "eagle")])
def test_other_drafts_take_neither(architecture, method, parameters):
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        SamplingParams(temperature=1, **parameters)._validate_spec_decode(drafter(architecture, method))
