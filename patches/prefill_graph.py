"""A prefill of exactly S + 1 tokens is not a decode, whatever its shape.

0.27.1 looks at shapes alone: a batch in which every request has S + 1 tokens is replayed as a full
decode graph. A hybrid target (GDN, Mamba) then starts a prompt from the state of the slot's last
owner. EAGLE's and MTP's first pass reuses the target's attention metadata, so they ask the same.
"""

from _patchlib import Hunk, Marker, Patch

GRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
STATES = "vllm/v1/worker/gpu/states.py"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"
EAGLE = "vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py"
MTP = "vllm/v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py"

PASS_ON = """\
            max_query_len,
            has_prefill=bool(input_batch.is_prefilling_np.any()),
        )
"""

PATCH = Patch(
    name="prefill-graph",
    why="a prefill batch of S + 1 tokens per request would be replayed as a full decode graph",
    upstream="get_uniform_decode_token_count(has_prefill) of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            GRAPHS,
            "get_uniform_token_count",
            old="""\
    max_query_len: int,
) -> int | None:
""",
            new="""\
    max_query_len: int,
    has_prefill: bool = False,
) -> int | None:
""",
        ),
        Hunk(
            GRAPHS,
            "get_uniform_token_count",
            old="    A batch is uniform if all requests have the same number of tokens.\n",
            new="""\
    A batch is uniform if all requests have the same number of tokens. One with a
    prefill is not: the count selects a graph that was captured for decoding.
""",
        ),
        Hunk(
            GRAPHS,
            "get_uniform_token_count",
            old="    if (max_query_len == num_tokens // num_reqs) and (\n",
            new="    if not has_prefill and (max_query_len == num_tokens // num_reqs) and (\n",
        ),
        Hunk(
            STATES,
            "RequestState",
            old="    def add_request(\n",
            new='''\
    def has_prefill(self, req_ids) -> bool:
        """Whether one of the requests still has prompt tokens to compute."""
        idx = [self.req_id_to_index[req_id] for req_id in req_ids]
        computed = self.num_computed_prefill_tokens[idx]
        return bool(np.any(computed < self.prefill_len.np[idx]))

    def add_request(
''',
        ),
        Hunk(
            RUNNER,
            "GPUModelRunner.execute_model",
            old="        uniform_tok_count = get_uniform_token_count(num_reqs, num_toks, max_query_len)\n",
            new="""\
        has_prefill = not dummy_run and self.req_states.has_prefill(
            scheduler_output.num_scheduled_tokens
        )
        uniform_tok_count = get_uniform_token_count(
            num_reqs, num_toks, max_query_len, has_prefill
        )
""",
        ),
        Hunk(
            EAGLE,
            "AutoRegressiveSpeculator.propose",
            old="""\
            max_query_len,
        )
""",
            new=PASS_ON,
        ),
        Hunk(
            MTP,
            "MultiModuleMTPSpeculator.propose",
            old="""\
            num_tokens,
            max_query_len,
        )
""",
            new="            num_tokens,\n" + PASS_ON,
        ),
    ),
    defines=((STATES, "RequestState.has_prefill"),),
    # From 0.31 a one-token extension may run as a decode, so the runner asks a finer question.
    shipped=(
        (
            Marker(
                RUNNER,
                "GPUModelRunner",
                "get_uniform_decode_token_count(num_reqs, num_toks, max_query_len, batch_state.has_prefill)",
            ),
        ),
        (
            Marker(
                RUNNER,
                "GPUModelRunner",
                "get_uniform_decode_token_count(num_reqs, num_toks, max_query_len, decode_graph_eligible)",
            ),
        ),
    ),
)
