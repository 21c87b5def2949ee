"""What a thinking budget forces: the rule held to the V1 runner, and the sampler's blocks held to the rule.

The vocabulary is so small that markers, parts of them and repeated ones are frequent.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  the CPU's stand-ins for pinned memory and streams
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

V = 6
CPU = torch.device("cpu")
FORCED = 1e9
# start and end marker; the tokens 0 to 3 make up all markers, 4 and 5 none
MARKERS = [([1], [2]), ([0, 1], [2, 3]), ([1], [2, 2, 3]), ([0, 1, 0], [2])]


def markers(start, end):
    return SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)


def forced(logits):
    return [int(row.argmax()) if row.max() == FORCED else None for row in logits]


def find_last(tokens, marker):
    places = range(len(tokens) - len(marker) + 1)
    return max((i for i in places if tokens[i : i + len(marker)] == marker), default=-1)


def rule(prompt, output, budget, start, end):
    """(the token that is forced after prompt + output or None, whether an end marker was emitted outside thinking)."""
    begin, boundary = find_last(prompt, start), len(prompt)
    began = begin + len(start) if begin > find_last(prompt, end) else None
    tokens, floor, stray = prompt + output, boundary, False
    for position in range(boundary, len(tokens)):
        if began is None:
            stray |= ends_with(tokens, end, floor, position)
            if ends_with(tokens, start, floor, position):
                began = floor = position + 1
            continue
        forced_from = max(began + budget, boundary)
        at_end = ends_with(tokens, end, floor, position)
        if at_end if position < forced_from else position == forced_from + len(end) - 1:
            began, floor = None, position + 1
    forced_from = boundary if began is None else max(began + budget, boundary)
    return (None if began is None or len(tokens) < forced_from else end[len(tokens) - forced_from]), stray


def ends_with(tokens, marker, floor, position):
    first = position + 1 - len(marker)
    return first >= floor and tokens[first : position + 1] == marker


@pytest.mark.parametrize("start, end", MARKERS, ids=str)
def test_the_rule_is_v1s(start, end):
    """On texts decoded without a drafter.

    Two slips of V1 are not followed, nor are they in 0.28.0's V2: after an end marker outside thinking it no longer
    notices when thinking ends, and forces a second end; and for a start marker of n tokens that the prompt ends in, it
    counts n - 1 tokens too few.
    """
    random, compared, times_forced = np.random.default_rng(len(start) + 10 * len(end)), 0, 0
    for _ in range(400):
        prompt, output, budget = random.integers(0, V, random.integers(1, 9)).tolist(), [], int(random.integers(0, 7))
        if len(start) > 1 and find_last(prompt, start) > find_last(prompt, end):
            continue
        holder = ThinkingBudgetStateHolder(markers(start, end), 1, 0, CPU, False)
        params = SamplingParams(thinking_token_budget=budget)
        holder.sync_batch(SimpleNamespace(removed=[], added=[(0, params, prompt, output)], moved=[]))
        marker = []  # what is still to come of a start marker, which chance alone seldom emits
        for _ in range(24):
            wanted, stray = rule(prompt, output, budget, start, end)
            if stray:
                break
            holder.update_state([output], None)
            assert forced(holder.apply_to_logits(torch.zeros(1, V), False, None)) == [wanted], (prompt, output, budget)
            if not marker and random.random() < 0.1:
                marker = [*start]
            emitted = marker.pop(0) if marker else int(random.integers(0, V))
            output.append(emitted if wanted is None else wanted)
            compared += 1
            times_forced += wanted is not None
    assert compared > 2000 and times_forced > 50


class Texts:
    """A sampler with one slot per text, each a (prompt, output) pair with its budget."""

    def __init__(self, texts, budgets, config):
        self.states = RequestState(len(texts), 64, 64, 8, V, CPU)
        self.sampler = Sampler(len(texts), V, CPU, self.states, reasoning_config=config)
        self.slots = []
        for i, ((prompt, output), budget) in enumerate(zip(texts, budgets)):
            params = SamplingParams(thinking_token_budget=budget)
            self.states.add_request(str(i), len(prompt), prompt + output, 0, 64)
            self.slots.append(self.states.req_id_to_index[str(i)])
            self.sampler.add_request(self.slots[-1], len(prompt), params)
            self.sampler.thinking_budget_state.add_request(self.slots[-1], prompt, params)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def append(self, emitted):
        """What each text has emitted since, as the runner keeps it."""
        for slot, tokens in zip(self.slots, emitted):
            length = int(self.states.total_len.gpu[slot])
            self.states.all_token_ids.gpu[slot, length : length + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self.states.total_len.gpu[slot] += len(tokens)

    def decide(self, drafts):
        """What is forced in each row of each text's block: of its next token, and of that after each draft."""
        lengths = [len(block) + 1 for block in drafts]
        slots = np.repeat(self.slots, lengths).astype(np.int32)
        rows = self.sampler.apply_sampling_params(
            torch.zeros(len(slots), V),
            torch.from_numpy(slots),
            np.array(self.slots, np.int32),
            torch.zeros(len(slots), dtype=torch.int64),
            torch.tensor([token for block in drafts for token in [0, *block]]),
            torch.tensor([place for length in lengths for place in range(length)], dtype=torch.int32),
        )
        return [forced(block) for block in rows.split(lengths)]


@pytest.mark.needs_patch("thinking-budget", raises=TypeError)
@pytest.mark.parametrize("start, end", MARKERS, ids=str)
def test_blocks_follow_the_rule(start, end):
    """Two rounds of drafts, of which some are what is forced. Half of the texts were preempted before."""
    random, inside, wanted_of = np.random.default_rng(3), 0, {}
    texts = [(random.integers(0, 4, 6).tolist(), random.integers(0, 4, i % 2 * 4).tolist()) for i in range(16)]
    for prompt, output in texts[::3]:
        (output or prompt).extend(start)
    budgets = [int(random.integers(0, 6)) for _ in texts]
    served = Texts(texts, budgets, markers(start, end))
    for _ in range(2):
        blocks = []
        for i, ((prompt, output), budget) in enumerate(zip(texts, budgets)):
            block, wanted_of[i] = [], []
            for _ in range(random.integers(1, 7)):
                wanted_of[i].append(rule(prompt, output + block, budget, start, end)[0])
                right = wanted_of[i][-1] is not None and random.random() < 0.9
                block.append(wanted_of[i][-1] if right else int(random.integers(0, 4)))
            blocks.append(block[:-1])
        for i, rows in enumerate(served.decide(blocks)):
            wrong = [w is not None and w != t for w, t in zip(wanted_of[i], blocks[i])]
            # After a draft that is not what is forced in its place nothing is verified.
            kept = wrong.index(True) + 1 if True in wrong else len(rows)
            assert rows[:kept] == wanted_of[i][:kept], (texts[i], budgets[i], blocks[i])
            inside += rows[0] is None and any(token is not None for token in rows[:kept])
            texts[i][1].extend(blocks[i][: kept - 1])
            blocks[i] = blocks[i][: kept - 1]
        served.append(blocks)
    assert inside, "no budget ended inside a block"


def test_other_requests_of_the_batch_are_left_alone():
    served = Texts([([1, 4], []), ([1, 4], [])], [0, None], markers([1], [2]))
    assert served.decide([[2, 4], [2, 4]]) == [[2, None, None], [None, None, None]]


def test_without_markers_nothing_is_forced():
    assert Texts([([1, 4], [])], [0], None).decide([[2]]) == [[None, None]]
