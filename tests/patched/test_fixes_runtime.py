"""Each runtime fix does on the real 0.27.1 modules what its patch file says, and fails without it.

The patched vLLM runs in one process for all of them (runtime_probes.py), the whole engine in
another (runtime_serve.py); here is what they must find.

Faults tried, and where:
    max_model_len - S ... max_model_len, every request length around block borders,
    S = 1 ... 15 with a block size of 8           test_draft_slots, test_served_to_the_last_token
    max_num_seqs 1, 64, 1024                      test_token_budget.py, test_cache_estimate
    VLLM_USE_V2_MODEL_RUNNER=0                    test_v1_runner_is_refused
    float16, pipeline parallel                    test_refused_at_start
"""

import json
from pathlib import Path

import pytest

from tests.support.answers import Answers, last_line

PROBES = Path(__file__).with_name("runtime_probes.py")
SERVE = Path(__file__).parent.parent / "engine/runtime_serve.py"
LIMIT = 64  # max_model_len that runtime_serve.py serves with, four pages of 16


@pytest.fixture(scope="module")
def found(run_patched):
    """found(probe) -> what the probe of that name saw in the patched vLLM."""
    return Answers(run_patched(PROBES, interpret=True, env={"VLLM_LOGGING_LEVEL": "ERROR"}).stdout)


def test_draft_slots(found):
    """Slots, positions and lengths of every row, against plain Python, S = 1 ... 15, DFlash and DSpark."""
    assert found("draft_slots") == []


def test_window_blocks_of_a_hybrid_are_recorded(found):
    recorded = found("recorded_blocks")
    assert recorded["hybrid"] == {"mamba": [3, 0], "full": [3, 3], "window": [3, 3]}
    assert recorded["plain"] == {"full": [3, 0], "window": [3, 0]}, "only a shared pool needs zeroing"


def test_window_blocks_are_zeroed(found):
    assert found("zeroed_memory") == {"full": [2, 5], "window": [2, 5]}


def test_rotary_cache_reaches_the_targets_length(found):
    assert found("rope_lengths") == [[128, 256], [256, 256], [4096, 4096]]


def test_compile_cache_key_has_s(found):
    seven, again, fifteen = found("compile_keys")
    assert seven == again != fifteen


def test_v1_runner_is_refused(found):
    choice = found("runner_choice")
    assert choice["None"] == choice["1"] == {"served": 2}
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in choice["0"]["refused"]


@pytest.mark.parametrize(
    "fault, says", [("float16", "--dtype bfloat16"), ("pipeline parallel", "Pipeline parallelism is not supported")]
)
def test_refused_at_start(found, fault, says):
    answers = found("refusals")
    assert answers["bfloat16"] == {"served": "torch.bfloat16"}
    assert says in answers[fault]["refused"]


def test_prefix_hits_of_a_hybrid_keep_their_last_block(found):
    """Whole blocks of 64 of a prompt but its last token; a dropped block would leave 100 tokens no hit."""
    assert found("prefix_hits") == [[100, 64], [129, 128], [200, 192], [500, 448]]


def test_fa3_schedules_the_draft_with_its_own_geometry(found):
    assert found("fa3_geometry") == [8, 4, 32, [-1, -1]]


def test_fa3_makes_no_schedule_for_a_windowed_draft(found):
    schedules = found("fa3_window")
    assert schedules["None"] is not None, "a draft without a window keeps its schedule"
    assert schedules["64"] is None


def test_a_layers_own_window_wins(found):
    assert found("layer_windows") == [
        [None, True, [-1, -1]],
        [512, True, [511, 0]],
        [256, True, [255, 0]],
        [256, False, [255, 255]],
        [None, False, [-1, -1]],
    ]


def test_cache_estimate(found):
    """The S x K x V cache in words, for max_num_seqs 1, 64, 1024; nothing where drafting is greedy."""
    greedy, *sparse, dense, unknown = found("cache_estimates")
    assert greedy == ""
    for seqs, text in zip((1, 64, 1024), sparse, strict=True):
        assert f"max_num_seqs {seqs} x 15 draft tokens x 16 candidates" in text
    # K ids of 8 bytes and K scores of 4 for each draft token, against the vocabulary in float32.
    assert "takes 2.81 MiB" in sparse[-1] and "takes 0.02 GiB" in dense
    assert "max_num_seqs 1024 x 15 draft tokens x vocabulary 320" in dense
    assert unknown == {"refused": "ValueError: DFLASH2_DENSE_PROPOSAL must be 0 or 1, got 'yes'."}


@pytest.fixture(scope="module")
def serve(run_patched):
    """serve(cases) -> what the engine generated for each, or why it refused to start."""

    def run(cases):
        env = {"VLLM_LOGGING_LEVEL": "ERROR"}
        return last_line(run_patched(SERVE, json.dumps(cases), interpret=True, env=env).stdout)

    return run


@pytest.mark.parametrize(
    "steps, lengths",
    [
        ((1, 7), (48, *range(LIMIT - 8, LIMIT))),
        pytest.param((8, 15), (15, 16, 17, 31, 32, 33, *range(LIMIT - 16, LIMIT)), marks=pytest.mark.slow),
    ],
)
def test_served_to_the_last_token(serve, steps, lengths):
    """Greedy requests that end at max_model_len say what the target says alone, to its last token."""
    alone, *drafted = serve([{"lengths": lengths}, *({"steps": s, "lengths": lengths} for s in steps)])
    assert [len(tokens) for tokens in alone["served"]] == [LIMIT - length for length in lengths]
    for s, answer in zip(steps, drafted, strict=True):
        assert answer == alone, f"S = {s}"


def test_drafts_after_a_prefix_hit_are_those_without(serve):
    """Draft K/V of every block that a hit can return, its last included, is as good as new."""
    lengths = (33, 48, 49)
    engine = {"enable_prefix_caching": True, "max_model_len": 128}
    (answer,) = serve([{"steps": 7, "twice": True, "lengths": lengths, "engine": engine}])
    assert [cached for _, cached, _ in answer["again"]] == [32, 32, 48]
    for (first, _, drafts), (again, _, drafts_again) in zip(answer["first"], answer["again"], strict=True):
        assert (first, drafts) == (again, drafts_again)
