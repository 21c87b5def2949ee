"""Block verification looks past the first rejection, so what it looked at must not come back.

The noise of 0.27.1 is keyed by position alone. A draft that one round judged and dropped is drawn
again in the next round with the same noise, now known to have been rejected: output is biased at
every temperature, which only chained rounds show.

So the position of the round's anchor, the last verified token, goes into the upper half of the seed:
of `u` under block verification, and of the drafts. It grows with every round of a request, both sides
have it on the device, and it depends on nothing but the request, so seeded runs still reproduce. The
speculators mix it into their own copy of the seeds, before the captured graph that reads them.
The residual keeps its key: it is drawn once per round, at the position that the round ends with.
"""

from _patchlib import Hunk, Marker, Patch

REJECTION = "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py"
DFLASH = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"
BASE = "vllm/v1/worker/gpu/spec_decode/speculator.py"
EAGLE = "vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py"
WALK = "vllm/v1/worker/gpu/spec_decode/dflash2/speculator.py"
MTP = "vllm/v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py"

CALL = """\
            temperature,
            seeds,
        )
"""
CALL_WITH_ANCHOR = """\
            temperature,
            seeds,
            input_batch.seq_lens[:num_reqs] - num_rejected,
        )
"""

PATCH = Patch(
    name="block-verify-noise",
    why="noise that block verification has looked at must not be drawn again in the next round",
    upstream="round-keyed draft noise of vLLM 0.33.0",
    shipped_in="0.33.0",
    hunks=(
        Hunk(
            REJECTION,
            "_rejection_kernel",
            old="    seed = tl.load(seed_ptr + req_state_idx)\n",
            new="""\
    seed = tl.load(seed_ptr + req_state_idx)
    if USE_BLOCK_VERIFICATION:
        # Judged drafts are drawn again next round: u is keyed by the round's anchor too.
        seed ^= tl.load(pos_ptr + start_idx).to(tl.int64) << 32
""",
        ),
        Hunk(
            DFLASH,
            "_prepare_dflash_inputs_kernel",
            old="        tl.store(out_seeds_ptr + req_state_idx, tl.load(seeds_ptr + req_state_idx))\n",
            new="""\
        # Keyed by the round's anchor too: a draft that was judged is drawn with new noise.
        round_key = (last_valid_pos + 1).to(tl.int64) << 32
        seed = tl.load(seeds_ptr + req_state_idx) ^ round_key
        tl.store(out_seeds_ptr + req_state_idx, seed)
""",
        ),
        Hunk(
            BASE,
            "DraftModelSpeculator._copy_request_inputs",
            old="""\
        seeds: torch.Tensor,
    ) -> None:
""",
            new="""\
        seeds: torch.Tensor,
        # [num_reqs]
        anchor_pos: torch.Tensor | None = None,
    ) -> None:
""",
        ),
        Hunk(
            BASE,
            "DraftModelSpeculator._copy_request_inputs",
            old="        self.seeds.copy_(seeds)\n",
            new="""\
        self.seeds.copy_(seeds)
        if self.draft_logits is not None and anchor_pos is not None:
            # Keyed by the round's anchor too: a draft that was judged is drawn with new noise.
            self.seeds[idx_mapping] ^= anchor_pos.to(torch.int64) << 32
""",
        ),
        Hunk(EAGLE, "AutoRegressiveSpeculator.propose", old=CALL, new=CALL_WITH_ANCHOR),
        Hunk(MTP, "MultiModuleMTPSpeculator.propose", old=CALL, new=CALL_WITH_ANCHOR),
    ),
    # The verifier and the walk key their noise by the step alike; one without the other is no cure.
    shipped=(
        (
            Marker(REJECTION, "_rejection_kernel", "spec_step_seed("),
            Marker(WALK, "_selector_walk_kernel", "spec_step_seed("),
        ),
    ),
)
