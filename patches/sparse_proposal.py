"""A proposal over K candidates is verified from K ids and K scores, not from a row of the vocabulary.

0.27.1 keeps what a draft was drawn from as max_num_seqs x S x vocabulary float32, 1.7 GB at 256 requests and a
vocabulary of 248,320, and reads all of it to verify, though DFlash2 proposes K tokens per step and gives every
other one no mass at all. A cached proposal may now bring its own `rejection_sample`; a tensor has none, and is
verified as before.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/v1/worker/gpu/spec_decode/rejection_sampler.py"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"

PATCH = Patch(
    name="sparse-proposal",
    why="probabilistic drafting kept, and read back, a row of the vocabulary per draft token: gigabytes of it",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            "RejectionSampler._verify",
            old="        sampled, num_sampled = rejection_sample(\n",
            new="""\
        # A sparse proposal brings its own verification.
        verify = getattr(draft_logits, "rejection_sample", rejection_sample)
        sampled, num_sampled = verify(
""",
        ),
        Hunk(
            RUNNER,
            "GPUModelRunner.load_model",
            old="""\
                self.rejection_sampler = RejectionSampler(
""",
            new="""\
                if self.speculator is not None:
                    # A draft may leave out what the request's top-k, top-p and min-p do.
                    self.speculator.sampling_states = self.sampler.sampling_states
                self.rejection_sampler = RejectionSampler(
""",
        ),
    ),
)
