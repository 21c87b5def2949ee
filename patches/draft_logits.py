"""The cached proposal of a sparse drafter must be -inf wherever it proposed nothing.

0.27.1 fills the cache with 0.0, which a verifier reads as a live token. A speculator now says
what its cache holds; every drafter of 0.27.1 keeps the (float32, 0.0) it has.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/speculator.py"

PATCH = Patch(
    name="draft-logits",
    why="tokens that were never proposed must have q = 0: the cache starts at -inf, not 0.0",
    upstream="DraftModelSpeculator.draft_logits_spec of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "DraftModelSpeculator",
            old="""\
            self.draft_logits = torch.zeros(
                self.max_num_reqs,
                self.num_speculative_steps,
                self.vocab_size,
                dtype=torch.float32,
                device=device,
            )
""",
            new='''\
            self.draft_logits = self.make_draft_logits(vllm_config)

    def make_draft_logits(self, vllm_config: VllmConfig) -> torch.Tensor:
        """The cached proposal of every request slot: [max_num_reqs, S, vocab_size]."""
        dtype, fill = self.draft_logits_spec(vllm_config)
        shape = (self.max_num_reqs, self.num_speculative_steps, self.vocab_size)
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        """(dtype, fill value) of the cached proposal distribution."""
        return torch.float32, 0.0
''',
        ),
    ),
    defines=((FILE, "DraftModelSpeculator.draft_logits_spec"),),
    shipped=((Marker(FILE, "DraftModelSpeculator", "def draft_logits_spec("),),),
    core=True,
)
