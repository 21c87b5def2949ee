"""Capturing the draft's CUDA graphs must not write into anybody's proposal.

0.27.1 maps every captured row to request slot 0, so the warm-up runs leave finite values there. A
sparse proposal is only ever cleared where it was written last, and would keep them. Slot -1 is the
one that sampling ignores.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"

PATCH = Patch(
    name="capture-slots",
    why="graph capture would leave stray values in the proposal of request slot 0",
    upstream="DFlashSpeculator.capture of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "DFlashSpeculator.capture",
            old="        self.sample_idx_mapping.zero_()\n",
            new="""\
        # No request slot: zero would leave the warm-up's proposals in slot 0.
        self.sample_idx_mapping.fill_(-1)
""",
        ),
    ),
    shipped=((Marker(FILE, "DFlashSpeculator.capture", "self.sample_idx_mapping.fill_(-1)"),),),
)
