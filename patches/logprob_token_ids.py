"""logprob_token_ids beside a drafter.

A request may name the tokens whose logprobs it wants. The sampler knows; the rejection sampler does not
ask: such a request gets logprobs for its first token and none for any that was verified, or the top ones
if another request of the batch wants those.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py"
GET = "RejectionSampler._get_logprobs_tensors"
VERIFY = "RejectionSampler._verify_in_chunks"

PATCH = Patch(
    name="logprob-token-ids",
    why="logprob_token_ids was honoured for a request's first token only, and for no verified one",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            GET,
            old="""\
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if max_num_logprobs == NO_LOGPROBS:
            return None
""",
            new="""\
        max_num_logprobs: int,
        expanded_idx_mapping: torch.Tensor | None = None,
        max_per_req_token_ids: int = 0,
    ) -> LogprobsTensors | None:
        if max_num_logprobs == NO_LOGPROBS and max_per_req_token_ids == 0:
            return None
""",
        ),
        Hunk(
            FILE,
            GET,
            old="""\
            max_num_logprobs,
            flat_sampled,
            cu_num_logits_np.tolist() if expanded_logits else None,
""",
            new="""\
            max(max_num_logprobs, 0),
            flat_sampled,
            cu_num_logits_np.tolist() if expanded_logits else None,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=expanded_idx_mapping,
            max_per_req_token_ids=max_per_req_token_ids,
""",
        ),
        Hunk(
            FILE,
            VERIFY,
            old="""\
                chunk_cu_num_logits_np,
                max_num_logprobs,
            )
""",
            new="""\
                chunk_cu_num_logits_np,
                max_num_logprobs,
                input_batch.expanded_idx_mapping[lo:hi],
                # Of the whole batch: its chunks have to be of one width.
                self.sampler.logprob_token_ids_state.max_num_token_ids(
                    input_batch.idx_mapping_np
                ),
            )
""",
        ),
    ),
)
