"""The inputs of one draft, from the kernel that writes them, against plain Python."""

from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch

PAD = -1
CANARY = 10**6


def reference_inputs(requests, tables, block_size, rows, limit, from_anchor):
    """What _prepare_dflash_inputs_kernel must write, in plain Python.

    requests  (first position, scheduled tokens, rejected tokens) each
    tables    page table of each
    rows      query rows a request
    """

    def slot(table, position, live):
        page = table[position // block_size] if live and position < limit else 0
        return page * block_size + position % block_size if page else PAD

    wanted = {"context": [], "context_slots": [], "positions": [], "slots": [], "lengths": [], "samples": [], "ids": []}
    for index, ((first, scheduled, rejected), table) in enumerate(zip(requests, tables)):
        last = first + scheduled - rejected - 1
        for j in range(scheduled):
            wanted["context"].append(first + j if j < scheduled - rejected else None)
            wanted["context_slots"].append(slot(table, first + j, j < scheduled - rejected))
        for row in range(rows):
            position = last + 1 + row
            wanted["positions"].append(min(position, limit - 1))
            wanted["slots"].append(slot(table, position, True))
            wanted["ids"].append(1000 + index if row == 0 else 7)
            if from_anchor or row:
                wanted["samples"].append((index * rows + row, position + from_anchor, index))
        wanted["lengths"].append(min(last + 1 + rows, limit))
    return wanted


def written_inputs(requests, tables, block_size, rows, steps, limit, from_anchor):
    """The same from the kernel, with rows of canaries around the page tables it is given."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

    n, width = len(requests), len(tables[0])
    spare = 2  # request slots and rows that are not used in this batch
    pages = torch.full((n + 2, width), CANARY, dtype=torch.int32)
    pages[1 : n + 1] = torch.tensor(tables, dtype=torch.int32)
    scheduled = np.array([request[1] for request in requests], dtype=np.int32)
    starts = torch.from_numpy(np.concatenate([[0], scheduled.cumsum()]).astype(np.int32))
    context = int(starts[-1])
    slots_of_rows = torch.full(((n + spare) * rows,), CANARY, dtype=torch.int64)
    out = {
        "context": torch.full((context,), CANARY, dtype=torch.int64),
        "context_slots": torch.full((context,), CANARY, dtype=torch.int64),
        "indices": torch.full(((n + spare) * steps,), CANARY, dtype=torch.int64),
        "pos": torch.full(((n + spare) * steps,), CANARY, dtype=torch.int64),
        "mapping": torch.full(((n + spare) * steps,), CANARY, dtype=torch.int32),
    }
    buffers = Namespace(
        input_ids=torch.zeros((n + spare) * rows, dtype=torch.int32),
        positions=torch.zeros((n + spare) * rows, dtype=torch.int64),
        query_start_loc=torch.zeros(n + spare + 1, dtype=torch.int32),
        seq_lens=torch.zeros(n + spare, dtype=torch.int32),
    )
    positions = [first + j for first, count, _ in requests for j in range(count)]
    prepare_dflash_inputs(
        buffers,
        slots_of_rows,
        out["context"],
        out["context_slots"],
        out["indices"],
        out["pos"],
        out["mapping"],
        torch.zeros(n + spare),
        torch.zeros(n + spare, dtype=torch.int64),
        Namespace(
            num_reqs=n,
            num_scheduled_tokens=scheduled,
            positions=torch.tensor(positions, dtype=torch.int64),
            query_start_loc=starts,
            idx_mapping=torch.arange(n, dtype=torch.int32),
        ),
        torch.ones(n, dtype=torch.int32),
        torch.tensor([rejected for _, _, rejected in requests], dtype=torch.int32),
        1000 + torch.arange(n + spare, dtype=torch.int64),
        torch.zeros(n + spare, dtype=torch.int64),
        torch.ones(n + spare),
        torch.ones(n + spare, dtype=torch.int64),
        pages[1 : n + 1],
        block_size,
        7,
        rows,
        steps,
        n + spare,
        len(slots_of_rows),
        limit,
        from_anchor,
    )
    live = n * steps
    return {
        "context": out["context"].tolist(),
        "context_slots": out["context_slots"].tolist(),
        "positions": buffers.positions[: n * rows].tolist(),
        "slots": slots_of_rows[: n * rows].tolist(),
        "lengths": buffers.seq_lens[:n].tolist(),
        "samples": list(
            zip(out["indices"][:live].tolist(), out["pos"][:live].tolist(), out["mapping"][:live].tolist())
        ),
        "ids": buffers.input_ids[: n * rows].tolist(),
        "padding": {
            *slots_of_rows[n * rows :].tolist(),
            *out["mapping"][live:].tolist(),
            *buffers.seq_lens[n:].tolist(),
        },
    }


def slot_cases(steps, block_size, limit, evicted):
    """Every request length up to `limit`, verified after a draft of `steps` with a changing rejection."""
    width = -(-limit // block_size)
    requests, tables = [], []
    for length in range(1, limit + 1):
        scheduled = min(length, steps + 1)
        requests.append((length - scheduled, scheduled, length % scheduled))
        held = -(-min(length + steps + 1, limit) // block_size)
        gone = min(max(0, length - evicted) // block_size, held) if evicted else 0
        first_page = 1 + len(tables) * width
        tables.append([0] * gone + [first_page + i for i in range(gone, held)] + [CANARY] * (width - held))
    return requests, tables


@pytest.mark.needs_patch("draft-slots", raises=TypeError)  # max_model_len is not asked for
@pytest.mark.parametrize("limit, evicted, from_anchor", [(40, None, 0), (37, 3, 0), (40, 3, 1)])
@pytest.mark.parametrize("steps", range(1, 16))
def test_draft_slots(steps, limit, evicted, from_anchor):
    """Every request length up to max_model_len, around the borders of blocks of 8; DFlash, and DSpark from its anchor.

    Slots, positions and lengths of every row are right, and none lies in a page of somebody else.
    """
    rows = steps if from_anchor else steps + 1
    requests, tables = slot_cases(steps, 8, limit, evicted)
    wanted = reference_inputs(requests, tables, 8, rows, limit, from_anchor)
    found = written_inputs(requests, tables, 8, rows, steps, limit, bool(from_anchor))
    assert found.pop("padding") <= {PAD, 0}, "padding rows are not inert"
    # Positions of rejected context rows are never read.
    found["context"] = [None if w is None else f for w, f in zip(wanted["context"], found["context"])]
    assert found == wanted
    assert max(found["slots"] + found["context_slots"]) < CANARY
    assert -(-max(found["lengths"]) // 8) <= len(tables[0]), "attention reads past the page table"
