# SPDX-License-Identifier: Apache-2.0
"""A DFlash2 drafter's configuration: read from each form it is published in, and refused by key.

`read_config` gives all forms one shape, that of the published config.json, so that nothing behind it
has to know the others. What it and the checks refuse is refused before any weight is loaded.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, Qwen3Config
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

logger = init_logger(__name__)

ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel")

# Names that other writers of configs give to target_layer_ids. They count the embedding as layer 0.
AUX_LAYER_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")

# Keys of the speculators format that say nothing about the layers.
SPECULATORS_KEYS = (
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "sliding_window_non_causal",
    "auto_map",
)

# transformers would take the sizes of another model for these.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)

INTEGERS = (
    *REQUIRED,
    "draft_vocab_size",
    "target_hidden_size",
    "head_dim",
    "max_position_embeddings",
    "max_window_layers",
    "sliding_window",
)


class DrafterError(ValueError):
    """A drafter that cannot be served: names the key and its value."""

    def __init__(self, text: str):
        super().__init__(f"DFlash2 drafter: {text}")


@dataclass(frozen=True)
class DFlash2Config:
    """The keys of `dflash_config` that shape a DFlash2 drafter."""

    mask_token_id: int
    target_layer_ids: list[int]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    block_size: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    @classmethod
    def from_hf_config(cls, hf_config: PretrainedConfig) -> "DFlash2Config":
        """Read the keys from a draft model's config and check them.

        Raises:
            ValueError: a key is missing or cannot be served; names it and its value.
        """
        given = getattr(hf_config, "dflash_config", None) or {}
        if not given.get("use_aux_hidden_state", True):
            raise DrafterError(
                "dflash_config.use_aux_hidden_state must be left out or true, got False: it drafts from the target's "
                "hidden states."
            )
        values = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        for f in fields(cls):
            if f.default is MISSING and f.name not in values:
                raise DrafterError(f"dflash_config.{f.name} is missing from the draft model's config.json.")
        config = cls(**values)
        config._check(hf_config.hidden_size, hf_config.vocab_size)
        return config

    def _check(self, hidden_size: int, vocab_size: int) -> None:
        def demand(holds: bool, key: str, rule: str) -> None:
            if not holds:
                raise DrafterError(f"dflash_config.{key} {rule}, got {getattr(self, key)!r}.")

        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            value = getattr(self, key)
            demand(type(value) is int and value > 0, key, "must be a positive integer")
        demand(hidden_size % self.conv_group_size == 0, "conv_group_size", f"must divide hidden_size {hidden_size}")
        demand(self.selector_top_k <= vocab_size, "selector_top_k", f"must be at most vocab_size {vocab_size}")
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
        # The target hands its layers over in its own order, each once.
        demand(list(layers) == sorted(set(layers)), "target_layer_ids", "must be in increasing order")
        demand(
            self.block_size is None or (type(self.block_size) is int and self.block_size >= 2),
            "block_size",
            "must be an integer of at least 2, the anchor and one draft token",
        )
        for key in ("input_embedding_scale", "output_multiplier"):
            value = getattr(self, key)
            demand(
                type(value) in (int, float) and 0 < value < float("inf"),
                key,
                "must be a positive number",
            )
        cap = self.final_logit_softcapping
        demand(
            type(cap) in (int, float) and 0 <= cap < float("inf"),
            "final_logit_softcapping",
            "must be a number, 0 for none",
        )


def is_dflash2(config: Mapping[str, Any] | PretrainedConfig | None) -> bool:
    """Whether a config.json, or what was read from one, is a DFlash2 drafter's."""

    def value(key: str):
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    architectures = value("architectures") or ()
    if not architectures and "selector_rank" in (value("dflash_config") or ()):
        return True
    named = (*architectures, value("speculators_model_type"), value("model_type"))
    return any(str(name).lower().startswith("dflash2") for name in named)


def read_config(given: Mapping[str, Any]) -> tuple[dict[str, Any], Qwen3Config]:
    """A drafter's config.json in its published form, as a dict and as the config vLLM works with.

    Raises:
        ValueError: names the key that cannot be served, and its value.
    """
    published = published_form(given)
    hf_config = Qwen3Config(**published)
    DFlash2Config.from_hf_config(hf_config)
    return published, hf_config


def published_form(given: Mapping[str, Any]) -> dict[str, Any]:
    """The published form of a drafter's config.json that may be written in another.

    Reads keys of `dflash_config` at the top level, where they are not in it; layers counted from the
    embedding; the format of speculators; whole numbers written as 2.0 or "2"; and a model_type that is
    missing or "dflash2".
    """
    config = _flattened(given) if "speculators_model_type" in given else dict(given)
    if "compression_config" in config:
        config.setdefault("quantization_config", config.pop("compression_config"))
    dflash = _drafter_keys(config)
    config |= {"dflash_config": dflash, "architectures": _architectures(given), "model_type": _model_type(config)}
    for key in INTEGERS:
        if config.get(key) is not None:
            config[key] = _integer(key, config[key])
    for key in REQUIRED:
        if key not in config:
            raise DrafterError(f"{key} is missing from the draft model's config.json.")
    _refuse_what_is_not_served(config, dflash)
    _settle_windows(config, dflash)
    return config


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the format of speculators, its layers' keys at the top level."""
    kind = given["speculators_model_type"]
    if kind != "dflash2":
        raise DrafterError(f"speculators_model_type {kind!r} cannot be served on vLLM 0.27.1; 'dflash2' can.")
    layers = given.get("transformer_layer_config") or {}
    if not isinstance(layers, Mapping):
        raise DrafterError(f"transformer_layer_config must be an object, got {layers!r}.")
    # Its writer may leave out what equals transformers' defaults.
    config = {key: value for key, value in Qwen3Config().to_dict().items() if key in INTEGERS} if layers else {}
    if layers.get("use_sliding_window"):
        config["sliding_window"] = 4096
    config |= dict(layers)
    config |= {key: value for key, value in given.items() if key not in (*SPECULATORS_KEYS, "model_type")}
    if given.get("sliding_window_non_causal", True) and config.get("is_causal") is None:
        config["is_causal"] = False
    return config


def _drafter_keys(config: dict[str, Any]) -> dict[str, Any]:
    """`dflash_config` with the keys that the top level has and it has not; takes those out of config."""
    dflash = config.pop("dflash_config", None) or {}
    if not isinstance(dflash, Mapping):
        raise DrafterError(f"dflash_config must be an object, got {dflash!r}.")
    dflash = dict(dflash)
    for key in (*(f.name for f in fields(DFlash2Config)), *AUX_LAYER_KEYS, "sample_from_anchor", "attention_mode"):
        value = config.pop(key, None)
        if dflash.get(key) is None and value is not None:
            dflash[key] = value
    for key in (
        "mask_token_id",
        "block_size",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    ):
        if dflash.get(key) is not None:
            dflash[key] = _integer(f"dflash_config.{key}", dflash[key])
    for key in ("target_layer_ids", *AUX_LAYER_KEYS):
        if isinstance(dflash.get(key), list):
            dflash[key] = [_integer(f"dflash_config.{key}", i) for i in dflash[key]]
    for key in AUX_LAYER_KEYS:
        if (aux := dflash.pop(key, None)) is None:
            continue
        if not isinstance(aux, list) or not aux or min(aux) < 1:
            raise DrafterError(f"{key} must be a list of target layers, counted from 1, got {aux!r}.")
        layers = [i - 1 for i in aux]
        if dflash.setdefault("target_layer_ids", layers) != layers:
            raise DrafterError(
                f"{key} {aux} and target_layer_ids {dflash['target_layer_ids']} are not the same layers: "
                "the first counts from 1, the second from 0. Leave one of them out."
            )
    return dflash


def _integer(key: str, value: Any) -> int:
    """A whole number, also when it is written as 2.0 or "2"."""
    if type(value) is float and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)
    if type(value) is not int:
        raise DrafterError(f"{key} must be an integer, got {value!r}.")
    return value


def _architectures(given: Mapping[str, Any]) -> list[str]:
    named = given.get("architectures")
    if not named and "speculators_model_type" in given:
        named = [ARCHITECTURES[0]]
    if not named:
        raise DrafterError(
            f"architectures is missing from the draft model's config.json; it is [{ARCHITECTURES[0]!r}]."
        )
    if named[0] not in ARCHITECTURES:
        raise DrafterError(
            f"architectures {named} cannot be served on vLLM 0.27.1; {' and '.join(map(repr, ARCHITECTURES))} can."
        )
    return list(named)


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type not in (None, "dflash2", "qwen3"):
        raise DrafterError(
            f"model_type {model_type!r} cannot be served: the layers of a DFlash2 drafter are dense Qwen3 layers, "
            "model_type 'qwen3'."
        )
    return "qwen3"


def _refuse_what_is_not_served(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    """Raise for keys that change what a drafter computes and that this drafter does not follow."""

    def refuse(key: str, value: Any, why: str) -> None:
        raise DrafterError(f"{key} {value!r} cannot be served on vLLM 0.27.1: {why}.")

    if dflash.get("sample_from_anchor"):
        refuse("sample_from_anchor", True, "its first draft token follows the anchor, from a mask token of its own")
    mode = dflash.get("attention_mode")
    if mode is not None and "mla" in str(mode).lower():
        refuse("dflash_config.attention_mode", mode, "its attention has K and V heads of its own")
    for place, keys in (("dflash_config.", dflash), ("", config)):
        for key in ("attention_sink_bias", "add_swa_attention_sink_bias"):
            if keys.get(key):
                refuse(f"{place}{key}", keys[key], "its attention has no sinks")
        if keys.get("attention_value_scale") not in (None, 1, 1.0):
            refuse(f"{place}attention_value_scale", keys["attention_value_scale"], "its values are not scaled")
    if not config.get("is_neox_style", True):
        refuse("is_neox_style", False, "its rotary embedding is neox style")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", config["hidden_act"], "its MLP is SwiGLU, 'silu'")
    for key in ("is_causal", "use_sliding_window"):
        if config.get(key) not in (None, True, False):
            raise DrafterError(f"{key} must be true or false, got {config[key]!r}.")


def _settle_windows(config: dict[str, Any], dflash: Mapping[str, Any]) -> None:
    """Make sliding_window, use_sliding_window and layer_types say the same, if that is clear.

    transformers drops a window without use_sliding_window, whatever layer_types says.
    """
    window, used, types = (config.get(key) for key in ("sliding_window", "use_sliding_window", "layer_types"))
    count = config["num_hidden_layers"]
    swa_window = dflash.get("swa_window_size")
    if dflash.get("use_swa") and not (swa_window or (used and window)):
        raise DrafterError("dflash_config.use_swa True needs a window in dflash_config.swa_window_size.")
    if types is None:
        if used and not window:
            raise DrafterError(f"use_sliding_window True needs a window, and sliding_window is {window!r}.")
        sliding = used and config.get("max_window_layers", count) < count
        if window and not dflash.get("use_swa") and used is not False and not sliding:
            raise DrafterError(
                f"sliding_window {window} with use_sliding_window {used!r} and without layer_types leaves open which "
                "layers have it; add layer_types to the draft model's config.json."
            )
        return
    allowed = {"sliding_attention", "full_attention"}
    if not isinstance(types, list) or len(types) != count or not set(types) <= allowed:
        raise DrafterError(
            f"layer_types must name 'sliding_attention' or 'full_attention' for each of the {count} layers, "
            f"got {types!r}."
        )
    if "sliding_attention" not in types:
        return
    if used is False:
        raise DrafterError(f"use_sliding_window False contradicts layer_types {types}; make it true, or drop it.")
    if not (window or swa_window):
        raise DrafterError(f"sliding_window {window!r} gives the sliding layers of layer_types {types} no window.")
    config["use_sliding_window"] = True


def check_quantization(hf_config: PretrainedConfig, quantization_config: Mapping[str, Any]) -> None:
    """Refuse a quantised drafter, naming its scheme; other models are none of our business."""
    if not is_dflash2(hf_config):
        return
    nested = quantization_config.get("quantization")
    inner = nested if isinstance(nested, Mapping) else quantization_config
    method = quantization_config.get("quant_method") or ("modelopt" if inner.get("quant_algo") else None)
    details = [inner.get(key) for key in ("quant_algo", "format", "fmt", "weight_block_size")]
    bits = inner.get("bits", inner.get("w_bit"))
    details += [f"{bits} bits"] if bits else []
    shown = ", ".join(str(detail) for detail in details if detail)
    raise NotImplementedError(
        f"DFlash2 drafter: quantization_config.quant_method {method!r}{f' ({shown})' if shown else ''} cannot be "
        "served: a quantised drafter does not run on vLLM 0.27.1. Use the bf16 checkpoint."
    )


def settle_method(method: str | None) -> str:
    """The speculative method of a DFlash2 drafter, whatever its path is called.

    method  as the user gave it, None if not at all
    """
    if method not in (None, "dflash"):
        raise DrafterError(
            f"method {method!r} of the speculative config does not serve it; leave method out, or give 'dflash'."
        )
    return "dflash"


def settle_steps(hf_config: PretrainedConfig, steps: int | None) -> int:
    """num_speculative_tokens: as given, or what the drafter was trained for. Warns if they differ."""
    block = DFlash2Config.from_hf_config(hf_config).block_size
    if block is None:
        if steps is not None:
            return steps
        raise DrafterError(
            "num_speculative_tokens is not given, and the draft model's config.json has no dflash_config.block_size "
            "to take it from."
        )
    if steps is None:
        return block - 1
    if steps != block - 1:
        logger.warning_once(
            "num_speculative_tokens is %d, but the DFlash2 drafter was trained with "
            "block_size %d (%d draft tokens): expect a lower acceptance.",
            steps,
            block,
            block - 1,
        )
    return steps


def check_pair(draft_model_config: "ModelConfig", target_model_config: "ModelConfig") -> None:
    """Refuse a drafter that does not fit its target.

    Raises:
        ValueError: names the key and both values.
    """
    hf_config = draft_model_config.hf_config
    target_vocab = target_model_config.get_vocab_size()
    for key in ("vocab_size", "draft_vocab_size"):
        vocab = getattr(hf_config, key, None)
        if vocab is not None and vocab != target_vocab:
            raise DrafterError(
                f"{key} {vocab} is not the target's {target_vocab}. The drafter drafts in the target's vocabulary; "
                "use the drafter that was trained for this target."
            )
    target_hidden = target_model_config.get_hidden_size()
    for key in ("hidden_size", "target_hidden_size"):
        hidden = getattr(hf_config, key, None)
        if hidden is not None and hidden != target_hidden:
            raise DrafterError(
                f"{key} {hidden} is not the target's hidden size {target_hidden}; use the drafter that was trained "
                "for this target."
            )
    num_layers = target_model_config.get_total_num_hidden_layers()
    layers = DFlash2Config.from_hf_config(hf_config).target_layer_ids
    if max(layers) >= num_layers:
        raise DrafterError(
            f"dflash_config.target_layer_ids {layers} name a layer that the target does not have: it has {num_layers}."
        )
    if draft_model_config.quantization is not None:
        raise NotImplementedError(
            f"DFlash2 drafter: quantization {draft_model_config.quantization!r} of the speculative config cannot be "
            "served: a quantised drafter does not run on vLLM 0.27.1. Leave it out."
        )


def check_engine(vllm_config: "VllmConfig") -> None:
    """Refuse, or settle, what depends on how vLLM is to run.

    Raises:
        ValueError: names the key and what to do.
    """
    spec_config = vllm_config.speculative_config
    if spec_config is None:
        model_config = vllm_config.model_config
        if model_config is not None and is_dflash2(model_config.hf_config):
            raise DrafterError(
                f"{model_config.model} drafts for another model and cannot be served alone: vllm serve TARGET "
                f'--speculative-config \'{{"model": "{model_config.model}"}}\''
            )
        return
    if spec_config.method != "dflash" or not is_dflash2(spec_config.draft_model_config.hf_config):
        return
    if "DFlash2BeamDraftModel" in spec_config.draft_model_config.architectures:
        _check_beam(vllm_config)

    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        _settle_rocm_backend(spec_config)


def _check_beam(vllm_config: "VllmConfig") -> None:
    """Refuse what the Qwen3 drafter serves and the one of Beam does not.

    Raises NotImplementedError naming the key and its value.
    """
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    if getattr(hf_config, "attention_bias", False):
        raise NotImplementedError(
            "DFlash2 Beam drafter: attention_bias is true in the draft model's config.json, "
            "and this drafter has no attention biases. Draft with architecture "
            "DFlash2DraftModel, which has."
        )
    layer_types = getattr(hf_config, "layer_types", None) or []
    one_group = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    if len(set(layer_types)) > 1 and not one_group:
        raise NotImplementedError(
            f"DFlash2 Beam drafter: layer_types {list(layer_types)} put its layers into "
            "different KV cache groups, and this drafter needs one. Draft with architecture "
            "DFlash2DraftModel, or serve with --disable-hybrid-kv-cache-manager."
        )
    parallel = vllm_config.parallel_config
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, key) > 1:
            raise NotImplementedError(
                f"DFlash2 Beam drafter: {key} is {getattr(parallel, key)}, and its context "
                "K/V cannot be split over ranks; serve with 1."
            )


def _settle_rocm_backend(spec_config: "SpeculativeConfig") -> None:
    """Keep a drafter with a window away from ROCM_ATTN, whose prefix prefill with one drafts badly."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    layer_types = getattr(spec_config.draft_model_config.hf_config, "layer_types", None) or ()
    if "sliding_attention" not in layer_types:
        return
    if spec_config.attention_backend is None:
        # ROCm's own first choice would be ROCM_ATTN.
        spec_config.attention_backend = AttentionBackendEnum.TRITON_ATTN
    elif spec_config.attention_backend == AttentionBackendEnum.ROCM_ATTN:
        raise DrafterError(
            "attention_backend ROCM_ATTN of the speculative config drafts badly with a sliding window; give "
            "TRITON_ATTN, or leave it out."
        )
