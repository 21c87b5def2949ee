"""The target's token budget is that of a serve without a drafter, and a full batch drafts within its own buffers.

Faults tried: S = 1 ... 15 at max_num_seqs 1, 256 and 1,024; fewer tokens per step than a full batch drafts rows;
max_num_seqs x S < max_num_batched_tokens < max_num_seqs x (S + 1), at which the profiling run alone walks further
than max_num_batched_tokens; a budget as small as one request's S + 1 rows.
"""

import json
from pathlib import Path

import pytest

from tests.support.answers import last_line

PROBES = Path(__file__).with_name("budget_probes.py")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def configs(run_patched):
    return last_line(run_patched(PROBES, "configs", interpret=True, env=QUIET).stdout)


def test_every_s_starts_with_the_targets_whole_budget(configs):
    cases = configs["default_flags"]
    assert len(cases) == 45
    for case in cases:
        assert case["ours"] == case["plain"], case


def test_buffers_hold_a_full_batch(configs):
    for case in configs["default_flags"]:
        assert case["rows"] >= case["seqs"] * (case["S"] + 1), case


def test_the_log_says_what_the_buffers_take(configs):
    """int32 ids, int64 positions, a padding flag and an int64 slot per KV cache group for each row."""
    for case in configs["default_flags"]:
        seqs, block = case["seqs"], case["S"] + 1
        rows = max(seqs * block, case["plain"][0])
        assert case["bytes"] == rows * (4 + 8 + 1 + 2 * 8) + 4 * (3 * seqs + 1), case
        assert f"{case['bytes'] / 2**20:.2f} MiB for max_num_seqs {seqs} x {block} rows" in case["says"]
        scored = min(seqs * case["S"], 2048)
        assert f"{scored * 320 * 2 / 2**20:.1f} MiB for the logits of {scored} rows" in case["says"]


def test_drafters_in_the_targets_buffers_keep_their_reserve(configs):
    for steps, (batched, scheduled) in zip((7, 15), configs["other_drafters"], strict=True):
        assert scheduled == batched - 64 * steps


@pytest.mark.parametrize("steps, seqs, batched", [(3, 6, 20), (15, 8, 16)])
def test_a_full_batch_and_the_profiling_run_stay_in_bounds(run_patched, tiny, steps, seqs, batched):
    """On a real engine, under the interpreter: every access of every kernel, from start-up on."""
    found = last_line(run_patched(PROBES, json.dumps([steps, seqs, batched]), interpret=True).stdout)
    assert found["faults"] == []
    assert found["texts"] == TEXTS[:seqs]


# What the tiny target writes after each one-token prompt, whatever is drafted: plain decoding, float32.
TEXTS = [
    [39, 44, 32, 39, 100, 101, 102, 97],
    [150, 150, 150, 93, 44, 32, 91, 91],
    [41, 10, 32, 32, 32, 32, 32, 32],
    [93, 44, 10, 32, 32, 32, 32, 32],
    [9, 9, 9, 9, 9, 9, 9, 9],
    *[[32, 32, 32, 32, 32, 32, 32, 32]] * 3,
]
