"""A request whose prompt starts with a piece of one token starts from the zero Mamba state.

A row of one token is taken for decoding, and decoding goes on from what is in the request's state.
At the first token that is what the page's last owner left. It concerns prompts of one token, among
them the one that joins a decoding batch and is padded to 1 + S, and a first chunk of one token.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
CLASS = "MambaHybridModelState"

PATCH = Patch(
    name="fresh-states",
    why="a one-token prompt of a GDN target went on from the state of an earlier request",
    upstream="in part: GDNAttentionMetadataBuilder.build of vLLM 0.31.0, not for a padded prompt of one token",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            CLASS,
            old="    def preprocess_state(\n",
            new='''\
    def clear_fresh_states(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Zero the states of requests that begin with one token: they run as decodes."""
        tokens = input_batch.num_scheduled_tokens
        if input_batch.num_draft_tokens_per_req is not None:
            tokens = tokens - input_batch.num_draft_tokens_per_req
        fresh = (input_batch.num_computed_tokens_np == 0) & (tokens == 1)
        if not fresh.any():
            return
        rows = torch.from_numpy(np.flatnonzero(fresh)).to(self.device)
        layers = self.vllm_config.compilation_config.static_forward_context
        for group, block_table in zip(kv_cache_config.kv_cache_groups, block_tables):
            if isinstance(group.kv_cache_spec, MambaSpec):
                pages = block_table[rows, 0].long()
                for name in group.layer_names:
                    for state in layers[name].kv_cache:
                        state[pages] = 0

    def preprocess_state(
''',
        ),
        Hunk(
            FILE,
            f"{CLASS}.preprocess_state",
            old="        if not self._align_mode:\n",
            new="""\
        self.clear_fresh_states(input_batch, block_tables, kv_cache_config)
        if not self._align_mode:
""",
        ),
    ),
    defines=((FILE, f"{CLASS}.clear_fresh_states"),),
)
