"""A DFlash block is the anchor and S masks: S + 1 rows per request, one of them scheduled already.

0.27.1 reserves S - 1 further rows, which is right for drafters without an anchor row. A full batch of
a DFlash1 drafter, which writes into buffers of max_num_batched_tokens rows, then overruns them. DFlash2
reserves nothing: see token_budget.py.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/config/speculative.py"
SCOPE = "SpeculativeConfig.max_num_new_slots_for_drafting"

PATCH = Patch(
    name="reserve-slots",
    why="DFlash1 drafts S + 1 rows per request; one too few were kept free, so a full batch overran its buffers",
    upstream="SpeculativeConfig.max_num_new_slots_for_drafting of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
            slots_per_req = self.num_speculative_tokens - 1
""",
            new="""\
            slots_per_req = self.num_speculative_tokens - 1
        if self.use_dflash():
            # The anchor is a row of its own beside the masks.
            slots_per_req += 1
""",
        ),
    ),
    shipped=((Marker(FILE, SCOPE, "self.use_dflash()"),),),
)
