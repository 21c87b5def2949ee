"""Drafts that nobody drew: the scheduler pads a new request to 1 + S tokens, the runner fills in 0.

A request with one token to compute that joins a decoding batch is scheduled with S placeholder
drafts. The V2 runner verifies token 0 in their place, against whatever proposal the slot's last
request left there. Where that says q(0) = 0, as a sparse proposal does, token 0 is accepted whenever
p(0) > 0, up to S times; if it is dense the output is biased less visibly.

So a request that takes a slot resets the slot's proposal to what those drafts are: all mass on token 0.

`reset_slot(req_idx)` is called once for each request that takes a slot, eagerly and before the step
that first uses it. A speculator that caches more about its proposal than `draft_logits` (DFlash2: the
candidates and their scores) overrides it and resets that too.
"""

from _patchlib import Hunk, Patch

BASE = "vllm/v1/worker/gpu/spec_decode/speculator.py"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"

PATCH = Patch(
    name="padded-drafts",
    why="a one-token request that joins a decoding batch would emit token 0 up to S times",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            BASE,
            "BaseSpeculator",
            old="""\
    def capture(self) -> None:
        pass
""",
            new='''\
    def capture(self) -> None:
        pass

    def reset_slot(self, req_idx: int) -> None:
        """A request takes slot `req_idx`, whose draft tokens are all 0 until it is drafted for."""
''',
        ),
        Hunk(
            BASE,
            "DraftModelSpeculator",
            old="    def set_eplb_state(self, eplb_state: EplbState) -> None:\n",
            new="""\
    def reset_slot(self, req_idx: int) -> None:
        # The scheduler may have the zeros verified: their proposal is all mass on token 0.
        if self.draft_logits is not None:
            self.draft_logits[req_idx].fill_(float("-inf"))
            self.draft_logits[req_idx, :, 0] = 0.0

    def set_eplb_state(self, eplb_state: EplbState) -> None:
""",
        ),
        Hunk(
            RUNNER,
            "GPUModelRunner.add_requests",
            old="            req_index = self.req_states.req_id_to_index[req_id]\n",
            new="""\
            req_index = self.req_states.req_id_to_index[req_id]
            if self.speculator is not None:
                self.speculator.reset_slot(req_index)
""",
        ),
    ),
    defines=(
        (BASE, "BaseSpeculator.reset_slot"),
        (BASE, "DraftModelSpeculator.reset_slot"),
    ),
)
