"""Sampled output against the exact distribution; see lossless.py for what is served and how.

The NumPy transcription does the counting on a CPU. What ties it to the product: every round of a
small mixed batch, through both, gives the same drafts, the same cached proposals and the same tokens.
"""

import copy

import numpy as np
import pytest
import torch

from tests.support import lossless, transcription
from tests.support.lossless import CASES, FAULTS, Case

# Fewer samples than a GPU's 400,000, so a wrong design whose trace is faint there is left to it.
FAINT = {Case("block", 3, fault="position-keyed noise")}


class Both:
    """The kernels, and the transcription on a copy of what they are given."""

    backend = lossless.Kernels

    def __init__(self, world, slots):
        self.slots, self.kernels = slots, self.backend(world, slots)
        self.shadow = copy.deepcopy(slots)
        self.transcribed = lossless.Transcribed(world, self.shadow)

    def draft(self, live):
        vars(self.shadow).update(copy.deepcopy(vars(self.slots)))
        self.kernels.draft(live)
        self.transcribed.draft(live)
        assert torch.equal(self.slots.drafts, self.shadow.drafts), "the walks differ"
        torch.testing.assert_close(self.slots.scores, self.shadow.scores)
        assert torch.equal(self.slots.ids, self.shadow.ids)
        if self.kernels.dense:
            assert torch.equal(self.slots.draft_logits, lossless.as_rows(self.slots.ids, self.slots.scores))

    def verify(self, live, counts, drafts, target):
        vars(self.shadow).update(copy.deepcopy(vars(self.slots)))
        sampled, number = self.kernels.verify(live, counts, drafts, target)
        shadow_sampled, shadow_number = self.transcribed.verify(live, counts, drafts, target)
        assert torch.equal(number, shadow_number), "the verifiers accept differently"
        kept = torch.arange(sampled.shape[1]) < number[:, None]
        assert torch.equal(sampled[kept], shadow_sampled[kept]), "the verifiers emit differently"
        return sampled, number


@pytest.fixture
def interpretable(monkeypatch):
    """The interpreter cannot run Triton's top-k and top-p, which takes its row from a loop's variable."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  the CPU's stand-ins for pinned memory
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import states

    monkeypatch.setattr(states, "apply_top_k_top_p", topk_topp_sampler.apply_top_k_top_p_pytorch)


@pytest.mark.parametrize(
    "case, samples, width",
    [
        *((case, 15, 10) for case in (Case("standard", 3), Case("block", 3), Case("block", 2, 5))),
        (Case("standard", 3, parameters=True), 20, 20),
        *((case, 5, 20) for case in FAULTS[-2:]),
    ],
    ids=str,
)
def test_transcription_gives_what_the_kernels_give(interpretable, case, samples, width):
    lossless.first_tokens(case, samples, Both, width)


def test_the_dense_form_gives_what_the_kernels_give(monkeypatch):
    monkeypatch.setattr(Both, "backend", lossless.DenseKernels)
    lossless.first_tokens(Case("block", 3), 15, Both, 10)


def test_philox_is_the_published_one():
    # The first known answer of Random123's kat_vectors: counter and key all zero.
    assert transcription.philox(0, 0) == 0x6627E8D5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_is_exact(case):
    result = lossless.run(case, 20_000)
    assert lossless.verdict(case, result), result


@pytest.mark.parametrize("case", [case for case in FAULTS if case not in FAINT], ids=lambda case: case.name)
def test_wrong_design_is_caught(case):
    result = lossless.run(case, 50_000)
    assert lossless.verdict(case, result), result


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_seed_reproduces_whatever_the_batch(method):
    case = Case(method, 3)
    alone = lossless.first_tokens(case, 600, width=1)
    for width, order in ((64, 0), (64, 1), (600, 2)):
        assert torch.equal(lossless.first_tokens(case, 600, width=width, order=order), alone)


def test_chi_square_knows_a_right_and_a_wrong_distribution():
    expected = np.full(4, 0.25)
    assert lossless.chi_square(np.array([250, 250, 250, 250]), expected) == 1
    # A statistic of 16 with three degrees of freedom; the value is from tables.
    assert lossless.chi_square(np.array([290, 270, 230, 210]), expected) == pytest.approx(0.001134, rel=0.01)
    assert lossless.chi_square(np.array([400, 200, 200, 200]), expected) < 1e-10


def test_rare_cells_are_pooled():
    expected = np.array([0.5, 0.498, 0.001, 0.001])
    assert lossless.chi_square(np.array([500, 498, 0, 2]), expected) > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + FAULTS, ids=lambda case: case.name)
def test_on_a_gpu(case):
    """The kernels themselves, with enough samples for every fault."""
    result = lossless.run(case, 400_000, lossless.Kernels, 65536, "cuda")
    assert lossless.verdict(case, result), result
