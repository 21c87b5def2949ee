# SPDX-License-Identifier: Apache-2.0
"""What each key of the speculative config does beside a DFlash2 drafter: it is honoured or refused, never ignored.

Read while the configuration is made, before anything is loaded; imports nothing of vLLM.
"""

from typing import Any

# Key -> where it takes effect. Some values are refused all the same: `check_keys` has them.
HONOURED = {
    "method": "SpeculativeConfig",
    "model": "SpeculativeConfig",
    "num_speculative_tokens": "the speculator",
    "num_speculative_tokens_per_batch_size": "the scheduler, the target's CUDA graphs",
    "enforce_eager": "the speculator's CUDA graphs",
    "draft_tensor_parallel_size": "must be the target's",
    "max_model_len": "must be the target's",
    "attention_backend": "load_dflash_model",
    "kv_cache_dtype": "load_dflash_model",
    "revision": "the drafter's ModelConfig",
    "code_revision": "the drafter's ModelConfig",
    "draft_load_config": "load_dflash_model",
    "parallel_drafting": "always on",
    "draft_sample_method": "the speculator",
    "rejection_sample_method": "the rejection sampler",
    "synthetic_acceptance_rates": "the rejection sampler",
    "synthetic_acceptance_length": "the rejection sampler",
}
_SUFFIX = "is for suffix decoding"
_NGRAM = "is for n-gram drafts"
_ENGINE = "is made by the engine, from model and the target's flags"
REFUSED = {
    "quantization": "cannot be honoured: a quantised drafter does not run on vLLM 0.27.1",
    "moe_backend": "chooses kernels for experts, and a DFlash2 drafter has none",
    "disable_padded_drafter_batch": "is for EAGLE on the V1 model runner, and a DFlash2 drafter runs on V2",
    "use_local_argmax_reduction": "changes nothing: candidates are found without gathering the vocabulary in any case",
    "prompt_lookup_max": _NGRAM,
    "prompt_lookup_min": _NGRAM,
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
    "draft_model_config": _ENGINE,
    "draft_parallel_config": _ENGINE,
}
# Refused by SpeculativeConfig itself, by name; and what EngineArgs fills in.
VLLM = ("tensor_parallel_size", "use_heterogeneous_vocab")
ENGINE = ("target_model_config", "target_parallel_config")


def check_keys(config: Any, given: dict[str, Any]) -> None:
    """Raise ValueError, naming key and value, for what would not be honoured.

    config  the SpeculativeConfig of a DFlash2 drafter, complete
    given   what the user gave of its fields: key -> value, defaults left out
    """
    for key, value in given.items():
        if key in REFUSED:
            _refuse(key, value, f"{REFUSED[key]}. Leave it out.")
    target, tp = config.target_model_config, config.target_parallel_config.tensor_parallel_size
    if (size := given.get("draft_tensor_parallel_size", tp)) != tp:
        _refuse(
            "draft_tensor_parallel_size",
            size,
            f"is not the target's {tp}, and the V2 model runner shards a drafter as its target. Leave it out.",
        )
    if (length := given.get("max_model_len", target.max_model_len)) < target.max_model_len:
        _refuse(
            "max_model_len",
            length,
            f"is less than the target's {target.max_model_len}, and the V2 model runner drafts for sequences of any "
            "length. Leave it out, or lower --max-model-len.",
        )
    if given.get("enforce_eager") is False and target.enforce_eager:
        _refuse("enforce_eager", False, "has no CUDA graphs to turn on beside --enforce-eager. Leave out one of them.")
    if schedule := given.get("num_speculative_tokens_per_batch_size"):
        _check_schedule(schedule, config.num_speculative_tokens, target.is_hybrid)


def _check_schedule(schedule: list, steps: int, is_hybrid: bool) -> None:
    key = "num_speculative_tokens_per_batch_size"
    if is_hybrid:
        _refuse(key, schedule, "is not served beside a target with Mamba or linear-attention layers. Leave it out.")
    # The shape is vLLM's to check; it does not see an S that the drafter never makes.
    for _, _, wanted in schedule:
        if wanted > steps:
            _refuse(key, schedule, f"asks for {wanted} draft tokens, more than num_speculative_tokens {steps}.")


def _refuse(key: str, value: Any, why: str) -> None:
    raise ValueError(f"DFlash2 drafter: {key} {value!r} of the speculative config {why}")
