"""A draft sees every position of the target, so its rotary cache must reach the target's length.

0.27.1 raises a draft's max_position_embeddings for EAGLE only. If a target is served beyond the
drafter's own number, DFlash and DSpark gather cos and sin past the end of their cache.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/config/speculative.py"
SCOPE = "SpeculativeConfig.__post_init__"

PATCH = Patch(
    name="draft-rope-length",
    why="the draft's rotary cache was sized by its own max_position; a longer target read past it",
    upstream="the methods that call _maybe_override_draft_max_position_embeddings in vLLM 0.33.0",
    shipped_in="0.33.0",
    # In an order of its own: the obvious one stands further up already, in another test.
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
                if self.method in ("eagle", "eagle3"):
""",
            new="""\
                if self.method in ("dflash", "dspark", "eagle", "eagle3"):
""",
        ),
    ),
    # 0.33.0 raises it for every draft that is not a model of its own.
    shipped=((Marker(FILE, SCOPE, "self.method != 'draft_model'"),),),
)
