"""FlashAttention 3 makes no schedule ahead of time for a draft's sliding-window layers.

Such a schedule knows one window, taken at the first build from every FlashAttention layer there is;
whether it exists at all depends on the target's backend. Beside a target on another backend a
windowed draft is launched on splits that its window does not have. Planned at launch, it is right.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"
SCOPE = "DFlashSpeculator.set_attn"

PATCH = Patch(
    name="fa3-window",
    why="FlashAttention 3's ahead-of-time schedule ignores the draft's sliding window",
    upstream="DFlashSpeculator.set_attn of vLLM 0.30.0",
    shipped_in="0.30.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        self.draft_kv_cache_group_ids = [
""",
            new="""\
        for group in sum(self.attn_groups, []):
            if getattr(group.kv_cache_spec, "sliding_window", None) is not None:
                # FlashAttention's builder reads it, the others never do.
                group.get_metadata_builder().aot_schedule = False

        self.draft_kv_cache_group_ids = [
""",
        ),
    ),
    shipped=((Marker(FILE, SCOPE, "builder.aot_schedule"),),),
)
