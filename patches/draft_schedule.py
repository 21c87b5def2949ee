"""num_speculative_tokens_per_batch_size: fewer drafts are verified while many requests run.

Two things stood in the way on the V2 runner. Without asynchronous scheduling it hands the scheduler all S
drafts, and all were verified. And a batch looked only at the CUDA graphs of the next captured size: with
several query lengths that is often a graph of another length, so it ran without one.

The drafter drafts its whole block in any case, which is what it was trained for; what follows the first
drafts of it is not verified. Other drafters are scheduled as before.
"""

from _patchlib import Hunk, Marker, Patch

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"

PATCH = Patch(
    name="draft-schedule",
    why="num_speculative_tokens_per_batch_size was accepted and ignored, or cost a batch its CUDA graph",
    upstream="GPUModelRunner.sample_tokens of vLLM 0.32.0",
    shipped_in="0.32.0",
    hunks=(
        Hunk(
            SCHEDULER,
            "Scheduler.update_draft_token_ids",
            old="            request.spec_token_ids = spec_token_ids\n",
            new="""\
            if (
                self.dynamic_sd_lookup is not None
                and self.vllm_config._is_dflash2_draft()
            ):
                # As many as the schedule has for the batch that drafted them.
                batch_size = len(draft_token_ids.req_ids)
                spec_token_ids = spec_token_ids[: self.dynamic_sd_lookup[batch_size]]
            request.spec_token_ids = spec_token_ids
""",
        ),
        Hunk(
            GRAPHS,
            "CudaGraphManager._init_candidates",
            old="        for mode, descs in descs_by_mode.items():\n",
            new="""\
        if len(decode_query_lens) > 1 and self.vllm_config._is_dflash2_draft():
            # The next size may be one of another query length: of each length, the
            # smallest graph that is large enough.
            by_size = sorted(
                (desc for descs in descs_by_token_lora.values() for desc in descs),
                key=lambda desc: (desc.uniform_token_count is None, desc.num_tokens),
            )
            for count, loras in self._candidates:
                smallest: dict[int | None, BatchExecutionDescriptor] = {}
                for desc in by_size:
                    if desc.num_tokens >= count and desc.num_active_loras == loras:
                        smallest.setdefault(desc.uniform_token_count, desc)
                self._candidates[count, loras] = list(smallest.values())

        for mode, descs in descs_by_mode.items():
""",
        ),
    ),
    shipped=((Marker(RUNNER, "GPUModelRunner", "scheduler_output.num_spec_tokens_to_schedule"),),),
)
