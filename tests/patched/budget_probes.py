"""What test_token_budget.py runs against the patched vLLM. Prints one line of JSON: {probe: what it found}.

`budget_probes.py configs` makes configurations and speculators only; `budget_probes.py ENGINE` (a JSON list of S,
max_num_seqs and max_num_batched_tokens) starts an engine and serves as many requests as it may run at once.
"""

from tests.support import bounds, interpret  # noqa: F401, I001  before vLLM
import json
import sys
from types import SimpleNamespace

import torch
from vllm import LLM, SamplingParams

from tests.patched.runtime_probes import TINY, drafter, engine_config


GROUPS = 2  # of KV cache: full and sliding-window layers


def budget(config):
    return [config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_scheduled_tokens]


def default_flags():
    """For S 1 ... 15 and max_num_seqs 1, 256, 1024: budgets without and with a drafter, its buffers."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    plain = {seqs: budget(engine_config(0, max_num_seqs=seqs)) for seqs in (1, 256, 1024)}
    found = []
    for steps in range(1, 16):
        for seqs, without in plain.items():
            config = engine_config(steps, max_num_seqs=seqs)
            rows, held, says = buffers_of(DFlash2Speculator(config, torch.device("cpu")))
            found.append(
                {"S": steps, "seqs": seqs, "plain": without, "ours": budget(config)}
                | {"rows": rows, "bytes": held, "says": says}
            )
    return found


def buffers_of(speculator):
    """(rows of the shortest buffer that is indexed by draft rows, bytes of them all, what the log says)"""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import with_own_slots

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


def other_drafters():
    """[max_num_batched_tokens, budget] of a drafter that shares the target's buffers."""
    with drafter(architectures=["DFlashDraftModel"]) as folder:
        return [budget(engine_config(steps, folder, max_num_seqs=64)) for steps in (7, 15)]


def serve(steps, seqs, batched):
    """One request per sequence, of one token, so that all draft in one step. Texts, and accesses out of bounds."""
    with bounds.watch() as faults:
        llm = LLM(
            str(TINY / "target"),
            dtype="float32",
            speculative_config={"method": "dflash", "model": str(TINY / "draft"), "num_speculative_tokens": steps},
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=64,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
        )
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": [5 + i]} for i in range(seqs)], params, use_tqdm=False)
    return {
        "faults": [f"{kernel} {what} {past} bytes past" for (kernel, what), past in faults.items()],
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
    }


if __name__ == "__main__":
    job = sys.argv[1]
    found = {p.__name__: p() for p in (default_flags, other_drafters)} if job == "configs" else serve(*json.loads(job))
    print(json.dumps(found))
