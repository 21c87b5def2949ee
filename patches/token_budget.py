"""What the target may compute in a step is not reduced by what the draft computes after it.

0.27.1 counts a parallel drafter's rows into max_num_batched_tokens, because its drafters write them into
buffers of that size: (S - 1) x max_num_seqs tokens fewer are scheduled, and with the default flags 1,024
of 8,192 are left of a prefill chunk, or none and the serve does not start. DFlash2Speculator has buffers
for max_num_seqs x (S + 1) rows of its own, so its target is scheduled as if there were no drafter.
Drafters that share the target's buffers, DFlash1 among them, keep their reserve.

Releases from 0.28.0 on take the rows out of each step's budget, a request at a time, and 0.33.0 also
caps the number of running requests; none has the buffers.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/config/vllm.py"
SCOPE = "VllmConfig._set_max_num_scheduled_tokens"

PATCH = Patch(
    name="token-budget",
    why="the draft's rows were taken out of the target's token budget: short prefill chunks, or no start at all",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        if self.speculative_config is not None:
""",
            new="""\
        # A DFlash2 draft has buffers of its own and needs no slot of the target's batch.
        if self.speculative_config is not None and not self._is_dflash2_draft():
""",
        ),
    ),
)
