"""Is sampled output distributed exactly as the target alone would have it?

A small world with known tables stands for target and drafter; around it runs what a serve runs: the
input kernel, the walk with its cached proposal, and vLLM's rejection sampler, over chained rounds, in a
continuous batch. Greedy requests and four temperatures share every batch; requests finish mid-batch and
new ones take their slots; half of those start with padded drafts (token 0, not drawn by anybody); a
third verify fewer drafts than were made, a third have placeholders among them. The joint of each
request's first three tokens is then compared with the product of the target's conditionals, by chi-square.
In the cases "with parameters" four kinds of requests share the batch as well: what PARAMETERS says.

On a GPU, with the patched vLLM on PYTHONPATH:

    python -m tests.support.lossless --gpu --out FOLDER [--samples 400000]

prints one table, writes FOLDER/lossless.json and exits 1 if a case fails. Without --gpu the NumPy
transcription of the kernels runs instead.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tests.support import transcription
from tests.support.transcription import DRAFT_NOISE_OFFSET

V = 16
RANK = 4
TEMPERATURES = (0.0, 0.3, 0.6, 1.0, 1.4)
ENOUGH = 4  # tokens that a request emits before it leaves; fewer rounds cannot see noise that is used again

# Words of two and three tokens, frequent in a world as flat as this one, and one of a single token.
BAD_WORDS = [[7], *([token, (5 * token + 4) % V] for token in range(0, V, 2)), [1, 1, 1], [3, 5, 9], [5, 9, 3]]
PARAMETERS = (
    {"min_p": 0.4, "logit_bias": {2: 1.0, 5: -1.5, 9: 0.7}},
    {"top_k": 9, "top_p": 0.85, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.6, "allowed_token_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14], "bad_words": BAD_WORDS},
    {
        "min_p": 0.1,
        "logit_bias": {0: 0.6, 3: -0.4, 12: 2.0},
        "top_k": 10,
        "top_p": 0.95,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 0.8,
        "allowed_token_ids": [*range(1, V)],
        "bad_words": BAD_WORDS,
    },
)


@dataclass(frozen=True)
class Case:
    """One world and one way of serving it. `fault` names a wrong design to serve it with."""

    method: str
    steps: int
    k: int = 8
    parameters: bool = False
    fault: str = ""

    @property
    def name(self):
        kind = " with parameters" if self.parameters else ""
        return f"{self.method} S={self.steps} K={self.k}{kind}" + (f" {self.fault}" if self.fault else "")


CASES = (
    Case("standard", 3),
    Case("standard", 1, 4),
    Case("standard", 7),
    Case("standard", 15, 5),
    Case("block", 3),
    Case("block", 2, 16),
    Case("block", 7),
    Case("block", 15, 5),
    Case("standard", 3, parameters=True),
    Case("block", 3, parameters=True),
    Case("block", 7, parameters=True),
)
FAULTS = (
    Case("standard", 3, fault="raw cache"),
    Case("standard", 3, fault="shared noise"),
    Case("standard", 3, fault="noise one position on"),
    Case("standard", 3, fault="slot not reset"),
    Case("block", 3, fault="raw cache"),
    Case("block", 3, fault="position-keyed noise"),
    Case("block", 7, fault="position-keyed noise"),
    Case("block", 3, fault="slot not reset"),
    Case("standard", 3, parameters=True, fault="words one place early"),
    Case("block", 3, parameters=True, fault="drafts not penalised"),
)


class World:
    """Tables of target and drafter. Positions count from the first anchor, whose token is FIRST."""

    FIRST = 3

    def __init__(self, case, device="cpu", seed=5):
        random = np.random.default_rng(seed)
        reach = ENOUGH + case.steps + 1

        def normal(*shape):
            return random.normal(size=shape).astype(np.float32)

        self.case = case
        # Flat enough that rejections are common, and proposals for a position much alike in every
        # round: that shows noise which comes back in the next round.
        # target [position, predecessor, V]; drafter's tables [anchor position, anchor token, step, ...]
        target = 0.5 * normal(reach, V, V)
        drafted = np.arange(ENOUGH)[:, None] + 1 + np.arange(case.steps)
        shape = (ENOUGH, V, case.steps, V)
        unary = 0.5 * normal(reach, V)[drafted][:, None] + 0.1 * normal(*shape)
        hidden = normal(reach, RANK)[drafted][:, None] + 0.1 * normal(*shape[:3], RANK)
        ids = np.argsort(-unary, -1)[..., : case.k]
        tables = {
            "target": target,
            "ids": np.ascontiguousarray(ids),
            "unary": np.take_along_axis(unary, ids, -1),
            "hidden": hidden,
            "predecessor": 0.4 * normal(V, RANK),
            "successor": 0.4 * normal(V, RANK),
        }
        for name, table in tables.items():
            setattr(self, name, torch.from_numpy(np.ascontiguousarray(table)).to(device))

    def conditionals(self, temperature, given):
        """Probabilities of the first, second and third token after all that may precede them: float64.

        [1, V], [V, V] and [V * V, V]; given: keyword arguments of SamplingParams.
        """
        target = self.target.double().cpu().numpy()
        first, second = np.divmod(np.arange(V * V), V)
        rows = (target[1, [self.FIRST]], target[2], target[3, second])
        histories = (np.zeros((1, 0), int), np.arange(V)[:, None], np.stack([first, second], 1))
        for logits, history in zip(rows, histories):
            n, length = history.shape
            room = np.pad(history, ((0, 0), (0, 1)))
            arguments = (room, np.full(n, length), [self.FIRST], given, np.full(n, temperature))
            yield np.exp(transcription.log_softmax(transcription.process(logits, *arguments)))

    def expected(self, temperature, given):
        """Joint probabilities [V, V, V] of the first three tokens, float64."""
        first, second, third = self.conditionals(temperature, given)
        return first[0][:, None, None] * second[:, :, None] * third.reshape(V, V, V)


class Slots:
    """What a runner keeps of its requests: one entry a slot, in tensors on `device`."""

    def __init__(self, count, case, device):
        self.count, self.case, self.device = count, case, device
        self.sample = torch.full((count,), -1, dtype=torch.int64, device=device)
        for name in ("seed", "start", "rel", "token", "emitted", "rounds"):
            setattr(self, name, torch.zeros(count, dtype=torch.int64, device=device))
        self.temperature = torch.zeros(count, dtype=torch.float32, device=device)
        self.drafted = torch.zeros(count, dtype=torch.bool, device=device)
        self.drafts = torch.zeros(count, case.steps, dtype=torch.int64, device=device)
        # The proposal, as K ids and scores, and as rows of the vocabulary for DenseKernels.
        self.ids = torch.zeros(count, case.steps, case.k, dtype=torch.int64, device=device)
        self.scores = torch.full(self.ids.shape, float("-inf"), dtype=torch.float32, device=device)
        self.output = torch.zeros(count, ENOUGH + case.steps + 1, dtype=torch.int64, device=device)
        shape = (count, case.steps, V)
        self.draft_logits = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)

    def take(self, slots, samples):
        """New requests `samples` take `slots`; everything about one follows from its number."""
        self.sample[slots] = samples
        kind = samples % len(TEMPERATURES)
        self.temperature[slots] = torch.tensor(TEMPERATURES, device=self.device)[kind]
        # As users choose seeds, and as vLLM does for those who do not.
        wide = (samples * -7046029254386353131) ^ (samples << 29)
        self.seed[slots] = torch.where(samples % 3 == 0, samples, wide)
        self.start[slots] = 1 + samples * 7919 % 30011
        self.token[slots] = World.FIRST
        for name in ("rel", "emitted", "rounds"):
            getattr(self, name)[slots] = 0
        self.drafted[slots] = samples // len(TEMPERATURES) % 2 == 0
        self.drafts[slots] = 0
        if self.case.fault != "slot not reset":
            # As reset_slot, many at a time.
            self.draft_logits[slots] = self.scores[slots] = float("-inf")
            self.draft_logits[slots, :, 0] = self.scores[slots, :, 0] = 0.0
            self.ids[slots] = 0

    def kinds(self, slots):
        """Which of PARAMETERS the requests in `slots` have."""
        return self.sample[slots] // len(TEMPERATURES) % len(PARAMETERS)

    def anchors(self, slots):
        return self.start[slots] + self.rel[slots]


def as_rows(ids, scores):
    """The scores [n, S, K] of a sparse proposal, in rows of the vocabulary [n, S, V] that are -inf elsewhere."""
    rows = torch.full((*ids.shape[:2], V), float("-inf"), device=ids.device)
    return rows.scatter_reduce_(2, ids, scores, "amax")


class Transcribed:
    """Drafting and verification through the NumPy transcription, on the CPU."""

    def __init__(self, world, slots):
        self.world, self.slots = world, slots

    def draft(self, live):
        w, s, steps = self.world, self.slots, self.slots.case.steps
        rel, token, anchor = s.rel[live], s.token[live], s.anchors(live)
        seed, shift = draft_key(s, live, anchor)
        ids = w.ids[rel, token]
        tokens, scores = transcription.walk(
            ids.numpy(),
            w.unary[rel, token].numpy(),
            w.hidden[rel, token].numpy(),
            w.predecessor.numpy(),
            w.successor.numpy(),
            token.numpy(),
            seed.numpy(),
            (anchor[:, None] + 1 + shift + torch.arange(steps)).numpy(),
            s.temperature[live].numpy(),
        )
        s.drafts[live] = torch.from_numpy(tokens)
        s.ids[live], s.scores[live] = ids, torch.from_numpy(scores)

    def verify(self, live, counts, drafts, target):
        s = self.slots
        sampled, number = transcription.verify(
            self.processed(live, drafts, target).numpy(),
            as_rows(s.ids[live], s.scores[live]).numpy(),
            drafts.numpy(),
            counts.numpy(),
            (s.anchors(live)[:, None] + torch.arange(s.case.steps + 1)).numpy(),
            verify_seed(s, live).numpy(),
            s.temperature[live].numpy(),
            s.case.method == "block",
        )
        return torch.from_numpy(sampled), torch.from_numpy(number)

    def processed(self, live, drafts, target):
        s, steps = self.slots, self.slots.case.steps
        if not s.case.parameters:
            return divided(target, s.temperature[live])
        processed = target.clone()
        emitted = s.emitted[live, None]
        for row in range(steps + 1):
            history = torch.cat([s.output[live], torch.zeros_like(drafts)], 1)
            history.scatter_(1, emitted + torch.arange(steps), drafts)
            length = s.emitted[live] + row
            for kind, given in enumerate(PARAMETERS):
                here = s.kinds(live) == kind
                parts = (
                    target[here, row],
                    history[here],
                    length[here],
                    s.emitted[live][here],
                    s.temperature[live][here],
                )
                processed[here, row] = torch.from_numpy(self.row(given, *(part.numpy() for part in parts)))
        return processed

    def row(self, given, logits, history, length, emitted, temperature):
        wrong = {}
        if self.slots.case.fault == "drafts not penalised":
            wrong["penalised"] = emitted
        if self.slots.case.fault == "words one place early":
            # The token before the first draft is read in its place, and so on.
            before = np.pad(history, ((0, 0), (1, 0)), constant_values=World.FIRST)[:, :-1]
            wrong["words_in"] = np.where(np.arange(history.shape[1]) >= emitted[:, None], before, history)
        return transcription.process(logits, history, length, [World.FIRST], given, temperature, **wrong)


class Kernels:
    """Drafting and verification through the kernels of the patched vLLM, on any device."""

    dense = False

    def __init__(self, world, slots):
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        self.world, self.slots = world, slots
        rows = slots.count * (slots.case.steps + 1)
        self.buffers = InputBuffers(slots.count, rows, slots.device)
        self.samples = [torch.zeros(rows, dtype=torch.int64, device=slots.device) for _ in range(2)]
        self.sample_slots = torch.zeros(rows, dtype=torch.int32, device=slots.device)
        self.scratch = [torch.zeros(rows, dtype=torch.int64, device=slots.device) for _ in range(3)]
        self.temperature = torch.zeros_like(slots.temperature)
        self.seeds = torch.zeros_like(slots.seed)
        self.sampler = ParameterSampler(slots) if slots.case.parameters else None

    def prepare(self, live):
        """The draft's inputs, by the kernel that a serve uses: every request verified one token."""
        from types import SimpleNamespace

        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

        s, n, steps = self.slots, len(live), self.slots.case.steps
        ones = torch.ones(n, dtype=torch.int32, device=s.device)
        batch = SimpleNamespace(
            num_reqs=n,
            num_scheduled_tokens=np.ones(n, np.int32),
            positions=s.anchors(live) - 1,
            query_start_loc=torch.arange(n + 1, dtype=torch.int32, device=s.device),
            idx_mapping=live.to(torch.int32),
        )
        prepare_dflash_inputs(
            self.buffers,
            *self.scratch,
            *self.samples,
            self.sample_slots,
            self.temperature,
            self.seeds,
            batch,
            ones,
            ones * 0,
            s.token,
            s.token.to(torch.int32),
            s.temperature,
            s.seed,
            torch.ones(n, 1, dtype=torch.int32, device=s.device),
            2**20,
            0,
            steps + 1,
            steps,
            n,
            n * (steps + 1),
            2**20,
        )

    def draft(self, live):
        from vllm.v1.worker.gpu.spec_decode.dflash2.walk import walk

        w, s, n, steps = self.world, self.slots, len(live), self.slots.case.steps
        self.prepare(live)
        seeds, shift = self.seeds, 0
        if s.case.fault:
            seeds = torch.zeros_like(s.seed)
            seeds[live], shift = draft_key(s, live, s.anchors(live))
        rel, token = s.rel[live], s.token[live]
        drafts = torch.empty(n, steps, dtype=torch.int64, device=s.device)
        walk(
            drafts,
            w.ids[rel, token].view(n * steps, -1),
            w.unary[rel, token].view(n * steps, -1),
            w.hidden[rel, token].view(n * steps, -1),
            w.predecessor,
            w.successor,
            self.buffers.input_ids[: n * (steps + 1) : steps + 1],
            self.sample_slots[: n * steps],
            self.samples[1][: n * steps] + shift,
            self.temperature,
            seeds,
            self.proposal(),
            s.draft_logits if self.dense else None,
        )
        s.drafts[live] = drafts

    def proposal(self):
        from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal

        return SparseProposal(self.slots.ids, self.slots.scores, V)

    def verify(self, live, counts, drafts, target):
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

        s, steps = self.slots, self.slots.case.steps
        within = torch.arange(steps + 1, device=s.device)
        kept = within <= counts[:, None]
        tokens = torch.cat([s.token[live][:, None], drafts], 1)
        seeds = torch.zeros_like(s.seed)
        seeds[live] = verify_seed(s, live)
        if self.sampler:
            processed = self.sampler.processed(live, kept, tokens, target)
        else:
            processed = divided(target, s.temperature[live])[kept]
        cached = s.draft_logits if self.dense else self.proposal()
        # As RejectionSampler has it.
        sampled, number = getattr(cached, "rejection_sample", rejection_sample)(
            processed,
            cached,
            tokens[kept],
            torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0)).to(torch.int32),
            (s.anchors(live)[:, None] + within)[kept],
            live.to(torch.int32),
            live[:, None].expand_as(kept)[kept].to(torch.int32),
            within.expand_as(kept)[kept].to(torch.int32),
            s.temperature,
            seeds,
            steps,
            use_block_verification=s.case.method == "block",
        )
        return sampled, number.long()


class DenseKernels(Kernels):
    """With the proposal as rows of the vocabulary, as DFLASH2_DENSE_PROPOSAL=1 has it."""

    dense = True


class ParameterSampler:
    """vLLM's sampler, whose slots have the parameters of the requests that are in them."""

    def __init__(self, slots):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        self.slots, device = slots, slots.device
        self.states = RequestState(slots.count, 64, 64, slots.case.steps, V, device)
        self.sampler = Sampler(slots.count, V, device, self.states)
        sampler = self.sampler
        parts = (sampler.sampling_states, sampler.penalties_state, sampler.logit_bias_state, sampler.bad_words_state)
        for kind, given in enumerate(PARAMETERS):
            params = SamplingParams(**{key: value for key, value in given.items() if key != "bad_words"})
            params._bad_words_token_ids = given.get("bad_words")
            self.states.add_request(str(kind), 1, [World.FIRST], 0, 32)
            self.sampler.add_request(self.states.req_id_to_index[str(kind)], 1, params)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        first = torch.tensor([self.states.req_id_to_index[str(kind)] for kind in range(len(PARAMETERS))], device=device)
        # What each kind's slot holds; then every slot is of the kind that its request asks for.
        self.tensors = []
        for part in parts:
            for held in vars(part).values():
                if torch.is_tensor(getattr(held, "gpu", None)):
                    held.gpu = held.gpu.to(device, copy=True)
                    self.tensors.append((held.gpu, held.gpu[first].clone()))
        # What is looked at on the host: whether anybody asks for something.
        sampling = self.sampler.sampling_states
        for held in (sampling.temperature, sampling.top_p, sampling.min_p):
            held.np[:] = 0.5
        sampling.top_k.np[:] = 1
        self.sampler.bad_words_state.num_bad_words.np[:] = len(BAD_WORDS)
        self.sampler.penalties_state.use_penalty[:] = True
        self.sampler.logit_bias_state.use_logit_bias[:] = True
        self.sampler.penalties_state.prompt_bin_mask[:] = 1 << World.FIRST
        sampling.temperature.gpu = slots.temperature

    def processed(self, live, kept, tokens, target):
        s, case = self.slots, self.slots.case
        states, penalties = self.states, self.sampler.penalties_state
        for tensor, of_kinds in self.tensors:
            tensor[live] = of_kinds[s.kinds(live)]
        states.total_len.gpu[live] = (1 + s.emitted[live]).to(torch.int32)
        states.prompt_len.gpu = torch.ones_like(states.total_len.gpu)
        states.all_token_ids.gpu[live, 0] = World.FIRST
        width = s.output.shape[1]
        states.all_token_ids.gpu[live, 1 : 1 + width] = s.output[live].to(torch.int32)
        emitted = torch.arange(width, device=s.device) < s.emitted[live, None]
        counts = torch.zeros(len(live), V, dtype=torch.int32, device=s.device)
        penalties.output_bin_counts[live] = counts.scatter_add_(1, s.output[live], emitted.to(torch.int32))
        within = torch.arange(kept.shape[1], device=s.device).expand_as(kept)[kept].to(torch.int32)
        slots = live[:, None].expand_as(kept)[kept].to(torch.int32)
        if case.fault == "words one place early":
            apply_words = type(self.sampler.bad_words_state).apply_bad_words
            self.sampler.bad_words_state.apply_bad_words = lambda *arguments: apply_words(
                self.sampler.bad_words_state, *arguments[:3], arguments[3].roll(1), arguments[4]
            )
        if case.fault == "drafts not penalised":
            apply_penalties = type(penalties).apply_penalties
            penalties.apply_penalties = lambda *arguments: apply_penalties(
                penalties, *arguments[:4], torch.zeros_like(arguments[4])
            )
        positions = (s.anchors(live)[:, None] + torch.arange(kept.shape[1], device=s.device))[kept]
        return self.sampler.apply_sampling_params(
            # int32, as input_ids of an engine are.
            target[kept],
            slots,
            live.cpu().numpy(),
            positions,
            tokens[kept].to(torch.int32),
            within,
        )


def divided(target, temperature):
    """[n, S + 1, V] logits over T."""
    return target / torch.where(temperature == 0, 1.0, temperature)[:, None, None]


def draft_key(slots, live, anchor):
    """(seeds, shift of the positions) that key the walk's noise, right or wrong as the case says."""
    seed, fault = slots.seed[live], slots.case.fault
    if fault == "shared noise":
        return seed, -DRAFT_NOISE_OFFSET - 1
    if fault == "noise one position on":
        return seed, -DRAFT_NOISE_OFFSET
    if fault == "position-keyed noise":
        return seed, 0
    return seed ^ (anchor << 32), 0


def verify_seed(slots, live):
    """The seeds for verification. Mixing the anchor in beforehand cancels what the kernel mixes in."""
    seed = slots.seed[live]
    if slots.case.fault == "position-keyed noise":
        return seed ^ (slots.anchors(live) << 32)
    return seed


def schedule(slots, live):
    """(counts [n], drafts [n, S]) to verify this round.

    A third of the requests has all of its drafts verified, a third any number of them, and a third
    has placeholders (-1) from any draft on, as where a grammar cut the drafts short.
    """
    steps, kind, drafts = slots.case.steps, slots.sample[live] % 3, slots.drafts[live]
    some = (slots.sample[live] * 31 + slots.rounds[live] * 17) % (steps + 1)
    cut = (kind == 2)[:, None] & (torch.arange(steps, device=slots.device) >= some[:, None])
    return torch.where(kind == 1, some, steps), torch.where(cut, -1, drafts)


def target_logits(world, slots, live, drafts):
    """[n, S + 1, V] logits of the tokens after the anchor and after each draft."""
    steps = slots.case.steps
    tokens = torch.cat([slots.token[live][:, None], drafts.clamp(min=0)], 1)
    at = slots.rel[live][:, None] + 1 + torch.arange(steps + 1, device=slots.device)
    return world.target[at, tokens]


def record(slots, live, sampled, number, output):
    """Append what a round emitted; `output` [samples, 3] keeps each request's first three tokens."""
    for i in range(min(3, sampled.shape[1])):
        at = slots.emitted[live] + i
        new = (i < number) & (at < 3)
        output[slots.sample[live][new], at[new]] = sampled[new, i]
    for i in range(sampled.shape[1]):
        new = i < number
        slots.output[live[new], slots.emitted[live[new]] + i] = sampled[new, i]
    slots.token[live] = sampled.gather(1, number[:, None] - 1)[:, 0]
    for name, grown in (("rel", number), ("emitted", number), ("rounds", 1)):
        getattr(slots, name)[live] += grown
    slots.drafted[live] = True


def first_tokens(case, samples, backend=Transcribed, width=2048, device="cpu", order=0):
    """Serve `samples` requests, `width` at a time. Returns their first three tokens, [samples, 3].

    `order` shuffles the batch anew: what a request emits must not depend on it, nor on `width`.
    """
    world, slots = World(case, device), Slots(width, case, device)
    engine = backend(world, slots)
    random = torch.Generator(device).manual_seed(order)
    output = torch.full((samples, 3), -1, dtype=torch.int64, device=device)
    queued = min(width, samples)
    slots.take(torch.arange(queued, device=device), torch.arange(queued, device=device))
    while True:
        live = torch.randperm(width, generator=random, device=device)
        live = live[slots.sample[live] >= 0]
        if not len(live):
            return output
        fresh = live[slots.drafted[live]]
        if len(fresh):
            engine.draft(fresh)
        if case.fault == "raw cache":
            raw = torch.where(slots.temperature == 0, 1.0, slots.temperature)[fresh, None, None]
            slots.draft_logits[fresh] *= raw
            slots.scores[fresh] *= raw
        counts, drafts = schedule(slots, live)
        sampled, number = engine.verify(live, counts, drafts, target_logits(world, slots, live, drafts))
        record(slots, live, sampled, number, output)
        done = live[slots.emitted[live] >= ENOUGH]
        slots.sample[done] = -1
        free = done[: samples - queued]
        slots.take(free, torch.arange(queued, queued + len(free), device=device))
        queued += len(free)


def chi_square(counts, expected):
    """p of `counts` under probabilities `expected`, both flat; cells expecting under five are pooled."""
    expected = expected / expected.sum() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        order = np.argmin(expected[:-1])
        observed[order] += observed[-1]
        expected[order] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2)).item()


def kinds_of(case):
    return PARAMETERS if case.parameters else ({},)


def greedy_path(world, given):
    first, second, third = world.conditionals(0, given)
    a = int(first[0].argmax())
    b = int(second[a].argmax())
    return [a, b, int(third[a * V + b].argmax())]


def evaluate(case, output):
    """{temperature: p}; greedy requests have p 1 if all of them took the only right path, else 0.

    Where requests have parameters, p is the least of all kinds'. There are fewer of each: pairs of tokens are counted.
    """
    world, result, output = World(case), {}, output.cpu()
    assert (output >= 0).all() and (output < V).all(), f"{case.name}: token ids outside the vocabulary"
    for i, temperature in enumerate(TEMPERATURES):
        ps = []
        for kind, given in enumerate(kinds_of(case)):
            mine = output[i :: len(TEMPERATURES)][kind :: len(kinds_of(case))]
            if temperature == 0:
                ps.append(float((mine == torch.tensor(greedy_path(world, given))).all()))
                continue
            cells = torch.bincount((mine[:, 0] * V + mine[:, 1]) * V + mine[:, 2], minlength=V**3).numpy()
            expected = world.expected(temperature, given)
            if case.parameters:
                cells = cells.reshape(V, V, V)
                ps += [chi_square(cells.sum(axis).ravel(), expected.sum(axis).ravel()) for axis in (0, 2)]
            else:
                ps.append(chi_square(cells, expected.ravel()))
        result[temperature] = min(ps)
    return result


def run(case, samples, backend=Transcribed, width=2048, device="cpu"):
    """{temperature: p} over `samples` requests at each temperature."""
    return evaluate(case, first_tokens(case, samples * len(TEMPERATURES), backend, width, device))


def verdict(case, result):
    """A right design passes at every temperature; a wrong one is caught at one of them at least."""
    if case.fault:
        return min(result.values()) < 1e-10
    return min(result.values()) > 1e-4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="run the kernels of the vLLM on PYTHONPATH")
    parser.add_argument("--out", type=Path, help="folder for lossless.json")
    parser.add_argument("--dense", action="store_true", help="with --gpu: the proposal as rows of the vocabulary")
    parser.add_argument("--samples", type=int, help="requests at each temperature (GPU 400000, CPU 20000)")
    given = parser.parse_args()
    if given.gpu and not torch.cuda.is_available():
        raise SystemExit("error: --gpu needs a GPU that torch can see")
    kernels = DenseKernels if given.dense else Kernels
    backend, width, device = (kernels, 65536, "cuda") if given.gpu else (Transcribed, 2048, "cpu")
    samples = given.samples or (400_000 if given.gpu else 20_000)
    report, good = [], True
    print(
        f"{samples} samples a temperature\n{'case':40}" + "".join(f"{f'T={t}':>11}" for t in TEMPERATURES), "  verdict"
    )
    for case in CASES + FAULTS:
        began = time.perf_counter()
        result = run(case, samples, backend, width, device)
        passed = verdict(case, result)
        good &= passed
        word = ("caught" if case.fault else "exact") if passed else "FAILED"
        print(f"{case.name:40}" + "".join(f"{p:11.2g}" for p in result.values()), "  " + word, flush=True)
        seconds = round(time.perf_counter() - began, 1)
        report.append({**asdict(case), "samples": samples, "p": result, "passed": passed, "seconds": seconds})
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "lossless.json").write_text(json.dumps(report, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
