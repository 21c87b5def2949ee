"""A full batch, and the profiling run, draft within the buffers that they have.

Faults tried: fewer tokens per step than a full batch drafts rows; max_num_seqs x S < max_num_batched_tokens
< max_num_seqs x (S + 1), at which the profiling run alone walks further than max_num_batched_tokens; a budget as
small as one request's S + 1 rows.
"""

import pytest

from tests.support import bounds
from tests.support.serve import engine, tokens

pytestmark = pytest.mark.engine

# What the tiny target writes after each one-token prompt, whatever is drafted: plain decoding, float32.
TEXTS = [
    [39, 44, 32, 39, 100, 101, 102, 97],
    [150, 150, 150, 93, 44, 32, 91, 91],
    [41, 10, 32, 32, 32, 32, 32, 32],
    [93, 44, 10, 32, 32, 32, 32, 32],
    [9, 9, 9, 9, 9, 9, 9, 9],
    *[[32, 32, 32, 32, 32, 32, 32, 32]] * 3,
]


@pytest.mark.parametrize("steps, seqs, batched", [(3, 6, 20), (15, 8, 16)])
def test_a_full_batch_and_the_profiling_run_stay_in_bounds(steps, seqs, batched):
    """Every access of every kernel, from start-up on. One request per sequence, of one token: all draft in one step."""
    from vllm import SamplingParams

    sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": batched}
    with bounds.watch() as faults, engine(steps=steps, dtype="float32", **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": [5 + i]} for i in range(seqs)], params, use_tqdm=False)
        del llm
    assert faults == {}
    assert list(map(tokens, outputs)) == TEXTS[:seqs]
