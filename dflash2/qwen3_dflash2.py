# SPDX-License-Identifier: Apache-2.0
"""DFlash2 drafter: Qwen3 layers wrapped in grouped dynamic convolutions, and a candidate selector.

One forward pass turns a block (the anchor and S mask tokens) into S hidden states; the target's LM
head ranks K candidates at each of them, and the selector scores how well a candidate follows the
token chosen before it. The walk over those scores lives with the speculator.

Nothing here is torch-compiled: the fused kernels already are the whole step, and the speculator
captures it in its own CUDA graphs.
"""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from vllm import _custom_ops as ops
from vllm.compilation.decorators import ignore_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.dflash2.context_kv import ContextKVWriter
from vllm.model_executor.layers.dflash2.conv import conv_side0, conv_side1_add_norm
from vllm.model_executor.layers.dflash2.swiglu import silu_and_mul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from .qwen2 import Qwen2MLP
from .qwen3_dflash import (
    DFlashQwen3Attention,
    DFlashQwen3DecoderLayer,
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)
from .utils import AutoWeightsLoader, get_draft_quant_config, maybe_prefix


@dataclass(frozen=True)
class DFlash2Config:
    """The keys of `dflash_config` that shape a DFlash2 drafter."""

    mask_token_id: int
    target_layer_ids: list[int]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    @classmethod
    def from_hf_config(cls, hf_config) -> "DFlash2Config":
        """Read the keys from a draft model's config and check them.

        Raises:
            ValueError: a key is missing or cannot be served; names it and its value.
        """
        given = getattr(hf_config, "dflash_config", None) or {}
        if not given.get("use_aux_hidden_state", True):
            raise ValueError(
                "DFlash2 drafter: dflash_config.use_aux_hidden_state must be left out or true, "
                "got False: it drafts from the target's hidden states."
            )
        values = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        for f in fields(cls):
            if f.default is MISSING and f.name not in values:
                raise ValueError(
                    f"DFlash2 drafter: dflash_config.{f.name} is missing from the draft model's config.json."
                )
        config = cls(**values)
        config._check(hf_config.hidden_size, hf_config.vocab_size)
        return config

    def _check(self, hidden_size: int, vocab_size: int) -> None:
        def demand(holds: bool, key: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"DFlash2 drafter: dflash_config.{key} {rule}, got {getattr(self, key)!r}.")

        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            value = getattr(self, key)
            demand(type(value) is int and value > 0, key, "must be a positive integer")
        demand(
            hidden_size % self.conv_group_size == 0,
            "conv_group_size",
            f"must divide hidden_size {hidden_size}",
        )
        demand(
            self.selector_top_k <= vocab_size,
            "selector_top_k",
            f"must be at most vocab_size {vocab_size}",
        )
        demand(
            type(self.mask_token_id) is int and 0 <= self.mask_token_id < vocab_size,
            "mask_token_id",
            f"must be a token id below vocab_size {vocab_size}",
        )
        layers = self.target_layer_ids
        demand(
            isinstance(layers, (list, tuple)) and len(layers) > 0 and all(type(i) is int and i >= 0 for i in layers),
            "target_layer_ids",
            "must be a list of target layers, counted from 0",
        )
        for key in ("input_embedding_scale", "output_multiplier"):
            value = getattr(self, key)
            demand(
                isinstance(value, (int, float)) and 0 < value < float("inf"),
                key,
                "must be a positive number",
            )
        cap = self.final_logit_softcapping
        demand(
            isinstance(cap, (int, float)) and 0 <= cap < float("inf"),
            "final_logit_softcapping",
            "must be a number, 0 for none",
        )


def expected_tensors(hf_config, config: DFlash2Config, fc_input_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a DFlash2 checkpoint holds.

    vLLM's own tracking cannot tell a missing tensor here: it counts a layer
    with a quant_method as loaded, and a lone k_proj hides inside qkv_proj.
    """
    hidden, inter = hf_config.hidden_size, hf_config.intermediate_size
    head_dim = getattr(hf_config, "head_dim", None) or hidden // hf_config.num_attention_heads
    q = hf_config.num_attention_heads * head_dim
    kv = hf_config.num_key_value_heads * head_dim
    taps = config.conv_kernel_size
    groups = hidden // config.conv_group_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
    }
    if getattr(hf_config, "attention_bias", False):
        layer |= {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.bias": (hidden,),
        }
    for conv in ("attention_conv", "mlp_conv"):
        layer[f"{conv}.base_kernel"] = (2, taps, hidden)
        layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    rank, vocab = config.selector_rank, hf_config.vocab_size
    tensors: dict[str, tuple[int, ...]] = {
        f"layers.{i}.{name}": shape for i in range(hf_config.num_hidden_layers) for name, shape in layer.items()
    }
    return tensors | {
        "fc.weight": (hidden, fc_input_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }


def check_tensors(found: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError naming the tensors that are missing, unexpected or misshapen."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not a DFlash2 tensor" for name in found if name not in expected]
    faults += [
        f"{name} has shape {tuple(found[name].shape)}, config.json asks for {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"DFlash2 checkpoint does not fit its config: {shown}.")


# The layers below are vLLM's, the calls into them are not: under the default compilation config its
# norms, activations and RoPE are chains of torch ops that wait for a compiler, and nothing here is
# compiled.


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """`norm` of x [rows, hidden_size], by vLLM's kernel."""
    out = torch.empty_like(x)
    ops.rms_norm(out, x, norm.weight.data, norm.variance_epsilon)
    return out


def attention(attn: DFlashQwen3Attention, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`attn` of x [rows, hidden_size], with the norms and RoPE of Q and K in one
    kernel where vLLM has one."""
    fused = x.is_cuda and attn.head_dim in (64, 128, 256) and x.dtype == torch.bfloat16
    if not (fused and hasattr(torch.ops._C, "fused_qk_norm_rope")):
        return attn(positions=positions, hidden_states=x)
    qkv, _ = attn.qkv_proj(x)
    rope = attn.rotary_emb
    ops.fused_qk_norm_rope(
        qkv,
        attn.num_heads,
        attn.num_kv_heads,
        attn.num_kv_heads,
        attn.head_dim,
        attn.q_norm.variance_epsilon,
        attn.q_norm.weight.data,
        attn.k_norm.weight.data,
        rope._match_cos_sin_cache_dtype(qkv),
        rope.is_neox_style,
        positions,
    )
    q, k, v = qkv.split([attn.q_size, attn.kv_size, attn.kv_size], dim=-1)
    return attn.o_proj(attn.attn(q, k, v))[0]


def swiglu(mlp: Qwen2MLP, x: torch.Tensor) -> torch.Tensor:
    """`mlp` of x [rows, hidden_size]."""
    gate_up, _ = mlp.gate_up_proj(x)
    return mlp.down_proj(silu_and_mul(gate_up))[0]


class DFlash2Conv(nn.Module):
    """Grouped dynamic convolution around one sublayer.

    `kernel_projection` of the sublayer's normed input gives, for every row, what
    is added to `base_kernel` for both sides: before the sublayer and after it.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int, prefix: str):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size), requires_grad=False)
        self.kernel_projection = ReplicatedLinear(
            hidden_size,
            2 * taps * (hidden_size // group_size),
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.kernel_projection",
        )

    def before(self, x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Filter the sublayer's input x [rows, hidden_size]. Returns it and the
        delta [rows, 2 * taps * groups] that `after` needs."""
        delta = self.kernel_projection(x)
        return conv_side0(x, delta, self.base_kernel, block), delta

    def after(
        self,
        y: torch.Tensor,
        delta: torch.Tensor,
        residual: torch.Tensor,
        norm: RMSNorm,
        block: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Filter the sublayer's output y, add the residual and apply the next norm.

        Returns (normed, residual), both [rows, hidden_size].
        """
        return conv_side1_add_norm(y, delta, self.base_kernel, residual, norm.weight, norm.variance_epsilon, block)


class DFlash2DecoderLayer(DFlashQwen3DecoderLayer):
    """A DFlash layer with a convolution around attention and another around the MLP."""

    def __init__(self, vllm_config: VllmConfig, *, config, prefix: str = "", **kwargs):
        super().__init__(vllm_config, config=config, prefix=prefix, **kwargs)
        dflash2 = DFlash2Config.from_hf_config(config)
        shape = (config.hidden_size, dflash2.conv_kernel_size, dflash2.conv_group_size)
        self.attention_conv = DFlash2Conv(*shape, prefix=f"{prefix}.attention_conv")
        self.mlp_conv = DFlash2Conv(*shape, prefix=f"{prefix}.mlp_conv")

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        next_norm: RMSNorm,
        block: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over `rows` = requests * block rows.

        hidden_states is already normed by this layer's input_layernorm, and is
        returned normed by `next_norm`, so that each convolution's second half,
        the residual add and the norm behind it are one kernel.
        """
        x, delta = self.attention_conv.before(hidden_states, block)
        y = attention(self.self_attn, positions, x)
        hidden_states, residual = self.attention_conv.after(y, delta, residual, self.post_attention_layernorm, block)
        x, delta = self.mlp_conv.before(hidden_states, block)
        return self.mlp_conv.after(swiglu(self.mlp, x), delta, residual, next_norm, block)


class DFlash2CandidateSelector(nn.Module):
    """Scores a candidate b at a step whose hidden state is h, after the token p:

    unary(b) + <predecessor_codebook[p] * (hidden_projection h), successor_codebook[b]>
    """

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, prefix: str):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank), requires_grad=False)
        self.hidden_projection = ReplicatedLinear(
            hidden_size,
            rank,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.hidden_projection",
        )


@ignore_torch_compile
class DFlash2Qwen3Model(DFlashQwen3Model):
    decoder_layer_cls = DFlash2DecoderLayer
    selector_cls = DFlash2CandidateSelector

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        config = DFlash2Config.from_hf_config(self.config)
        # A DFlash2 checkpoint has no mask embedding of its own.
        del self.mask_embedding
        self.block = 1 + vllm_config.speculative_config.num_speculative_tokens
        self.embedding_scale = config.input_embedding_scale
        self.candidate_selector = self.selector_cls(
            self.config.hidden_size,
            self.config.vocab_size,
            config.selector_rank,
            prefix=maybe_prefix(prefix, "candidate_selector"),
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeds = self.embed_tokens(input_ids)
        return embeds if self.embedding_scale == 1.0 else embeds * self.embedding_scale

    def _build_fused_kv_buffers(self) -> None:
        super()._build_fused_kv_buffers()
        self.context_writer = ContextKVWriter(
            self._attn_layers,
            self._k_norm_weights,
            self._rms_norm_eps,
            self._rope_cos_sin_cache,
            self._head_dim,
            self._rope_is_neox,
        )

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: torch.Tensor | list[torch.Tensor | None] | None = None,
    ) -> None:
        """Write the context's K and V into every layer's cache.

        context_states [n, hidden_size], context_positions [n]; the slots are
        [n] for all layers or one such tensor a layer, and None writes nothing.
        One GEMM and one kernel serve all layers; where the layers' caches
        differ in layout, DFlash's own path writes them one by one.
        """
        writer = getattr(self, "context_writer", None)
        if writer is None or not writer.can_store(context_slot_mapping):
            super().precompute_and_store_context_kv(context_states, context_positions, context_slot_mapping)
            return
        states = rms_norm(context_states, self.hidden_norm)
        kv_flat = F.linear(states, self._fused_kv_weight, self._fused_kv_bias)
        writer.store(kv_flat, context_positions, context_slot_mapping)

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """K of every layer [layers, n, kv heads, head dim], normed with its own layer's weight."""
        if not all_k.is_cpu:
            return super()._normalize_context_k(all_k)
        # vLLM's CPU kernel, given [layers, head dim] weights, takes the first layer's for all.
        norms = (layer.self_attn.k_norm for layer in self.layers)
        return torch.stack([rms_norm(k, norm) for k, norm in zip(all_k, norms)])

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final-normed states [rows, hidden_size] of whole blocks (rows = requests * block)."""
        residual = self.embed_input_ids(input_ids) if input_embeds is None else input_embeds
        hidden_states = rms_norm(residual, self.layers[0].input_layernorm)
        norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm in zip(self.layers, norms):
            hidden_states, residual = layer(positions, hidden_states, residual, next_norm, self.block)
        return hidden_states


class DFlash2Qwen3ForCausalLM(DFlashQwen3ForCausalLM):
    model_cls = DFlash2Qwen3Model

    # The embedding, the LM head and the vocabulary are the target's: the loader shares the modules.
    has_own_embed_tokens = False
    has_own_lm_head = False
    draft_id_to_target_id = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        draft_config = vllm_config.speculative_config.draft_model_config
        config = DFlash2Config.from_hf_config(draft_config.hf_config)
        check_drafter(vllm_config, config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.top_k = config.selector_top_k
        # LogitsProcessor's own order is cap, then scale; get_top_k_tokens and
        # compute_logits below scale first, as DFlash2 is trained.
        self.logits_processor = LogitsProcessor(
            self.config.vocab_size,
            scale=config.output_multiplier,
            soft_cap=config.final_logit_softcapping or None,
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The target head's logits [rows, vocab_size], scaled, then soft-capped."""
        processor = self.logits_processor
        logits = processor._get_logits(hidden_states, self.lm_head, None)
        if logits is None:
            return None
        logits = logits * processor.scale
        if processor.soft_cap is not None:
            logits = torch.tanh(logits / processor.soft_cap) * processor.soft_cap
        return logits

    def compute_candidates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The K candidates of each row, best first.

        hidden_states [rows, hidden_size] -> ids [rows, K] int64 and unary
        scores [rows, K] float32.
        """
        return self.logits_processor.get_top_k_tokens(self.lm_head, hidden_states, self.top_k)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint whose tensors are exactly the expected ones.

        Returns the loaded parameters' names, the target's two included.

        Raises:
            ValueError: names each missing, unexpected or misshapen tensor.
        """
        found = dict(weights)
        config = DFlash2Config.from_hf_config(self.config)
        check_tensors(found, expected_tensors(self.config, config, self.model.fc.input_size))
        loader = AutoWeightsLoader(self, skip_substrs=["embed_tokens", "lm_head"])
        loaded = loader.load_weights((f"model.{name}", w) for name, w in found.items())
        self.model._build_fused_kv_buffers()
        return loaded | {"model.embed_tokens.weight", "lm_head.weight"}


def check_drafter(vllm_config: VllmConfig, config: DFlash2Config) -> None:
    """Refuse at start-up what would draft garbage or fail inside a kernel later.

    Raises:
        ValueError: drafter and target do not fit each other.
        NotImplementedError: the checkpoint is quantised.
    """
    spec_config = vllm_config.speculative_config
    hf_config = spec_config.draft_model_config.hf_config
    target_vocab = vllm_config.model_config.get_vocab_size()
    for key in ("vocab_size", "draft_vocab_size"):
        vocab = getattr(hf_config, key, None)
        if vocab is not None and vocab != target_vocab:
            raise ValueError(
                f"DFlash2 drafter: {key} {vocab} is not the target's {target_vocab}. "
                "The drafter uses the target's embedding and LM head; use the "
                "drafter that was trained for this target."
            )
    target_hidden = vllm_config.model_config.get_hidden_size()
    if hf_config.hidden_size != target_hidden:
        raise ValueError(
            f"DFlash2 drafter: hidden_size {hf_config.hidden_size} is not the target's "
            f"{target_hidden}. The drafter uses the target's embedding and LM head; use "
            "the drafter that was trained for this target."
        )
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if max(config.target_layer_ids) >= num_layers:
        raise ValueError(
            f"DFlash2 drafter: dflash_config.target_layer_ids {list(config.target_layer_ids)} "
            f"name a layer that the target does not have: it has {num_layers}."
        )
    if get_draft_quant_config(vllm_config) is not None:
        raise NotImplementedError(
            "DFlash2 drafter: quantization_config is set, and a quantised DFlash2 "
            "drafter cannot be served on vLLM 0.27.1; use the bf16 checkpoint."
        )
