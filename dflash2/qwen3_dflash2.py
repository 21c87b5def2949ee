# SPDX-License-Identifier: Apache-2.0
"""DFlash2 drafter: Qwen3 layers wrapped in grouped dynamic convolutions, and a candidate selector.

One forward pass turns a block (the anchor and S mask tokens) into S hidden states; the target's LM
head ranks K candidates at each of them, and the selector scores how well a candidate follows the
token chosen before it. The walk over those scores lives with the speculator.

Nothing here is torch-compiled: the fused kernels already are the whole step, and the speculator
captures it in its own CUDA graphs.
"""

from collections.abc import Iterable
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.compilation.decorators import ignore_torch_compile
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.dflash2.context_kv import ContextKVWriter
from vllm.model_executor.layers.dflash2.conv import conv_side0, conv_side1_add_norm
from vllm.model_executor.layers.dflash2.swiglu import silu_and_mul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen2 import Qwen2MLP
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3Attention,
    DFlashQwen3DecoderLayer,
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)
from vllm.model_executor.models.qwen3_dflash2_checkpoint import check_tensors, expected_tensors
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.transformers_utils.configs.dflash2 import DFlash2Config

logger = init_logger(__name__)


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

    def side0(self, x: torch.Tensor, num_query_per_req: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Filter the sublayer's input x [rows, hidden_size]. Returns it and the
        delta [rows, 2 * taps * groups] that `side1_add_norm` needs."""
        delta = self.kernel_projection(x)
        return conv_side0(x, delta, self.base_kernel, num_query_per_req), delta

    def side1_add_norm(
        self,
        y: torch.Tensor,
        delta: torch.Tensor,
        residual: torch.Tensor,
        norm: RMSNorm,
        num_query_per_req: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Filter the sublayer's output y, add the residual and apply the next norm.

        Returns (normed, residual), both [rows, hidden_size].
        """
        return conv_side1_add_norm(
            y, delta, self.base_kernel, residual, norm.weight, norm.variance_epsilon, num_query_per_req
        )


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
        num_query_per_req: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer over `rows` = requests * num_query_per_req rows.

        hidden_states is already normed by this layer's input_layernorm, and is
        returned normed by `next_norm`, so that each convolution's second half,
        the residual add and the norm behind it are one kernel.
        """
        x, delta = self.attention_conv.side0(hidden_states, num_query_per_req)
        y = attention(self.self_attn, positions, x)
        hidden_states, residual = self.attention_conv.side1_add_norm(
            y, delta, residual, self.post_attention_layernorm, num_query_per_req
        )
        x, delta = self.mlp_conv.side0(hidden_states, num_query_per_req)
        return self.mlp_conv.side1_add_norm(swiglu(self.mlp, x), delta, residual, next_norm, num_query_per_req)


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

    # Whether what `_build_fused_kv_buffers` copies out of the layers' weights is missing, or of earlier ones.
    fused_kv_is_stale = True
    context_writer: ContextKVWriter | None = None  # built with them
    _fused_kv_weight: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        config = DFlash2Config.from_hf_config(self.config)
        self.num_query_per_req = 1 + vllm_config.speculative_config.num_speculative_tokens
        self.embedding_scale = config.input_embedding_scale
        self.candidate_selector = self.selector_cls(
            self.config.hidden_size,
            self.config.vocab_size,
            config.selector_rank,
            prefix=maybe_prefix(prefix, "candidate_selector"),
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeds = super().embed_input_ids(input_ids)
        return embeds if self.embedding_scale == 1.0 else embeds * self.embedding_scale

    def _build_fused_kv_buffers(self) -> None:
        self.fused_kv_is_stale = False
        super()._build_fused_kv_buffers()
        self.context_writer = ContextKVWriter(
            self._attn_layers,
            self._k_norm_weights,
            self._rms_norm_eps,
            self._rope_cos_sin_cache,
            self._head_dim,
            self._rope_is_neox,
        )

    def _build_context_kv_buffers(self, layers_attn: list[nn.Module], has_bias: bool) -> None:
        super()._build_context_kv_buffers(layers_attn, has_bias)
        if self._fused_kv_weight.numel() == 0:
            # On a CPU a linear layer packs its weight away; what it makes of the identity is that weight.
            identity = torch.eye(self.config.hidden_size, dtype=self._k_norm_weights.dtype)
            projections = [(attn.qkv_proj, attn.q_size) for attn in layers_attn]
            weights = [proj.quant_method.apply(proj, identity, None).T[q_size:] for proj, q_size in projections]
            self._fused_kv_weight = torch.cat(weights)

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: torch.Tensor | list[torch.Tensor | None] | None = None,
    ) -> None:
        """Write the context's K and V into every layer's cache.

        context_states [n, hidden_size], context_positions [n]; the slots are
        [n] for all layers or one such tensor per layer, and None writes nothing.
        One GEMM and one kernel serve all layers; if the layers' caches
        differ in layout, DFlash's own path writes them one by one.
        """
        if self.fused_kv_is_stale:
            self._build_fused_kv_buffers()
        writer = self.context_writer
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
        """Final-normed states [rows, hidden_size] of whole blocks (rows = requests * num_query_per_req)."""
        residual = self.embed_input_ids(input_ids) if input_embeds is None else input_embeds
        hidden_states = rms_norm(residual, self.layers[0].input_layernorm)
        norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm in zip(self.layers, norms):
            hidden_states, residual = layer(positions, hidden_states, residual, next_norm, self.num_query_per_req)
        return hidden_states


class DFlash2Qwen3ForCausalLM(DFlashQwen3ForCausalLM):
    model_cls = DFlash2Qwen3Model

    # vLLM's loader gives the drafter the target's embedding and LM head, unless these say that the
    # checkpoint has its own, and that one differs. The vocabulary is the target's.
    has_own_embed_tokens = False
    has_own_lm_head = False
    draft_id_to_target_id = None

    # Whether the first weights are there. Until then load_weights takes whole checkpoints, and then any part of one.
    started = False
    # Embedding and LM head that the checkpoint brought; vLLM's loader may then put the target's in their place.
    own_modules: WeakSet[nn.Module] | tuple[()] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        draft_config = vllm_config.speculative_config.draft_model_config
        config = DFlash2Config.from_hf_config(draft_config.hf_config)
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
        """Load a checkpoint; once the engine has started, any part of one.

        Returns the parameters' names: those that were loaded, and those that need no weights.

        Raises:
            ValueError: names each missing, unexpected or misshapen tensor.
        """
        found = dict(weights)
        config = DFlash2Config.from_hf_config(self.config)
        expected = expected_tensors(self.config, config, self.model.fc.input_size)
        own = check_tensors(found, expected, self.config, whole=not self.started)
        if not self.started:
            self.has_own_embed_tokens = "embed_tokens.weight" in own
            self.has_own_lm_head = "lm_head.weight" in own
            self._load_mask_embedding()
        for name, module in (("embed_tokens.weight", self.model.embed_tokens), ("lm_head.weight", self.lm_head)):
            if self.started and name in own and module not in self.own_modules:
                # Loading it would write into the target.
                logger.warning_once("The DFlash2 drafter uses the target's %s; the one given to it is left out.", name)
                del own[name]
        named = {name if name.startswith("lm_head.") else f"model.{name}": w for name, w in own.items()}
        loaded = AutoWeightsLoader(self).load_weights(named.items())
        if self.started:
            # Not rebuilt yet: a reload puts weights in place only when its last part has come.
            self.model.fused_kv_is_stale = True
        else:
            self.model._build_fused_kv_buffers()
        return loaded | {"model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding"}

    def process_weights_after_loading(self) -> None:
        """Called by vLLM when the start's weights are there, also if they are dummies."""
        if self.model.fused_kv_is_stale:
            self.model._build_fused_kv_buffers()
        if not self.started:
            # vLLM's loader now replaces those that are the target's.
            self.own_modules = WeakSet((self.model.embed_tokens, self.lm_head))
        self.started = True

    def _load_mask_embedding(self) -> None:
        """Take the mask token's embedding from the checkpoint's mask_embedding.pt, if there is one."""
        embedding = self._read_mask_embedding()
        if embedding is None:
            return
        if embedding.numel() != self.config.hidden_size:
            raise ValueError(
                f"DFlash2 drafter: mask_embedding.pt has {embedding.numel()} elements, hidden_size is "
                f"{self.config.hidden_size}."
            )
        self.model.mask_embedding.data.copy_(embedding)
        self.model.has_separate_mask_embedding = True


# The functions below call the kernels behind vLLM's layers, which the layers' own forward does not: under
# the default compilation config its norms, activations and RoPE are chains of torch ops that wait for a
# compiler, and nothing here is compiled.


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """`norm` of x [rows, hidden_size], by vLLM's kernel."""
    out = torch.empty_like(x)
    ops.rms_norm(out, x, norm.weight.data, norm.variance_epsilon)
    return out


def attention(attn: DFlashQwen3Attention, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`attn` of x [rows, hidden_size], with the norms and RoPE of Q and K in one
    kernel if vLLM has one."""
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
