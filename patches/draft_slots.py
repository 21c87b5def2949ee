"""Draft rows that have no page of their own must not be written, nor read past the page table.

Three kinds of row got a writable slot on 0.27.1: the rejected suffix of the context, any row whose
page is block 0 (the null block, which every request shares), and queries at or past max_model_len,
which were clamped onto the table's last page. The sequence length was not clamped at all, so near
max_model_len attention walked off the end of a request's page table into the next one's. DSpark
prepares its inputs with the same kernel.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"
KERNEL = "_prepare_dflash_inputs_kernel"

PATCH = Patch(
    name="draft-slots",
    why="near max_model_len the page table is read past its end; rejected rows and the null block are written",
    upstream="the slot masks of _prepare_dflash_inputs_kernel in vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            KERNEL,
            old="""\
    ctx_slot = ctx_block_id * block_size + (ctx_pos % block_size)
""",
            new="""\
    # A rejected row is no context, and block 0 is the null block that every
    # request shares: writing either would end up in what somebody else reads.
    ctx_slot = tl.where(
        (j < num_ctx - num_rejected) & (ctx_block_id != 0),
        ctx_block_id * block_size + (ctx_pos % block_size),
        PAD_SLOT_ID,
    )
""",
        ),
        Hunk(
            FILE,
            KERNEL,
            old="""\
    q_slot = q_block_id * block_size + (query_pos % block_size)
""",
            new="""\
    # No page is ever allocated at or past max_model_len; the clamp above would
    # hand such a row a slot in the last page instead.
    q_slot = tl.where(
        (query_pos < max_model_len) & (q_block_id != 0),
        q_block_id * block_size + (query_pos % block_size),
        PAD_SLOT_ID,
    )
""",
        ),
        Hunk(
            FILE,
            KERNEL,
            old="""\
        tl.store(out_seq_lens_ptr + req_idx, last_valid_pos + 1 + num_query_per_req)
""",
            new="""\
        # More than max_model_len would read past the end of the page table.
        tl.store(
            out_seq_lens_ptr + req_idx,
            tl.minimum(last_valid_pos + 1 + num_query_per_req, max_model_len),
        )
""",
        ),
    ),
    shipped=(
        (
            Marker(FILE, KERNEL, "ctx_block_id != 0"),
            Marker(FILE, KERNEL, "q_block_id != 0"),
            Marker(
                FILE,
                KERNEL,
                "tl.minimum(last_valid_pos + 1 + num_query_per_req, max_model_len)",
            ),
        ),
    ),
)
