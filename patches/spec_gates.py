"""The gates of a delta net's verified rows belong to those rows, wherever in the batch they are.

In a batch with a prefill as well, `_forward_core` gathers q, k and v of the rows being verified and
takes the gates a and b from the top of the batch. That is right as long as all verified rows lead
it. They do not if a request with fewer than S + 1 rows (near max_model_len) follows one with a
single row, or if a prefill chunk of S + 1 tokens comes first: then a request's state decays and
is written by another request's gates, and its text is wrong from there on.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
SCOPE = "QwenGatedDeltaNetAttention._forward_core"

PATCH = Patch(
    name="spec-gates",
    why="in a mixed batch a verified request of a GDN target used another request's gates: wrong text",
    upstream="a_spec, b_spec in QwenGatedDeltaNetAttention._forward_core of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        query_spec, key_spec, value_spec = self.rearrange_mixed_qkv(mixed_qkv_spec)
""",
            new="""\
        query_spec, key_spec, value_spec = self.rearrange_mixed_qkv(mixed_qkv_spec)
        # Gates follow the rows of q, k and v; without other rows nothing moves.
        a_spec, b_spec = a, b
        if mixed_qkv_spec is not None and mixed_qkv_non_spec is not None:
            a_spec = a.index_select(0, spec_token_indx)
            b_spec = b.index_select(0, spec_token_indx)
""",
        ),
        Hunk(
            FILE,
            SCOPE,
            old="""\
                    a=a,
                    b=b,
                    dt_bias=self.dt_bias,
                    q=query_spec,
""",
            new="""\
                    a=a_spec,
                    b=b_spec,
                    dt_bias=self.dt_bias,
                    q=query_spec,
""",
        ),
    ),
    shipped=(
        (
            Marker(FILE, SCOPE, "a.index_select(0, spec_token_indx)"),
            Marker(FILE, SCOPE, "b.index_select(0, spec_token_indx)"),
        ),
    ),
)
