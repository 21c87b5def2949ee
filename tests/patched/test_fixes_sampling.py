"""Each sampling fix does on the real 0.27.1 modules what its patch file says, and 0.27.1 alone does not.

What the fixes are for together, output that is exactly the target's, is test_lossless.py's; the engine as a whole is
in tests/engine/test_serve.py.

Faults tried here: NaN rows in the logits (greedy, both verifications, the plain sampler, a proposal of
NaN), ids at the vocabulary's edge, placeholders from any draft on, a one-token prompt that joins a
decoding batch, a prompt of S + 1 tokens, drafts past a grammar's end.
"""

from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.support import transcription

V, S = 16, 7
NAN, INF = float("nan"), float("inf")


def rows(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, V)).astype(np.float32))


def sampling_inputs(count):
    """What a drafter samples with: logits, slots, temperatures, seeds and positions of `count` rows."""
    slots = torch.arange(count, dtype=torch.int32)
    return Namespace(
        logits=rows(count),
        slots=slots,
        temperature=torch.ones(count),
        seeds=torch.arange(count) + 11,
        positions=torch.arange(count) + 2**20,
        cache=torch.full((count, 2, V), -INF),
    )


def keyed_tokens(given, positions):
    noise = transcription.gumbel(given.seeds.numpy(), positions.numpy(), np.arange(V))
    return (given.logits.numpy() + noise).argmax(-1).tolist()


def assert_noise_of_its_own(given, drawn):
    """The tokens are drawn with a stream 2**30 after the target's, and it shows."""
    apart = keyed_tokens(given, given.positions + 2**30)
    assert drawn.tolist() == apart != keyed_tokens(given, given.positions)


@pytest.mark.needs_patch("draft-noise")
def test_drafts_have_noise_of_their_own():
    """Keys of the tokens that the common sample_draft draws; positions are of the predecessor."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    given = sampling_inputs(24)
    drafter = Namespace(model=Namespace(compute_logits=lambda hidden: hidden), use_fp64_gumbel=False)
    step = torch.zeros((), dtype=torch.int64)
    arguments = (given.logits, given.positions - 1, given.slots, given.temperature, given.seeds, step, given.cache)
    assert_noise_of_its_own(given, DraftModelSpeculator.sample_draft(drafter, *arguments))


@pytest.mark.needs_patch("draft-noise")
def test_dsparks_drafts_have_noise_of_their_own():
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    given = sampling_inputs(24)
    drafter = Namespace(
        num_speculative_steps=1,
        sample_indices=torch.arange(24),
        sample_idx_mapping=given.slots,
        sample_pos=given.positions + 1,
        temperature=given.temperature,
        seeds=given.seeds,
        draft_logits=given.cache[:, :1].contiguous(),
        draft_tokens=torch.zeros(24, 1, dtype=torch.int64),
        input_buffers=Namespace(input_ids=torch.zeros(24, dtype=torch.int64)),
        _anchor_idx=torch.arange(24),
        _step_cols=torch.zeros(1, dtype=torch.int32),
        _d2t_scatter_index=None,
        use_fp64_gumbel=False,
        model=Namespace(
            compute_draft_logits=lambda hidden: hidden,
            markov_embed=lambda token: token,
            markov_bias=lambda embedded: 0.0,
        ),
    )
    DSparkSpeculator._sample_sequential(drafter, 24, given.logits)
    assert_noise_of_its_own(given, drafter.draft_tokens[:, 0])


def test_every_other_drafter_samples_with_the_fixed_function():
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    drafters = (DFlashSpeculator, EagleSpeculator, MTPSpeculator, MultiModuleMTPSpeculator, Gemma4Speculator)
    for drafter in drafters:
        assert drafter.sample_draft is DraftModelSpeculator.sample_draft, drafter.__name__


@pytest.mark.needs_patch("capture-slots")
def test_capture_touches_no_slot():
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    seen = []
    drafter = Namespace(
        sample_indices=torch.ones(6, dtype=torch.int64),
        sample_pos=torch.ones(6, dtype=torch.int64),
        sample_idx_mapping=torch.ones(6, dtype=torch.int32),
        input_buffers=None,
        block_tables=None,
        attn_groups=None,
        kv_cache_config=None,
        max_model_len=1,
        _speculator_name="DFlash",
        _group_causal=False,
        _generate_draft=None,
    )
    record = Namespace(capture=lambda *_, **__: seen.extend(set(drafter.sample_idx_mapping.tolist())))
    drafter.query_cudagraph_manager = record
    DFlashSpeculator.capture(drafter)
    assert seen == [-1]


@pytest.mark.parametrize(
    "name",
    [
        "DFlash2Speculator",
        pytest.param("DraftModelSpeculator", marks=pytest.mark.needs_patch("padded-drafts", raises=AttributeError)),
    ],
)
def test_a_slot_is_reset_for_its_next_request(name):
    """Exactly all mass on token 0 at every step, whatever the drafter; other slots untouched."""
    from vllm.v1.worker.gpu.spec_decode import speculator

    if name == "DFlash2Speculator":
        from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator
    concrete = type("Concrete", (getattr(speculator, name),), {})
    concrete.__abstractmethods__ = frozenset()
    state = object.__new__(concrete)
    state.draft_logits = rows(3 * 2).view(3, 2, V).clone()
    before = state.draft_logits.clone()
    if name == "DFlash2Speculator":
        from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal

        state.proposal = SparseProposal(torch.full((3, 2, 4), 7), rows(3 * 2).view(3, 2, V)[..., :4].clone(), V)
        scores = state.proposal.scores.clone()
    state.reset_slot(1)
    assert torch.softmax(state.draft_logits[1], -1).tolist() == [[1.0] + [0.0] * (V - 1)] * 2
    assert torch.equal(before[[0, 2]], state.draft_logits[[0, 2]])
    if name == "DFlash2Speculator":
        assert not state.proposal.ids[1].any()
        assert torch.softmax(state.proposal.scores[1], -1).tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2
        assert torch.equal(scores[[0, 2]], state.proposal.scores[[0, 2]])
        state.proposal = None
    state.draft_logits = None
    state.reset_slot(1)


def reject(target, proposal, drafts, temperature, block=False):
    """Runs rejection_sample; target [n, S + 1, V], proposal [n, S, V], drafts [n, S]. Emitted tokens."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    n, steps = drafts.shape
    slots = torch.arange(n, dtype=torch.int32)
    # One row before the first: 0.27.1 reads there for a draft of -1.
    room = torch.zeros(n * (steps + 1) + 1, V)
    room[1:] = target.reshape(-1, V)
    sampled, number = rejection_sample(
        room[1:],
        proposal,
        torch.cat([torch.zeros(n, 1, dtype=torch.int64), drafts], 1).flatten(),
        torch.arange(n + 1, dtype=torch.int32) * (steps + 1),
        reject_positions(n, steps).flatten(),
        slots,
        slots.repeat_interleave(steps + 1),
        torch.arange(steps + 1, dtype=torch.int32).repeat(n),
        temperature,
        torch.arange(n) + 3,
        steps,
        use_block_verification=block,
    )
    return [tokens[:count].tolist() for tokens, count in zip(sampled, number)]


def reject_positions(n, steps):
    return torch.arange(n)[:, None] * 50 + torch.arange(steps + 1)


def expected_rejection(target, proposal, drafts, temperature, block=False):
    n, steps = drafts.shape
    sampled, number = transcription.verify(
        target.numpy(),
        proposal.numpy(),
        drafts.numpy(),
        np.full(n, steps),
        reject_positions(n, steps).numpy(),
        np.arange(n) + 3,
        temperature.numpy(),
        block,
    )
    return [tokens[:count].tolist() for tokens, count in zip(sampled, number)]


@pytest.fixture
def gpu_comparisons(monkeypatch):
    """NaN loses every comparison on a GPU: a reduction forgets all that comes before the last NaN."""
    original = interpreter.ReduceOps.min_max

    def position(x, axis, keepdims):
        after = int(np.flatnonzero(np.isnan(x))[-1]) + 1
        return np.int32(after + x[after:].argmax() if after < x.size else x.size - 1)

    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        row = (input[0] if isinstance(input, tuple) else input).handle.data
        if idx_reduce_op is None or row.ndim != 1 or not np.isnan(row).any():
            return original(self, input, val_reduce_op, idx_reduce_op)
        value = val_reduce_op and (lambda x, axis, keepdims: x[position(x, axis, keepdims)])
        return original(self, input, value, position)

    monkeypatch.setattr(interpreter.ReduceOps, "min_max", min_max)


@pytest.mark.needs_patch("nan-rows")
@pytest.mark.parametrize("method", ["greedy", "standard", "block"])
def test_nan_rows_stay_inside_the_vocabulary(gpu_comparisons, method):
    """Rows of the target that are NaN: first, middle, bonus, all."""
    steps = 2
    target = rows(5 * (steps + 1)).view(5, steps + 1, V).clone()
    for request in range(3):
        target[request, request] = NAN
    target[3] = NAN
    drafts = target.nan_to_num(-9).argmax(-1)[:, :steps]
    temperature = torch.full((5,), 0.0 if method == "greedy" else 1.0)
    emitted = reject(target, rows(5 * steps, 1).view(5, steps, V), drafts, temperature, method == "block")
    assert max(max(tokens) for tokens in emitted) < V


@pytest.mark.needs_patch("nan-rows")
def test_nan_rows_of_the_plain_sampler_stay_inside_the_vocabulary(gpu_comparisons):
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits, slots, positions = torch.full((2, V), NAN), torch.arange(2, dtype=torch.int32), torch.arange(2)
    sampled = gumbel_sample(logits, slots, torch.tensor([0.0, 1.0]), positions, positions, False)
    assert sampled.max() < V


@pytest.mark.needs_patch("nan-rows")
def test_a_proposal_of_nan_leaves_the_target_exact():
    n = 12
    target = rows(n * 2).view(n, 2, V)
    emitted = reject(target, torch.full((n, 1, V), NAN), torch.zeros(n, 1, dtype=torch.int64), torch.ones(n))
    noise = transcription.gumbel(np.arange(n) + 3, reject_positions(n, 1)[:, 0].numpy(), np.arange(V))
    assert emitted == [[token] for token in (target[:, 0].numpy() + noise).argmax(-1).tolist()]


@pytest.mark.parametrize(
    "method", ["standard", pytest.param("block", marks=pytest.mark.needs_patch("block-verify-placeholders"))]
)
def test_placeholders_end_the_block(method):
    """Placeholders from draft 0, 1, 2 on; greedy and sampled."""
    n, steps = 24, 3
    target = rows(n * (steps + 1)).view(n, steps + 1, V)
    proposal = rows(n * steps, 1).view(n, steps, V)
    drafts = proposal.argmax(-1)
    drafts[torch.arange(steps) >= (torch.arange(n) % (steps + 1))[:, None]] = -1
    arguments = (target, proposal, drafts, torch.tensor([0.0, 1.0]).repeat(n // 2), method == "block")
    emitted = reject(*arguments)
    assert not any(-1 in tokens for tokens in emitted)
    assert emitted == expected_rejection(*arguments)


@pytest.mark.needs_patch("prefill-graph", raises=TypeError)  # it is not asked for prefills
def test_a_prefill_is_no_decode_batch():
    """Batches of 2 x 8 tokens: decoding, and with a prefill among them."""
    from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count

    assert get_uniform_token_count(2, 16, 8) == S + 1
    assert get_uniform_token_count(2, 16, 8, True) is None


class Reached(Exception):
    """Ends a call once the value that a test is after has been seen."""


def first_pass(monkeypatch, drafter, module, **state):
    """What a drafter's propose hands on: (arguments of _copy_request_inputs, of get_uniform_token_count)."""
    seen = []

    def graph(*arguments, **named):
        seen.append([bool(named.get("has_prefill"))])
        raise Reached

    batch = Namespace(
        num_reqs=2,
        num_tokens=16,
        num_tokens_after_padding=16,
        num_scheduled_tokens=np.array([8, 8]),
        seq_lens=torch.tensor([40, 60, 0]),
        seq_lens_cpu_upper_bound=torch.tensor([40, 60]),
        idx_mapping=torch.tensor([1, 0]),
        query_start_loc=torch.tensor([0, 8, 16]),
        is_prefilling_np=np.array([False, True]),
    )
    stub = Namespace(
        num_speculative_steps=7,
        max_model_len=100,
        hidden_states=torch.zeros(16, 4),
        input_buffers=Namespace(query_start_loc=torch.zeros(3, dtype=torch.int64)),
        _copy_request_inputs=lambda *arguments: seen.append([a.tolist() for a in arguments[4:]]),
        **state,
    )
    monkeypatch.setattr(module, "get_uniform_token_count", graph)
    if hasattr(module, "prepare_prefill_inputs"):
        monkeypatch.setattr(module, "prepare_prefill_inputs", lambda *_: None)
    rejected, unused = torch.tensor([3, 0]), torch.zeros(4)
    try:
        drafter.propose(stub, batch, {}, {}, torch.zeros(16, 4), None, unused, rejected, unused, unused, unused, unused)
    except Reached:
        return seen


@pytest.mark.needs_patch("prefill-graph", "block-verify-noise")
@pytest.mark.parametrize("drafter", ["EAGLE", "MTP"])
def test_eagle_and_mtp_tell_prefills_too(monkeypatch, drafter):
    """... and hand on the anchors' positions, 40 - 3 and 60, which key their drafts' noise."""
    from vllm.v1.worker.gpu.spec_decode.autoregressive import speculator as eagle
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as mtp

    if drafter == "EAGLE":
        buffers = {"last_token_indices": None, "current_draft_step": None, "max_num_reqs": 4}
        seen = first_pass(monkeypatch, eagle.AutoRegressiveSpeculator, eagle, **buffers)
    else:
        seen = first_pass(monkeypatch, mtp.MultiModuleMTPSpeculator, mtp, _prepare_inputs=lambda *_: None)
    assert seen == [[[37, 60]], [True]]


@pytest.fixture(scope="module")
def grammar():
    """grammar() -> a new matcher of one "a"; token 0 is "a", token 2 ends the text."""
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    tokens = xgrammar.TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(tokens).compile_grammar('root ::= "a"')

    def new():
        matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=8)
        return XgrammarGrammar(vocab_size=3, matcher=matcher, ctx=compiled)

    return new


@pytest.mark.needs_patch("grammar-end")
def test_tokens_past_a_grammars_end_are_no_error_in_one_call(grammar):
    in_one = grammar()
    assert in_one.accept_tokens("r", [0, 2, 1, 1]) and in_one.is_terminated()


@pytest.mark.needs_patch("grammar-end")
def test_tokens_past_a_grammars_end_are_no_error_one_by_one(grammar):
    apart = grammar()
    assert all(apart.accept_tokens("r", [token]) for token in (0, 2, 1, 1)) and apart.is_terminated()


def test_drafts_are_valid_to_a_grammars_end_and_leave_it_open(grammar):
    drafted = grammar()
    assert drafted.validate_tokens([0, 2, 1, 1]) == [0, 2]
    assert not drafted.matcher.is_terminated() and drafted.accept_tokens("r", [0, 2])
    drafted.rollback(2)
    assert not drafted.is_terminated() and drafted.accept_tokens("r", [0])


def test_a_token_that_the_grammar_does_not_have_is_still_refused(grammar):
    assert not grammar().accept_tokens("r", [1])


@pytest.mark.needs_patch("block-verify-noise", raises=TypeError)  # the anchors' positions are not taken
def test_rounds_that_share_positions_share_no_noise():
    """EAGLE and MTP; the walk's and the verifier's keys are in test_lossless.py."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    drafter = Namespace(
        temperature=torch.zeros(4),
        seeds=torch.zeros(4, dtype=torch.int64),
        idx_mapping=torch.zeros(4, dtype=torch.int32),
        draft_logits=True,
    )
    slots, seeds, found = torch.tensor([2, 0], dtype=torch.int32), torch.arange(4) + 5, []
    for anchors in ([30, 90], [31, 94]):
        arguments = (2, slots, torch.ones(4), seeds, torch.tensor(anchors, dtype=torch.int32))
        DraftModelSpeculator._copy_request_inputs(drafter, *arguments)
        found.append(drafter.seeds.tolist())
    assert found == [
        [5 ^ 90 << 32, 6, 7 ^ 30 << 32, 8],
        [5 ^ 94 << 32, 6, 7 ^ 31 << 32, 8],
    ]
