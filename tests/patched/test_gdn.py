"""A gated delta net gives every request what it would give it alone, whoever else is in the batch.

The target of DFlash2's largest checkpoint is a hybrid; its delta nets are vLLM's, and on 0.27.1 three
kinds of batch went wrong with speculative decoding, plain decoding being right. Each case here is a
batch of one kind; its name is a function of this file.

Faults tried: fewer drafts than S behind another request, no drafts at all after some were accepted,
a prompt's piece of S + 1 tokens in front, a one-token prompt that is padded, or alone.

Rows of random q, k, v and gates go through vLLM's own order of requests, attention metadata and layer,
as in a serve: a prefill, steps in which some drafts are accepted, and then the batch of the case.
"""

from types import SimpleNamespace as Namespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
from torch.nn import functional
from triton.runtime.interpreter import _implicit_cvt
from vllm.platforms import current_platform

with patch.object(type(current_platform), "is_cpu", lambda self: False):  # a CPU has a convolution of its own
    from vllm.model_executor.layers.mamba.ops import causal_conv1d  # noqa: F401
with patch.object(triton.runtime.driver, "_active", Namespace(get_current_target=lambda: Namespace(backend="cpu"))):
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import gdn_attn
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_states import mamba_hybrid

STEPS = 7
SLOTS = STEPS + 1  # states a request has
HEADS, SIZE, WIDTH = 2, 16, 4  # heads, size of a head's keys and of its values, taps of the convolution
COLUMNS = 3 * HEADS * SIZE
LAYER = "layer"


# --- the same in plain PyTorch ----------------------------------------------------------------


def delta_rule(q, k, v, g, beta, state):
    """Gated delta rule, row by row. q, k, v [rows, heads, size], normalised q and k; g, beta [rows, heads];
    state [heads, value, key]. Returns outputs [rows, heads, size] and the last state."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        change = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + change[:, :, None] * k[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * SIZE**-0.5)
    return torch.stack(outputs), state


def reference(layer, rows):
    """Outputs [rows, heads, size] of a whole sequence of (qkv, a, b) rows from the zero state."""
    qkv, a, b = rows
    padded = functional.pad(qkv.T[None], (WIDTH - 1, 0))
    mixed = functional.silu(functional.conv1d(padded, layer.conv1d.weight, groups=COLUMNS))[0].T
    q, k, v = (part.reshape(-1, HEADS, SIZE) for part in mixed.chunk(3, dim=-1))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = -layer.A_log.exp() * functional.softplus(a + layer.dt_bias)
    return delta_rule(q, k, v, g, b.sigmoid(), torch.zeros(HEADS, SIZE, SIZE))[0]


def chunk_rule(q, k, v, g, beta, initial_state, cu_seqlens, **_):
    """Stands in for the chunked kernel, which the interpreter cannot run."""
    outputs, states = [], []
    for i, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        rows = (x[0, begin:end].float() for x in (q, k, v, g, beta))
        output, state = delta_rule(*rows, initial_state[i])
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs)[None], torch.stack(states)


def interpretable(*args, make=gdn_attn.compute_causal_conv1d_metadata, **kwargs):
    """The convolution's launcher swaps pointers after the interpreter has converted them: convert these first."""
    sizes, *pointers = make(*args, **kwargs)
    for size in sizes.values():
        size |= {name: _implicit_cvt(size[name]) for name in ("batch_ptr", "token_chunk_offset_ptr")}
    return sizes, *pointers


@pytest.fixture(autouse=True)
def interpretable_convolution(monkeypatch):
    monkeypatch.setattr(gdn_attn, "compute_causal_conv1d_metadata", interpretable)


# --- a serve of one layer ---------------------------------------------------------------------


def make_layer(requests):
    """The layer without its projections; its state pool is full of what earlier requests left."""
    layer = gdn.QwenGatedDeltaNetAttention.__new__(gdn.QwenGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    layer.prefix, layer.tp_size, layer.activation = LAYER, 1, "silu"
    layer.num_k_heads = layer.num_v_heads = HEADS
    layer.head_k_dim = layer.head_v_dim = SIZE
    layer.key_dim = layer.value_dim = HEADS * SIZE
    layer.conv1d = Namespace(weight=torch.randn(COLUMNS, 1, WIDTH), bias=None)
    layer.A_log, layer.dt_bias = torch.randn(HEADS) - 2, torch.randn(HEADS)
    layer.enable_packed_recurrent_decode = False
    layer.chunk_gated_delta_rule = chunk_rule
    pages = 1 + requests * SLOTS
    window = WIDTH - 1 + STEPS
    layer.kv_cache = (torch.randn(pages, window, COLUMNS), torch.randn(pages, HEADS, SIZE, SIZE))
    return layer


def make_builder(spec):
    config = Namespace(
        compilation_config=Namespace(cudagraph_mode=CUDAGraphMode.NONE, max_cudagraph_capture_size=None),
        speculative_config=Namespace(num_speculative_tokens=STEPS, parallel_drafting=True),
        scheduler_config=Namespace(max_num_seqs=8),
        cache_config=Namespace(mamba_cache_mode="none"),
        parallel_config=Namespace(decode_context_parallel_size=1),
    )
    with patch.object(gdn, "_resolve_gdn_prefill_backend", lambda config: ("triton", "triton")):
        return gdn_attn.GDNAttentionMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))


class Serve:
    """`requests` is how many there are, `lengths` their prompts'. Rows of request i are self.rows[i]."""

    def __init__(self, lengths):
        torch.manual_seed(0)
        self.lengths, n = lengths, len(lengths)
        self.layer = make_layer(n)
        self.rows = [random_rows(64) for _ in lengths]
        self.done = [0] * n  # rows that count; rejected ones do not
        self.outputs = [torch.zeros(0, HEADS, SIZE) for _ in lengths]
        self.tables = 1 + torch.arange(n * SLOTS, dtype=torch.int32).reshape(n, SLOTS)
        shapes = tuple(tuple(state.shape[1:]) for state in self.layer.kv_cache)
        spec = MambaSpec(block_size=1000, shapes=shapes, dtypes=(torch.float32,) * 2, num_speculative_blocks=STEPS)
        self.groups = Namespace(kv_cache_groups=[Namespace(kv_cache_spec=spec, layer_names=[LAYER])])
        self.builder = make_builder(spec)
        state = mamba_hybrid.MambaHybridModelState.__new__(mamba_hybrid.MambaHybridModelState)
        state.__dict__ |= {
            "num_accepted_tokens_gpu": torch.ones(n, dtype=torch.int32),
            "vllm_config": Namespace(
                num_speculative_tokens=STEPS,
                compilation_config=Namespace(static_forward_context={LAYER: self.layer}),
            ),
            "_align_mode": False,
            "max_model_len": 1000,
            "device": torch.device("cpu"),
        }
        self.state = state

    def step(self, *batch):
        """One batch: (request, good rows, drafts) each, in the scheduler's order.

        `drafts` follow the first good row; all but the first good - 1 of them are rejected. None: a
        piece of the prompt, all of it good.
        """
        counts = {i: good if drafts is None else 1 + drafts for i, good, drafts in batch}
        good = {i: count for i, count, _ in batch}
        drafts = {i: number or 0 for i, _, number in batch}
        order = model_runner.sort_batch_req_ids(counts, STEPS + 1)
        rows = [self.rows_of(i, counts[i], good[i]) for i in order]
        out = torch.zeros(sum(counts.values()), HEADS, SIZE)
        context = Namespace(attn_metadata=self.metadata(order, counts, drafts))
        with patch.object(gdn, "get_forward_context", lambda: context):
            qkv, a, b = (torch.cat(parts) for parts in zip(*rows))
            self.layer._forward_core(qkv, b, a, out)
        for i, part in zip(order, out.split([counts[i] for i in order])):
            self.outputs[i] = torch.cat([self.outputs[i], part[: good[i]]])
            self.done[i] += good[i]
            self.state.num_accepted_tokens_gpu[i] = 1 if self.done[i] <= self.lengths[i] else good[i]

    def rows_of(self, i, count, good):
        """Rows that are due, followed by made-up ones where drafts will be rejected."""
        due = (x[self.done[i] : self.done[i] + good] for x in self.rows[i])
        return [torch.cat(pair) for pair in zip(due, random_rows(count - good))]

    def metadata(self, order, counts, drafts):
        scheduled = np.array([counts[i] for i in order], dtype=np.int32)
        starts = np.concatenate([[0], scheduled.cumsum()]).astype(np.int32)
        done = np.array([self.done[i] for i in order], dtype=np.int32)
        tables = self.tables[order]
        any_drafts = any(drafts.values())
        batch = Namespace(
            num_reqs=len(order),
            num_tokens=int(starts[-1]),
            num_scheduled_tokens=scheduled,
            num_draft_tokens_per_req=np.array([drafts[i] for i in order], dtype=np.int32) if any_drafts else None,
            query_start_loc_np=starts,
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(done + scheduled),
            seq_lens_cpu_upper_bound=torch.from_numpy(done + scheduled),
            is_prefilling_np=done < np.array([self.lengths[i] for i in order]),
            num_computed_tokens_np=done,
            idx_mapping=torch.tensor(order),
            dcp_local_seq_lens=None,
            prompt_lens=None,
        )

        def build(num_reqs, num_tokens, query_start_loc_gpu, query_start_loc_cpu, seq_lens, **more):
            common = CommonAttentionMetadata(
                query_start_loc=query_start_loc_gpu,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=seq_lens,
                num_reqs=num_reqs,
                num_actual_tokens=num_tokens,
                max_query_len=more["max_query_len"],
                max_seq_len=more["max_seq_len"],
                block_table_tensor=tables,
                slot_mapping=None,
            )
            extra = more["model_specific_attn_metadata"].get_extra_attn_kwargs(self.builder, num_reqs)
            return {LAYER: self.builder.build(0, common, **extra)}

        self.state.preprocess_state(batch, (tables,), self.groups, None)
        with patch.object(mamba_hybrid, "build_attn_metadata", build):
            return self.state.prepare_attn(batch, CUDAGraphMode.NONE, (tables,), None, None, self.groups)

    def error(self):
        """Largest difference of any output so far."""
        return max(
            float((out - reference(self.layer, [x[:done] for x in rows])).abs().max())
            for out, rows, done in zip(self.outputs, self.rows, self.done)
        )


def random_rows(count):
    """[qkv, a, b] of `count` rows."""
    return [torch.randn(count, COLUMNS), torch.randn(count, HEADS), torch.randn(count, HEADS)]


# --- cases ------------------------------------------------------------------------------------


def decoding(*lengths):
    """A serve whose requests have been prefilled and have verified two rounds of drafts."""
    serve = Serve(lengths)
    serve.step(*((i, length, None) for i, length in enumerate(lengths)))
    serve.step(*((i, 1 + i % 3, STEPS) for i in range(len(lengths))))
    serve.step(*((i, 3 - i % 3, STEPS) for i in range(len(lengths))))
    return serve


def uniform():
    """Every request has all its drafts: right in any vLLM."""
    return decoding(5, 9, 12)


def one_row_before_fewer_drafts():
    serve = decoding(5, 9, 12)
    serve.step((0, 2, STEPS), (1, 2, STEPS - 1), (2, 1, 0))
    serve.step((0, 3, STEPS), (1, 4, 3), (2, 1, 0))
    serve.step((0, 1, STEPS), (1, 1, 0))
    return serve


def prompt_piece_of_a_drafts_size_first():
    serve = Serve((40, 5, 6))
    serve.step((1, 5, None), (2, 6, None))
    for good in (3, 1, 8):
        serve.step((0, STEPS + 1, None), (1, good, STEPS), (2, 1, STEPS))
    return serve


def short_prompt_before_fewer_drafts():
    serve = Serve((5, 9, 3))
    serve.step((0, 5, None), (1, 9, None))
    serve.step((0, 3, STEPS), (1, 4, STEPS))
    serve.step((0, 1, STEPS), (1, 2, 5), (2, 3, None))
    return serve


def nobody_has_drafts():
    serve = decoding(5, 9, 12)
    serve.step((0, 1, 0), (1, 1, 0), (2, 1, 0))
    serve.step((0, 1, 0), (1, 1, 0), (2, 1, 0))
    serve.step((0, 2, STEPS), (1, 5, STEPS), (2, 1, STEPS))
    return serve


def one_token_prompt_joins_with_padding():
    serve = Serve((5, 9, 1))
    serve.step((0, 5, None), (1, 9, None))
    serve.step((0, 3, STEPS), (1, 4, STEPS), (2, 1, STEPS))
    serve.step((0, 3, STEPS), (1, 4, STEPS), (2, 2, STEPS))
    return serve


def one_token_prompts_alone():
    serve = Serve((1, 1))
    serve.step((0, 1, None), (1, 1, None))
    serve.step((0, 3, STEPS), (1, 4, STEPS))
    return serve


gates = pytest.mark.needs_patch("spec-gates")
undrafted = pytest.mark.needs_patch("undrafted-rows")
fresh = pytest.mark.needs_patch("fresh-states")


@pytest.mark.parametrize(
    "case",
    [
        uniform,
        pytest.param(one_row_before_fewer_drafts, marks=[gates, undrafted]),
        pytest.param(prompt_piece_of_a_drafts_size_first, marks=gates),
        pytest.param(short_prompt_before_fewer_drafts, marks=gates),
        pytest.param(nobody_has_drafts, marks=undrafted),
        pytest.param(one_token_prompt_joins_with_padding, marks=fresh),
        pytest.param(one_token_prompts_alone, marks=fresh),
    ],
    ids=lambda case: case.__name__,
)
@torch.inference_mode()
def test_every_row_is_as_if_alone(case):
    assert case().error() < 1e-5
