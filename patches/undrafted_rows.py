"""A request without drafts still has to start from the state that its last step accepted.

Verifying leaves one Mamba state per row and a count of how many rows were accepted; only the path for
verified rows looks at the count. A request that is given no drafts (the last token before
max_model_len, a grammar that allows none) took the other path and went on from the state of the
first row: everything that was accepted after it had not happened.
"""

from _patchlib import Hunk, Marker, Patch

STATES = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
PREPARE = "MambaHybridModelState.prepare_attn"
GDN = "vllm/v1/attention/backends/gdn_attn.py"
BUILD = "GDNAttentionMetadataBuilder.build"

PATCH = Patch(
    name="undrafted-rows",
    why="a GDN target forgot tokens accepted just before a step without drafts, as the last one of a full context",
    upstream="MambaHybridModelState.prepare_attn and GDNAttentionMetadataBuilder.build of vLLM 0.32.0",
    shipped_in="0.32.0",
    hunks=(
        Hunk(
            STATES,
            PREPARE,
            old="            num_draft_tokens_per_req = input_batch.num_draft_tokens_per_req\n",
            new="""\
            num_draft_tokens_per_req = input_batch.num_draft_tokens_per_req
            if num_draft_tokens_per_req is None:
                num_draft_tokens_per_req = np.zeros(input_batch.num_reqs, np.int32)
""",
        ),
        Hunk(
            STATES,
            PREPARE,
            old="                spec_decode_mask = (num_draft_tokens_per_req > 0) & is_decode\n",
            new="""\
                # Generating without a draft is one too: its state is where the last
                # step's accepted count says, which only these rows look up.
                spec_decode_mask = is_decode & (
                    (num_draft_tokens_per_req > 0) | ~input_batch.is_prefilling_np
                )
""",
        ),
        Hunk(
            GDN,
            BUILD,
            old="""\
            or num_decode_draft_tokens_cpu[num_decode_draft_tokens_cpu >= 0]
            .sum()
            .item()
            == 0
""",
            new="""\
            # Zero drafts in the whole batch do not make it an ordinary one.
""",
        ),
    ),
    shipped=((Marker(STATES, PREPARE, "np.where(is_decode, num_draft_tokens_per_req, -1)"),),),
)
