"""A graph compiled for blocks of S + 1 rows has S in it as a constant, but not in its cache key.

A server restarted with another num_speculative_tokens loads the graph of the old one from disk. The
DFlash2 model that comes with this port is not compiled; a draft that is must not be replayed wrongly.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/config/speculative.py"
SCOPE = "SpeculativeConfig.compute_hash"

PATCH = Patch(
    name="compile-cache-key",
    why="num_speculative_tokens is baked into the compiled draft; another S replayed the old graph",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        factors.append(uses_aux_hidden_states)
""",
            new="""\
        factors.append(uses_aux_hidden_states)
        if self.use_dflash():
            # The draft sees blocks of S + 1 rows, and its graph is built for them.
            factors.append(self.num_speculative_tokens)
""",
        ),
    ),
    shipped=((Marker(FILE, SCOPE, "self.num_speculative_tokens"),),),
)
