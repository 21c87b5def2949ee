"""An attention layer's own window wins over its cache group's.

With the hybrid KV manager off, target and draft layers merge into one cache group, which takes the
draft's window; FlashAttention on 0.27.1 then clips the target's full attention to it.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/attention/backends/flash_attn.py"
SCOPE = "FlashAttentionImpl.forward"

PATCH = Patch(
    name="layer-window",
    why="with the hybrid KV manager off, the target was clipped to the draft's sliding window",
    upstream="FlashAttentionImpl.forward of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
                window = (
                    attn_metadata.sliding_window
                    if attn_metadata.sliding_window is not None
                    else self.sliding_window
                )
""",
            new="""\
                # The metadata's window is the cache group's, and one group may hold
                # layers of several windows.
                window = _maybe_symmetrize_window(
                    self.sliding_window, attn_metadata.causal
                )
""",
        ),
    ),
    shipped=((Marker(FILE, SCOPE, "_maybe_symmetrize_window(self.sliding_window"),),),
)
