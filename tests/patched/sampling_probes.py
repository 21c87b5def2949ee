"""What test_fixes_sampling.py runs, against the patched vLLM and again against the unpatched one.

Prints one line of JSON: {probe: what it found, or {"error": type and text}}. A probe only reports;
the test decides. `python sampling_probes.py PROBE ...` under Triton's interpreter.
"""

from tests.support import interpret  # noqa: I001  before vLLM
import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import numpy as np
import torch
from triton.runtime import interpreter

from tests.support import transcription

TINY = Path(interpret.__file__).parent.parent.parent / "demo/tiny"
V = 16
NAN, INF = float("nan"), float("inf")


class Reached(Exception):
    """Ends a call once the value that a probe is after has been seen."""


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


def keys_of(given, drawn):
    """Which noise drew these tokens: that of the target, or that of a stream 2**30 further on."""
    shared = keyed_tokens(given, given.positions)
    apart = keyed_tokens(given, given.positions + 2**30)
    return {"drawn": drawn, "shared": shared, "apart": apart}


def draft_noise():
    """Keys of the tokens that the common sample_draft draws; positions are of the predecessor."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    given = sampling_inputs(24)
    drafter = Namespace(model=Namespace(compute_logits=lambda hidden: hidden), use_fp64_gumbel=False)
    step = torch.zeros((), dtype=torch.int64)
    arguments = (given.logits, given.positions - 1, given.slots, given.temperature, given.seeds, step, given.cache)
    return keys_of(given, DraftModelSpeculator.sample_draft(drafter, *arguments).tolist())


def draft_noise_dspark():
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
    return keys_of(given, drafter.draft_tokens[:, 0].tolist())


def draft_samplers():
    """Drafters that do not sample with the common sample_draft."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    drafters = (DFlashSpeculator, EagleSpeculator, MTPSpeculator, MultiModuleMTPSpeculator, Gemma4Speculator)
    return [d.__name__ for d in drafters if d.sample_draft is not DraftModelSpeculator.sample_draft]


def captured_slots():
    """Request slots that the draft's graphs are captured with."""
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
    return seen


def reset_slots():
    """Cached proposal and candidate ids of a DFlash2 slot, and the proposal of another drafter's."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    found = {}
    for drafter in (DFlash2Speculator, DraftModelSpeculator):
        concrete = type("Concrete", (drafter,), {})
        concrete.__abstractmethods__ = frozenset()
        state = object.__new__(concrete)
        state.draft_logits = rows(3 * 2).view(3, 2, V).clone()
        state.proposal = SparseProposal(torch.full((3, 2, 4), 7), rows(3 * 2).view(3, 2, V)[..., :4].clone(), V)
        before, scores = state.draft_logits.clone(), state.proposal.scores.clone()
        state.reset_slot(1)
        found[drafter.__name__] = {
            "proposal": torch.softmax(state.draft_logits[1], -1).tolist(),
            "sparse": [state.proposal.ids[1].tolist(), torch.softmax(state.proposal.scores[1], -1).tolist()],
            "others_kept": torch.equal(before[[0, 2]], state.draft_logits[[0, 2]])
            and torch.equal(scores[[0, 2]], state.proposal.scores[[0, 2]]),
        }
        state.proposal = None
        state.draft_logits = None
        state.reset_slot(1)
    return found


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


@contextlib.contextmanager
def gpu_comparisons():
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

    interpreter.ReduceOps.min_max = min_max
    try:
        yield
    finally:
        interpreter.ReduceOps.min_max = original


@gpu_comparisons()
def nan_rows():
    """Largest id emitted where rows of the target are NaN: first, middle, bonus, all; every method."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    found, steps = {}, 2
    for method in ("greedy", "standard", "block"):
        target = rows(5 * (steps + 1)).view(5, steps + 1, V).clone()
        for request in range(3):
            target[request, request] = NAN
        target[3] = NAN
        drafts = target.nan_to_num(-9).argmax(-1)[:, :steps]
        temperature = torch.full((5,), 0.0 if method == "greedy" else 1.0)
        emitted = reject(target, rows(5 * steps, 1).view(5, steps, V), drafts, temperature, method == "block")
        found[method] = max(max(tokens) for tokens in emitted)
    logits, slots, positions = torch.full((2, V), NAN), torch.arange(2, dtype=torch.int32), torch.arange(2)
    found["sampler"] = gumbel_sample(logits, slots, torch.tensor([0.0, 1.0]), positions, positions, False).max().item()
    return found


def nan_proposal():
    """Tokens in place of drafts whose proposal is NaN, beside those drawn from p alone."""
    n = 12
    target = rows(n * 2).view(n, 2, V)
    emitted = reject(target, torch.full((n, 1, V), NAN), torch.zeros(n, 1, dtype=torch.int64), torch.ones(n))
    noise = transcription.gumbel(np.arange(n) + 3, reject_positions(n, 1)[:, 0].numpy(), np.arange(V))
    return {"emitted": emitted, "from p": [[token] for token in (target[:, 0].numpy() + noise).argmax(-1).tolist()]}


def placeholders():
    """Emitted tokens with placeholders from draft 0, 1, 2 on, beside those that are right."""
    n, steps, found = 24, 3, {}
    target = rows(n * (steps + 1)).view(n, steps + 1, V)
    proposal = rows(n * steps, 1).view(n, steps, V)
    drafts = proposal.argmax(-1)
    drafts[torch.arange(steps) >= (torch.arange(n) % (steps + 1))[:, None]] = -1
    temperature = torch.tensor([0.0, 1.0]).repeat(n // 2)
    for method in ("standard", "block"):
        arguments = (target, proposal, drafts, temperature, method == "block")
        found[method] = {"emitted": reject(*arguments), "right": expected_rejection(*arguments)}
    return found


def grammar_end():
    """The grammar is one "a"; token 0 is "a", token 2 ends the text."""
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    tokens = xgrammar.TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(tokens).compile_grammar('root ::= "a"')

    def grammar():
        matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=8)
        return XgrammarGrammar(vocab_size=3, matcher=matcher, ctx=compiled)

    in_one, apart, drafted = grammar(), grammar(), grammar()
    found = {"in one call": in_one.accept_tokens("r", [0, 2, 1, 1])}
    found["apart"] = [apart.accept_tokens("r", [token]) for token in (0, 2, 1, 1)]
    found["ended"] = [in_one.is_terminated(), apart.is_terminated()]
    found["valid drafts"] = drafted.validate_tokens([0, 2, 1, 1])
    found["still open"] = not drafted.matcher.is_terminated() and drafted.accept_tokens("r", [0, 2])
    drafted.rollback(2)
    found["rolled back"] = not drafted.is_terminated() and drafted.accept_tokens("r", [0])
    found["wrong token"] = grammar().accept_tokens("r", [1])
    return found


def seeds_of_drafts():
    """Seeds that EAGLE's and MTP's drafts are drawn with after two rounds that share positions."""
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
    return found


def first_pass(drafter, module, **state):
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
    module.get_uniform_token_count = graph
    if hasattr(module, "prepare_prefill_inputs"):
        module.prepare_prefill_inputs = lambda *_: None
    rejected, unused = torch.tensor([3, 0]), torch.zeros(4)
    try:
        drafter.propose(stub, batch, {}, {}, torch.zeros(16, 4), None, unused, rejected, unused, unused, unused, unused)
    except Reached:
        return seen


def first_passes():
    from vllm.v1.worker.gpu.spec_decode.autoregressive import speculator as eagle
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as mtp

    buffers = {"last_token_indices": None, "current_draft_step": None, "max_num_reqs": 4}
    return [
        first_pass(eagle.AutoRegressiveSpeculator, eagle, **buffers),
        first_pass(mtp.MultiModuleMTPSpeculator, mtp, _prepare_inputs=lambda *_: None),
    ]


def uniform_counts():
    """The graph that batches of 2 x 8 tokens select: decoding, and with a prefill among them."""
    from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count

    return [get_uniform_token_count(2, 16, 8), get_uniform_token_count(2, 16, 8, True)]


def serve():
    """A prompt of S + 1 tokens decodes, a prompt of one token joins it; again without reset_slot."""
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

    steps, batches, dispatch = 7, [], model_runner.dispatch_cg_and_sync_dp

    def recorded(manager, num_reqs, num_tokens, uniform, *rest, **named):
        batches.append([num_reqs, num_tokens, uniform])
        return dispatch(manager, num_reqs, num_tokens, uniform, *rest, **named)

    speculative = {"method": "dflash", "model": str(TINY / "draft"), "num_speculative_tokens": steps}
    engine = LLM(
        str(TINY / "target"),
        speculative_config={**speculative, "draft_sample_method": "probabilistic"},
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=512,
    ).llm_engine
    model_runner.dispatch_cg_and_sync_dp = recorded
    prompt = json.loads((TINY / "prompts.json").read_text())["prompts"][0]
    assert len(prompt) > steps

    def add(name, tokens, length):
        params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, seed=7, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": tokens}, params)

    def joined(name):
        """Tokens of a one-token prompt that joins the running batch."""
        add(name, prompt[:1], 12)
        while True:
            for output in engine.step():
                if output.request_id == name and output.finished:
                    return list(output.outputs[0].token_ids)

    add("first", prompt[: steps + 1], 200)
    for _ in range(4):
        engine.step()
    found = {"batches": list(batches)}
    batches.clear()
    found["joined"], found["joined batches"] = joined("second"), list(batches)
    found["joined again"] = joined("again")
    DFlash2Speculator.reset_slot = lambda self, slot: None
    found["not reset"] = joined("third")
    return found


def main(names):
    found = {}
    for name in names:
        try:
            found[name] = globals()[name]()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
