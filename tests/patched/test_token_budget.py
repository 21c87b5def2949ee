"""The target's token budget is that of a serve without a drafter, and a full batch drafts within its own buffers.

S = 1 ... 15 at max_num_seqs 1, 256 and 1,024; engines that draft a full batch are in engine/test_token_budget.py.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from tests.support.configs import drafter, engine_config

GROUPS = 2  # of KV cache: full and sliding-window layers
every_batch = pytest.mark.parametrize(
    "steps, seqs", [(steps, seqs) for steps in range(1, 16) for seqs in (1, 256, 1024)]
)


def budget(config):
    return [config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_scheduled_tokens]


@functools.cache
def plain_budget(seqs):
    return budget(engine_config(0, max_num_seqs=seqs))


@functools.cache
def config_of(steps, seqs):
    return engine_config(steps, max_num_seqs=seqs)


@functools.cache
def buffers_of(steps, seqs):
    """(rows of the shortest buffer that is indexed by draft rows, bytes of them all, what the log says)"""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator, with_own_slots

    speculator = DFlash2Speculator(config_of(steps, seqs), torch.device("cpu"))
    batched = speculator.scheduler_config.max_num_batched_tokens
    # BlockTables itself pins memory; this is what of it the draft gets anew, and a page table to share.
    slots = torch.zeros(GROUPS, batched, dtype=torch.int64)
    tables = SimpleNamespace(num_kv_cache_groups=GROUPS, slot_mappings=slots, input_block_tables=[torch.zeros(1)])
    speculator.block_tables = with_own_slots(tables, speculator.max_num_tokens)
    assert speculator.block_tables.input_block_tables is tables.input_block_tables
    assert tables.slot_mappings is slots, "the target's own mapping was replaced"
    inputs, slots = speculator.input_buffers, speculator.block_tables.slot_mappings
    by_row = (inputs.input_ids, inputs.positions, inputs.is_padding, *slots)
    by_request = (inputs.query_start_loc, inputs.seq_lens, inputs.dcp_local_seq_lens)
    return min(map(len, by_row)), sum(b.nbytes for b in by_row + by_request), speculator.describe_buffers()


@every_batch
def test_every_s_starts_with_the_targets_whole_budget(steps, seqs):
    assert budget(config_of(steps, seqs)) == plain_budget(seqs)


@every_batch
def test_buffers_hold_a_full_batch(steps, seqs):
    assert buffers_of(steps, seqs)[0] >= seqs * (steps + 1)


@every_batch
def test_the_log_says_what_the_buffers_take(steps, seqs):
    """int32 ids, int64 positions, a padding flag and an int64 slot per KV cache group for each row."""
    _, held, says = buffers_of(steps, seqs)
    rows = max(seqs * (steps + 1), plain_budget(seqs)[0])
    assert held == rows * (4 + 8 + 1 + GROUPS * 8) + 4 * (3 * seqs + 1)
    assert f"{held / 2**20:.2f} MiB for max_num_seqs {seqs} x {steps + 1} rows" in says
    scored = min(seqs * steps, 2048)
    assert f"{scored * 320 * 2 / 2**20:.1f} MiB for the logits of {scored} rows" in says


@pytest.mark.parametrize("steps", [7, 15])
def test_drafters_in_the_targets_buffers_keep_their_reserve(steps):
    with drafter(architectures=["DFlashDraftModel"]) as folder:
        batched, scheduled = budget(engine_config(steps, folder, max_num_seqs=64))
    assert scheduled == batched - 64 * steps
