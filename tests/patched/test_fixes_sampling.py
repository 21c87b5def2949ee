"""Each sampling fix does on the real 0.27.1 modules what its patch file says, and 0.27.1 alone does not.

sampling_probes.py runs once against the patched vLLM and once against an unpatched one; that the
second shows the fault is what makes the first worth looking at. What the fixes are for together,
output that is exactly the target's, is test_lossless.py's.

Faults tried here: NaN rows in the logits (greedy, both verifications, the plain sampler, a proposal of
NaN), ids at the vocabulary's edge, placeholders from any draft on, a one-token prompt that joins a
decoding batch, a prompt of S + 1 tokens, drafts past a grammar's end.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.answers import Answers

TESTS = Path(__file__).resolve().parent
PROBES = TESTS / "sampling_probes.py"
UNPATCHED = (
    *("draft_noise", "draft_noise_dspark", "captured_slots", "nan_rows", "nan_proposal"),
    *("placeholders", "grammar_end", "first_passes"),
)
PATCHED = (*UNPATCHED, "draft_samplers", "reset_slots", "seeds_of_drafts", "uniform_counts")
V, S = 16, 7
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def found(run_patched):
    """found(probe) -> what the probe of that name saw in the patched vLLM."""
    return Answers(run_patched(PROBES, *PATCHED, interpret=True, env=QUIET).stdout)


@pytest.fixture(scope="module")
def before(pristine):
    """before(probe) -> what it saw in vLLM 0.27.1 as released."""
    folders = os.pathsep.join(map(str, (pristine, TESTS.parent.parent)))
    environment = {**os.environ, **QUIET, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROBES), *UNPATCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return Answers(done.stdout)


@pytest.fixture(scope="module")
def served(run_patched):
    return Answers(run_patched(PROBES, "serve", interpret=True, env=QUIET).stdout)("serve")


@pytest.mark.parametrize("probe", ["draft_noise", "draft_noise_dspark"])
def test_drafts_have_noise_of_their_own(found, before, probe):
    keys = found(probe)
    assert keys["drawn"] == keys["apart"] != keys["shared"]
    assert before(probe)["drawn"] == before(probe)["shared"], "0.27.1 shares it: else this proves nothing"


def test_every_other_drafter_samples_with_the_fixed_function(found):
    assert found("draft_samplers") == []


def test_a_slot_is_reset_for_its_next_request(found):
    """Exactly all mass on token 0 at every step, whatever the drafter; other slots untouched."""
    for drafter, slot in found("reset_slots").items():
        assert slot["proposal"] == [[1.0] + [0.0] * (V - 1)] * 2, drafter
        assert slot["others_kept"], drafter
    assert found("reset_slots")["DFlash2Speculator"]["sparse"] == [[[0] * 4] * 2, [[1.0, 0.0, 0.0, 0.0]] * 2]


def test_padded_drafts_are_not_emitted_unseen(served):
    """End to end: a one-token prompt that joins a decoding batch is verified with S drafts of 0."""
    assert served["joined batches"][0][:2] == [2, 2 * (S + 1)], "the scheduler did not pad"
    assert served["not reset"][:S] == [0] * S, "without the reset they are all accepted: else this proves nothing"
    assert served["joined"][:S] != [0] * S


def test_a_seeded_request_reproduces_in_the_engine(served):
    assert served["joined again"] == served["joined"]


def test_capture_touches_no_slot(found, before):
    assert found("captured_slots") == [-1]
    assert before("captured_slots") == [0]


@pytest.mark.parametrize("method", ["greedy", "standard", "block", "sampler"])
def test_nan_rows_stay_inside_the_vocabulary(found, before, method):
    assert found("nan_rows")[method] < V
    assert before("nan_rows")[method] >= V


def test_a_proposal_of_nan_leaves_the_target_exact(found, before):
    tokens = found("nan_proposal")
    assert tokens["emitted"] == tokens["from p"]
    assert before("nan_proposal")["emitted"] != before("nan_proposal")["from p"]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_placeholders_end_the_block(found, before, method):
    tokens = found("placeholders")[method]
    assert tokens["emitted"] == tokens["right"]
    if method == "block":
        assert any(-1 in emitted for emitted in before("placeholders")[method]["emitted"])


def test_a_prefill_is_no_decode_batch(found, served):
    assert found("uniform_counts") == [S + 1, None]
    assert served["batches"][0] == [1, S + 1, None], "the prompt of S + 1 tokens"
    assert served["batches"][-1] == [1, S + 1, S + 1], "decoding"


def test_eagle_and_mtp_tell_prefills_too(found, before):
    """... and hand on the anchors' positions, 40 - 3 and 60, which key their drafts' noise."""
    assert found("first_passes") == [[[[37, 60]], [True]]] * 2
    assert before("first_passes") == [[[], [False]]] * 2


def test_tokens_past_a_grammars_end_are_no_error(found, before):
    grammar = found("grammar_end")
    assert grammar["in one call"] and all(grammar["apart"]) and grammar["ended"] == [True, True]
    assert grammar["valid drafts"] == [0, 2]
    assert grammar["still open"] and grammar["rolled back"]
    assert not grammar["wrong token"]
    assert not before("grammar_end")["in one call"] and not all(before("grammar_end")["apart"])


def test_rounds_that_share_positions_share_no_noise(found):
    """EAGLE and MTP; the walk's and the verifier's keys are in test_lossless.py."""
    assert found("seeds_of_drafts") == [
        [5 ^ 90 << 32, 6, 7 ^ 30 << 32, 8],
        [5 ^ 94 << 32, 6, 7 ^ 31 << 32, 8],
    ]
