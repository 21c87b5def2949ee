"""The walk draws one of K candidates with Gumbel noise, inside its own kernel.

0.27.1 has the noise only inside `gumbel_block_argmax`, which every sampled token goes through;
that function stays as it is. `gumbel_noised_argmax` is what upstream calls the draw, and the noise is
a function apart because it needs no score: the walk makes a draft's at once, before its first step.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/sample/gumbel.py"

PATCH = Patch(
    name="noised-argmax",
    why="the walk draws with vLLM's own Gumbel noise; the sampler's hot path stays byte for byte",
    upstream="gumbel_noised_argmax of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "",
            old="""\
@triton.jit
def _gumbel_sample_kernel(
""",
            new='''\
@triton.jit
def gumbel_noise(keys, seed, pos, USE_FP64: tl.constexpr):
    """Gumbel noise of a block of `keys` at one position of a request's stream."""
    gumbel_seed = tl.randint(seed, pos)
    if USE_FP64:
        u = tl_rand64(gumbel_seed, keys, includes_zero=False)
        noise = -tl.log(-tl.log(u))
    else:
        # The largest noise decides: made from u near 0, where float32 is finest.
        u = tl_rand32(gumbel_seed, keys, includes_zero=False)
        noise = -tl.log(-tldevice.log1p(-u))
    return noise


@triton.jit
def gumbel_noised_argmax(logits, keys, mask, seed, pos, temp, USE_FP64: tl.constexpr):
    """Draw one of `logits` (a block, temperature already applied): (value, index).

    The noise of an entry is a function of (seed, pos, its key). At temp 0 this
    is the plain argmax. Entries outside `mask` are never chosen while one
    inside it is above -inf.
    """
    if USE_FP64:
        logits = logits.to(tl.float64)
    if temp != 0.0:
        logits += gumbel_noise(keys, seed, pos, USE_FP64)
    logits = tl.where(mask, logits, float("-inf"))
    value, idx = tl.max(logits, axis=0, return_indices=True)
    return value, idx


@triton.jit
def _gumbel_sample_kernel(
''',
        ),
    ),
    defines=(
        (FILE, "gumbel_noise"),
        (FILE, "gumbel_noised_argmax"),
        (FILE, "gumbel_block_argmax"),
    ),
    shipped=((Marker(FILE, "", "def gumbel_noised_argmax("),),),
    core=True,
)
