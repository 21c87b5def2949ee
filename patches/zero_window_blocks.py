"""New blocks of a sliding-window group are zeroed too if the pool is shared with Mamba layers.

The pool hands the same bytes to a Mamba state in one request and to a draft's sliding-window K/V in
the next. Attention multiplies masked values by zero, and 0 * NaN is NaN, so old state bytes that
decode to NaN spread into live rows. 0.27.1 records and zeroes full-attention blocks only. Nothing
changes for models without Mamba layers or mixed cache precisions: they are never zeroed.
"""

from _patchlib import Hunk, Marker, Patch

MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
UTILS = "vllm/v1/worker/utils.py"

PATCH = Patch(
    name="zero-window-blocks",
    why="sliding-window blocks taken from Mamba layers keep their bytes, and 0 * NaN spreads",
    upstream="AttentionSpec instead of FullAttentionSpec in KVBlockZeroer and the managers of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            MANAGER,
            "SingleTypeKVCacheManager.__init__",
            old="""\
            HiddenStateCacheSpec,
        )
""",
            new="""\
            HiddenStateCacheSpec,
            SlidingWindowSpec,
        )
""",
        ),
        Hunk(
            UTILS,
            "",
            old="""\
    MambaSpec,
    UniformTypeKVCacheSpecs,
""",
            new="""\
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
""",
        ),
        Hunk(
            UTILS,
            "KVBlockZeroer.__init__",
            old="""\
            if not isinstance(spec, FullAttentionSpec):
""",
            new="""\
            # Subclasses of SlidingWindowSpec lay out their pages differently.
            if not (
                isinstance(spec, FullAttentionSpec) or type(spec) is SlidingWindowSpec
            ):
""",
        ),
    ),
    shipped=(
        (
            Marker(
                MANAGER,
                "SingleTypeKVCacheManager.__init__",
                "isinstance(kv_cache_spec, AttentionSpec)",
            ),
            Marker(UTILS, "KVBlockZeroer.__init__", "isinstance(spec, AttentionSpec)"),
        ),
    ),
)
