"""A prefix-cache hit keeps its last block under DFlash.

vLLM drops the last matched block for every drafter that uses the target's hidden states. EAGLE and
MTP need that: their K/V at a position take in the token after it, which the block's hash does not
cover. DFlash makes a position's context K/V from the target's state there alone, and has written it
for every verified token by the time the block can be hit. Under a hybrid target, whose blocks are
hundreds of tokens long, dropping one and aligning to the rest left short prompts no hit at all.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/core/sched/scheduler.py"
CONFIG = "vllm/config/speculative.py"

PATCH = Patch(
    name="cached-last-block",
    why="prefix caching under a hybrid target lost the last block of every hit, or the whole hit, for nothing",
    upstream="SpeculativeConfig.needs_eagle_block_drop of vLLM 0.33.0",
    shipped_in="0.33.0",
    hunks=(
        Hunk(
            FILE,
            "Scheduler.__init__",
            old="""\
        # Create the KV cache manager.
""",
            new="""\
        # Stale after a hit is only draft K/V that takes in the next token; DFlash's
        # is made of the target's state at its own position.
        self.drops_last_block = (
            self.use_eagle and not vllm_config.speculative_config.use_dflash()
        )

        # Create the KV cache manager.
""",
        ),
        Hunk(
            FILE,
            "Scheduler.__init__",
            old="""\
            use_eagle=self.use_eagle,
""",
            new="""\
            use_eagle=self.drops_last_block,
""",
        ),
        Hunk(
            FILE,
            "Scheduler._mamba_block_aligned_split",
            old="""\
        if self.use_eagle:
""",
            new="""\
        # The KV cache manager of a scheduler built otherwise was given use_eagle.
        if getattr(self, "drops_last_block", self.use_eagle):
""",
        ),
    ),
    shipped=((Marker(CONFIG, "SpeculativeConfig.needs_eagle_block_drop", "self.use_dflash()"),),),
)
