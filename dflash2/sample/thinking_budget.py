"""thinking_token_budget on the V2 model runner.

A request may limit the tokens that it thinks: once `budget` of them follow the marker that starts a thinking
section, the marker that ends one is forced, token by token. Which text that gives is what vLLM 0.27.1's V1
runner decodes without a drafter (v1/sample/thinking_budget_state.py there), but for two of its slips: an end
marker outside a section does not hide the end of the next one, and start markers of any length are counted alike.

A section starts with the last start marker of the prompt, if no end marker follows it, or else with the first one
that is emitted outside a section. It ends with an emitted end marker, or with a forced one. What was thought in the
prompt counts, but nothing is forced before the prompt's end. Markers lie wholly in the prompt or wholly in the output.

Nothing is guessed about drafts: every row of a verified block is looked at as if its drafts had been emitted, so a
forced token has probability 1 in its row, and a draft that is another token is rejected there.
"""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
from vllm.v1.worker.gpu.states import RequestState

UNLIMITED = -1
OUTSIDE = -1
INT32_MAX = 2**31 - 1


def find_last(tokens: list[int], marker: list[int]) -> int:
    """Where `marker` occurs last in `tokens`, -1 if nowhere."""
    for start in range(len(tokens) - len(marker), -1, -1):
        if tokens[start] == marker[0] and tokens[start : start + len(marker)] == marker:
            return start
    return -1


class ThinkingBudgetState:
    """What is known of each slot's request, and the forcing of its tokens.

    reasoning_config gives both markers as token ids; without one, or without markers, nothing is ever forced.
    """

    def __init__(self, req_states: RequestState | None, reasoning_config):
        start = reasoning_config and reasoning_config.reasoning_start_token_ids
        end = reasoning_config and reasoning_config.reasoning_end_token_ids
        self.enabled = bool(start and end)
        if not self.enabled or req_states is None:
            return
        self.req_states, self.start, self.end = req_states, start, end
        slots, device = req_states.max_num_reqs, req_states.device
        self.markers = torch.tensor([*start, *end], dtype=torch.int32, device=device)
        self.budget = UvaBackedTensor(slots, dtype=torch.int32)
        self.limited = np.zeros(slots, dtype=bool)
        # Per slot: how many tokens have been looked at, where the section began that they end in (OUTSIDE: in none),
        # and before which position no marker may start.
        self.progress = StagedWriteTensor((slots, 3), dtype=torch.int32, device=device)

    def add_request(self, slot: int, prompt: list[int], params: SamplingParams) -> None:
        if not self.enabled:
            return
        budget = params.thinking_token_budget
        self.limited[slot] = budget is not None
        self.budget.np[slot] = UNLIMITED if budget is None else min(budget, INT32_MAX)
        if budget is None:
            return
        begin = find_last(prompt, self.start)
        inside = begin > find_last(prompt, self.end)
        began = begin + len(self.start) if inside else OUTSIDE
        self.progress.stage_write(slot, 0, [len(prompt), began, len(prompt)])

    def apply_staged_writes(self) -> None:
        if self.enabled:
            self.budget.copy_to_uva()
            self.progress.apply_write()

    def limits(self, slots: np.ndarray) -> bool:
        """Whether any of these slots' requests has a budget."""
        return self.enabled and bool(self.limited[slots].any())

    def apply(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, inputs: torch.Tensor, local_pos: torch.Tensor
    ) -> None:
        """Forces, in place, the tokens of all rows that are past a budget.

        logits [rows, V]; expanded_idx_mapping, inputs, local_pos [rows]: slot, input token, place in its block.
        """
        states = self.req_states
        rows = logits.shape[0]
        _force_kernel[(rows,)](
            logits,
            logits.stride(0),
            rows,
            expanded_idx_mapping,
            inputs,
            local_pos,
            self.budget.gpu,
            self.progress.gpu,
            states.all_token_ids.gpu,
            states.all_token_ids.gpu.stride(0),
            states.prompt_len.gpu,
            states.total_len.gpu,
            self.markers,
            START=len(self.start),
            END=len(self.end),
        )


@triton.jit
def _follow(
    position,
    began,
    floor,
    budget,
    prompt_len,
    total_len,
    tokens_ptr,
    drafts_ptr,
    markers_ptr,
    START: tl.constexpr,
    END: tl.constexpr,
):
    """(began, floor) after the token at `position`, of which those from total_len on are drafts."""
    is_outside = began < 0
    is_start, is_end = is_outside, began >= 0
    for i in tl.static_range(START):
        at = position - START + 1 + i
        is_here = is_start & (at >= floor)
        held = tl.load(tokens_ptr + at, mask=is_here & (at < total_len), other=-1)
        drafted = tl.load(drafts_ptr + at - total_len, mask=is_here & (at >= total_len), other=-1).to(tl.int32)
        is_start = is_here & (tl.where(at < total_len, held, drafted) == tl.load(markers_ptr + i))
    for i in tl.static_range(END):
        at = position - END + 1 + i
        is_here = is_end & (at >= floor)
        held = tl.load(tokens_ptr + at, mask=is_here & (at < total_len), other=-1)
        drafted = tl.load(drafts_ptr + at - total_len, mask=is_here & (at >= total_len), other=-1).to(tl.int32)
        is_end = is_here & (tl.where(at < total_len, held, drafted) == tl.load(markers_ptr + START + i))
    # From `forced` on the end marker is forced, whatever the tokens before it look like.
    forced = tl.maximum(began + budget, prompt_len)
    is_forced = position >= forced
    ends = (began >= 0) & tl.where(is_forced, position == forced + END - 1, is_end)
    new_began = tl.where(is_start, position + 1, tl.where(ends, -1, began))
    new_floor = tl.where(is_start | ends, position + 1, floor)
    return new_began, new_floor


@triton.jit
def _force_kernel(
    logits_ptr,
    logits_stride,
    num_rows,
    slots_ptr,
    inputs_ptr,
    local_pos_ptr,
    budget_ptr,
    progress_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    prompt_len_ptr,
    total_len_ptr,
    markers_ptr,
    START: tl.constexpr,
    END: tl.constexpr,
):
    """One program per row; that of a block's first row does the whole block, so that nobody else reads its progress."""
    first = tl.program_id(0).to(tl.int64)
    if tl.load(local_pos_ptr + first) != 0:
        return
    slot = tl.load(slots_ptr + first).to(tl.int64)
    budget = tl.load(budget_ptr + slot).to(tl.int64)
    if budget < 0:
        return
    prompt_len = tl.load(prompt_len_ptr + slot)
    total_len = tl.load(total_len_ptr + slot)
    tokens_ptr = all_token_ids_ptr + slot * all_token_ids_stride
    drafts_ptr = inputs_ptr + first + 1
    seen = tl.load(progress_ptr + slot * 3)
    began = tl.load(progress_ptr + slot * 3 + 1).to(tl.int64)
    floor = tl.load(progress_ptr + slot * 3 + 2).to(tl.int64)
    for position in range(seen, total_len):
        began, floor = _follow(
            position, began, floor, budget, prompt_len, total_len, tokens_ptr, drafts_ptr, markers_ptr, START, END
        )
    tl.store(progress_ptr + slot * 3, total_len)
    tl.store(progress_ptr + slot * 3 + 1, began.to(tl.int32))
    tl.store(progress_ptr + slot * 3 + 2, floor.to(tl.int32))

    row = first
    position = total_len.to(tl.int64)
    in_block = row < num_rows
    while in_block:
        forced = position - tl.maximum(began + budget, prompt_len)
        if (began >= 0) & (forced >= 0):
            token = tl.load(markers_ptr + START + forced)
            tl.store(logits_ptr + row * logits_stride + token, 1.0e9)
        row += 1
        # The next row belongs to this block unless it is the first of another.
        in_block = tl.load(local_pos_ptr + row, mask=row < num_rows, other=0) != 0
        if in_block:
            began, floor = _follow(
                position, began, floor, budget, prompt_len, total_len, tokens_ptr, drafts_ptr, markers_ptr, START, END
            )
        position += 1
