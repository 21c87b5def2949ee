"""The drafter needs the target head's top K with their scores, not one argmax and not every logit.

Each rank ranks the columns it owns and sends k (score, id) pairs, so that a vocabulary of 248,320
is never gathered. DFlash2 scales first and caps second, the other way round than `forward`.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/model_executor/layers/logits_processor.py"

PATCH = Patch(
    name="vocab-parallel-top-k",
    why="the K best tokens of the target's head with their scores, without gathering the vocabulary",
    upstream="LogitsProcessor.get_top_k_tokens of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "LogitsProcessor",
            old="""\
    def extra_repr(self) -> str:
""",
            new='''\
    def get_top_k_tokens(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        k: int,
        embedding_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best tokens of each row and their scores, best first.

        A rank sends k (score, id) pairs per row: O(rows * 2k * tp_size), where
        gathering the logits is O(rows * vocab_size). Equal scores come in the
        order of their ids, and a NaN score counts as -inf.

        Args:
            hidden_states: [rows, hidden_size].
            k: how many, at most the vocabulary.

        Returns:
            ids: [rows, k] int64, global token ids.
            scores: [rows, k] float32, scaled, then soft-capped (`forward` caps
                first). Both keep the order, so they touch the k scores only.

        Raises:
            ValueError: `scale` is not positive (it would turn the order round),
                or k is not between 1 and the vocabulary size.
        """
        from vllm.model_executor.layers.dflash2.top_k import Counters, top_k

        if self.scale <= 0.0:
            raise ValueError(
                f"get_top_k_tokens needs a positive logit scale, got {self.scale}."
            )
        if not 0 < k <= self.org_vocab_size:
            raise ValueError(
                f"get_top_k_tokens: k must be between 1 and the vocabulary size "
                f"{self.org_vocab_size}, got {k}."
            )
        logits = self._apply_head(lm_head, hidden_states, embedding_bias)
        # A shard holds its slice of the vocabulary first, padding and LoRA's
        # added tokens behind it; only the slice may be chosen from.
        shard = lm_head.shard_indices
        start = shard.org_vocab_start_index
        owned = min(shard.org_vocab_end_index, self.org_vocab_size) - start
        if owned > 0:
            if not hasattr(self, "_top_k_counters"):
                # Kept here: CUDA graphs hold their addresses, and go no later than this layer.
                self._top_k_counters = Counters()
            ids, scores = top_k(logits, min(k, owned), owned, self._top_k_counters)
        else:  # a small vocabulary leaves the last ranks padding alone
            ids = logits.new_empty(len(logits), 0, dtype=torch.int64)
            scores = logits.new_empty(len(logits), 0, dtype=torch.float32)
        if start:
            ids = ids + start
        if lm_head.tp_size > 1:
            # A shard smaller than k fills up with what sorts behind every token.
            short = (0, k - scores.shape[1])
            scores = F.pad(scores, short, value=float("-inf"))
            ids = F.pad(ids, short, value=2**31 - 1).to(torch.int32)
            pairs = torch.stack([scores.view(torch.int32), ids], -1).flatten(1)
            pairs = tensor_model_parallel_all_gather(pairs, dim=-1)
            pairs = pairs.view(len(ids), -1, 2)
            ids, order = pairs[..., 1].long().sort(dim=-1)
            scores = pairs[..., 0].gather(-1, order).view(torch.float32)
            scores, order = scores.sort(dim=-1, descending=True, stable=True)
            scores, ids = scores[:, :k], ids.gather(-1, order[:, :k])
        if self.scale != 1.0:
            scores = scores * self.scale
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        return ids, scores

    def extra_repr(self) -> str:
''',
        ),
    ),
    defines=((FILE, "LogitsProcessor.get_top_k_tokens"),),
    shipped=((Marker(FILE, "LogitsProcessor", "def get_top_k_tokens("),),),
    core=True,
)
