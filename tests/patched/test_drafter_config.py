"""A drafter's configuration: every form of it that is read, and every key that is refused before weights load."""

import functools
import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.drafter_configs import outcome

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
TINY = REPO / "demo/tiny"
CONFIGS = HERE / "configs"
SPECULATORS = json.loads((CONFIGS / "speculators/config.json").read_text())
QWEN38 = json.loads((CONFIGS / "qwen38/draft/config.json").read_text())
GONE = object()


def changed(config, changes):
    """A copy of a config with the keys in `changes` replaced, or taken out (GONE). "a.b" is key b of object a."""
    config = json.loads(json.dumps(config))
    for path, value in changes.items():
        *outer, key = path.split(".")
        place = config
        for name in outer:
            place = place[name]
        if value is GONE:
            place.pop(key, None)
        else:
            place[key] = value
    return config


def published():
    """The trained pair's drafter, block_size where published files have it."""
    config = json.loads((TINY / "draft/config.json").read_text())
    config["dflash_config"]["block_size"] = config.pop("block_size")
    return config


@pytest.fixture(scope="module")
def dflash2():
    """dflash2/configs/dflash2.py, which needs nothing of a patched vLLM."""
    spec = importlib.util.spec_from_file_location("dflash2_configs", REPO / "dflash2/configs/dflash2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAME = {
    "block_size at the top level": {"dflash_config.block_size": GONE, "block_size": 8},
    "block_size in both, dflash_config first": {"block_size": 16},
    "mask_token_id at the top level": {"dflash_config.mask_token_id": GONE, "mask_token_id": 257},
    "mask_token_id as a float": {"dflash_config.mask_token_id": 257.0},
    "mask_token_id as text": {"dflash_config.mask_token_id": "257"},
    "sizes as floats and text": {"hidden_size": 256.0, "num_hidden_layers": "2", "dflash_config.selector_rank": "32"},
    "layers as floats": {"dflash_config.target_layer_ids": [0.0, "2", 3]},
    "layers counted from the embedding": {
        "dflash_config.target_layer_ids": GONE,
        "aux_hidden_state_layer_ids": [1, 3, 4],
    },
    "layers by EAGLE's name": {
        "dflash_config.target_layer_ids": GONE,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    },
    "layers by both names": {"aux_hidden_state_layer_ids": [1, 3, 4]},
    "no model_type": {"model_type": GONE},
    "model_type dflash2": {"model_type": "dflash2"},
    "no use_sliding_window": {"use_sliding_window": GONE},
    "use_sliding_window null": {"use_sliding_window": None},
}


@pytest.mark.parametrize("name", SAME)
def test_one_drafter_written_in_several_ways_is_one_drafter(dflash2, name):
    wanted, _ = dflash2.read_config(published())
    found, hf_config = dflash2.read_config(changed(published(), SAME[name]))
    assert found == wanted
    assert hf_config.sliding_window == 256 and hf_config.model_type == "qwen3"


def test_every_key_is_read_from_the_top_level(dflash2):
    flat = published()
    flat |= flat.pop("dflash_config")
    assert dflash2.read_config(flat)[0] == dflash2.read_config(published())[0]


def test_the_flagships_config_is_read_as_it_is(dflash2):
    found, hf_config = dflash2.read_config(QWEN38)
    assert found == QWEN38
    assert hf_config.sliding_window == 2048 and not hf_config.is_causal
    assert dflash2.settle_steps(hf_config, None) == 7


def test_speculators_own_config_is_the_same_drafter(dflash2):
    found, wanted = dflash2.read_config(SPECULATORS)[1], dflash2.read_config(published())[1]
    for key in ("layer_types", "sliding_window", "is_causal", "rope_parameters", "architectures", "hidden_size"):
        assert getattr(found, key) == getattr(wanted, key), key
    assert found.dflash_config == wanted.dflash_config | {"sample_from_anchor": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"aux_hidden_state_layer_ids": GONE, "target_layer_ids": [0, 2, 3]},
        {"target_layer_ids": [0, 2, 3]},
        {"architectures": GONE},
        {"model_type": "speculators"},
        {"transformer_layer_config.sliding_window": 4096},
        {"transformer_layer_config.use_sliding_window": GONE},
    ],
    ids=str,
)
def test_speculators_config_is_read_in_both_namings(dflash2, changes):
    hf_config = dflash2.read_config(changed(SPECULATORS, changes))[1]
    assert hf_config.dflash_config["target_layer_ids"] == [0, 2, 3]
    assert hf_config.sliding_window == changes.get("transformer_layer_config.sliding_window", 256)
    assert hf_config.architectures == ["DFlash2DraftModel"] and hf_config.is_causal is False


def test_what_speculators_leaves_out_is_transformers_default(dflash2):
    left_out = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
    config = changed(SPECULATORS, {f"transformer_layer_config.{key}": GONE for key in left_out})
    hf_config = dflash2.read_config(config)[1]
    assert [getattr(hf_config, key) for key in left_out] == [32, 32, 128, 4096]


def test_speculators_causal_windows_are_left_to_the_layer_type(dflash2):
    config = changed(SPECULATORS, {"sliding_window_non_causal": False})
    assert getattr(dflash2.read_config(config)[1], "is_causal", None) is None


# What is changed in the published config, and what the error must say.
REFUSED = {
    "no dflash_config": ({"dflash_config": GONE}, "dflash_config.mask_token_id is missing"),
    "dflash_config is a list": ({"dflash_config": [1]}, "dflash_config must be an object, got [1]"),
    "no layers": ({"dflash_config.target_layer_ids": GONE}, "dflash_config.target_layer_ids is missing"),
    "layers out of order": ({"dflash_config.target_layer_ids": [3, 0]}, "target_layer_ids must be in increasing"),
    "a layer twice": ({"dflash_config.target_layer_ids": [0, 3, 3]}, "increasing order, got [0, 3, 3]"),
    "layers are text": ({"dflash_config.target_layer_ids": "0,2"}, "target_layer_ids must be a list"),
    "half a layer": ({"dflash_config.target_layer_ids": [0, 2.5]}, "must be an integer, got 2.5"),
    "layers of two kinds": ({"aux_hidden_state_layer_ids": [0, 2, 3]}, "aux_hidden_state_layer_ids must"),
    "layers that differ": ({"aux_hidden_state_layer_ids": [1, 2, 3]}, "are not the same layers"),
    "no mask token": ({"dflash_config.mask_token_id": GONE}, "dflash_config.mask_token_id is missing"),
    "half a mask token": ({"dflash_config.mask_token_id": 257.5}, "dflash_config.mask_token_id must be an integer"),
    "mask_token_id is a word": ({"dflash_config.mask_token_id": "<mask>"}, "got '<mask>'"),
    "mask_token_id is true": ({"dflash_config.mask_token_id": True}, "got True"),
    "mask token outside": (
        {"dflash_config.mask_token_id": 320},
        "mask_token_id must be a token id below vocab_size 320",
    ),
    "block of one": ({"dflash_config.block_size": 1}, "block_size must be an integer of at least 2"),
    "half a block": ({"dflash_config.block_size": 7.5}, "dflash_config.block_size must be an integer, got 7.5"),
    "selector_top_k 0": ({"dflash_config.selector_top_k": 0}, "selector_top_k must be a positive integer, got 0"),
    "group": ({"dflash_config.conv_group_size": 24}, "conv_group_size must divide hidden_size 256, got 24"),
    "multiplier": ({"dflash_config.output_multiplier": "x"}, "output_multiplier must be a positive number, got 'x'"),
    "hidden_size missing": ({"hidden_size": GONE}, "hidden_size is missing"),
    "hidden_size odd": ({"hidden_size": "wide"}, "hidden_size must be an integer, got 'wide'"),
    "no aux states": ({"dflash_config.use_aux_hidden_state": False}, "dflash_config.use_aux_hidden_state"),
    "anchor sampled": ({"dflash_config.sample_from_anchor": True}, "sample_from_anchor True cannot be served"),
    "mla": ({"dflash_config.attention_mode": "mla"}, "dflash_config.attention_mode 'mla' cannot be served"),
    "mla at the top level": ({"attention_mode": "MLA"}, "attention_mode 'MLA' cannot be served"),
    "sinks": ({"dflash_config.attention_sink_bias": True}, "dflash_config.attention_sink_bias True cannot"),
    "sinks by MiMo's name": ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias True cannot"),
    "value scale": ({"dflash_config.attention_value_scale": 0.7}, "attention_value_scale 0.7 cannot be served"),
    "rope style": ({"is_neox_style": False}, "is_neox_style False cannot be served"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be served"),
    "is_causal is text": ({"is_causal": "false"}, "is_causal must be true or false, got 'false'"),
    "llama": ({"model_type": "llama"}, "model_type 'llama' cannot be served"),
    "mixture of experts": ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' cannot be served"),
    "no architecture": ({"architectures": GONE}, "architectures is missing"),
    "other architecture": (
        {"architectures": ["DFlash2MoEDraftModel"]},
        "architectures ['DFlash2MoEDraftModel'] cannot",
    ),
    "no window": ({"sliding_window": None}, "sliding_window None gives the sliding layers"),
    "window denied": ({"use_sliding_window": False}, "use_sliding_window False contradicts layer_types"),
    "window of which layers": (
        {"use_sliding_window": GONE, "layer_types": GONE},
        "sliding_window 256 with use_sliding_window None and without layer_types",
    ),
    "window of no layer": ({"layer_types": GONE, "max_window_layers": 2}, "without layer_types leaves open"),
    "window without a size": ({"layer_types": GONE, "sliding_window": GONE}, "sliding_window is None"),
    "use_swa without a size": (
        {"dflash_config.use_swa": True, "use_sliding_window": False},
        "dflash_config.use_swa True needs a window",
    ),
    "layer_types too short": ({"layer_types": ["sliding_attention"]}, "layer_types must name"),
    "layer_types linear": ({"layer_types": ["linear_attention"] * 2}, "for each of the 2 layers"),
}
REFUSED_SPECULATORS = {
    "other algorithm": ({"speculators_model_type": "dflash2_moe"}, "speculators_model_type 'dflash2_moe' cannot"),
    "mixture of experts": ({"transformer_layer_config.model_type": "qwen3_moe"}, "model_type 'qwen3_moe' cannot"),
    "anchor sampled": ({"sample_from_anchor": True}, "sample_from_anchor True cannot be served"),
    "layers": ({"aux_hidden_state_layer_ids": [0, 3]}, "aux_hidden_state_layer_ids must be a list"),
    "layer config": ({"transformer_layer_config": "x"}, "transformer_layer_config must be an object, got 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key_and_value(dflash2, name):
    changes, says = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        dflash2.read_config(changed(published(), changes))
    assert says in str(caught.value) and str(caught.value).startswith("DFlash2 drafter: ")


@pytest.mark.parametrize("name", REFUSED_SPECULATORS)
def test_speculators_format_refused_by_key_and_value(dflash2, name):
    changes, says = REFUSED_SPECULATORS[name]
    with pytest.raises(ValueError) as caught:
        dflash2.read_config(changed(SPECULATORS, changes))
    assert says in str(caught.value)


# vLLM itself, from its arguments to its configuration; support/drafter_configs.py describes a case's keys.
SERVED = {
    "a checkpoint is enough": {"draft": str(TINY / "draft")},
    "a path like EAGLE's": {"named": "eagle-3-eagle3-dspark"},
    "a relative path with a dot": {"named": "my.drafter", "relative": True},
    "method given": {"spec": {"method": "dflash"}},
    "no model_type": {"draft": changed(published(), {"model_type": GONE})},
    "speculators": {"draft": SPECULATORS},
    "speculators, served by its own path": {
        "draft": changed(SPECULATORS, {"speculators_config.verifier.name_or_path": str(TINY / "target")}),
        "target": None,
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
SCHEMES = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "'gptq' (4 bits)"),
    "awq": ({"quant_method": "awq", "w_bit": 4}, "'awq' (4 bits)"),
    "fp8": (FP8, "'fp8' (e4m3, [128, 128])"),
    "compressed": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "(pack-quantized)"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' (NVFP4)"),
    "unknown": ({"quant_method": "own"}, "quantization_config.quant_method 'own' cannot be served"),
}
OUTCOMES = {
    **{
        f"quantised: {name}": ({"draft": changed(published(), {"quantization_config": scheme})}, says)
        for name, (scheme, says) in SCHEMES.items()
    },
    "quantised: compression_config": (
        {"draft": changed(published(), {"compression_config": SCHEMES["compressed"][0]})},
        "quantization_config.quant_method 'compressed-tensors' (pack-quantized)",
    ),
    "quantised: speculators": (
        {"draft": changed(SPECULATORS, {"quantization_config": SCHEMES["nvfp4"][0]})},
        "quantization_config.quant_method 'modelopt' (NVFP4)",
    ),
    "quantised: a file of its own": ({"files": {"hf_quant_config.json": MODELOPT}}, "'modelopt' (NVFP4)"),
    "quantised on the way": ({"spec": {"quantization": "fp8"}}, "quantization 'fp8' of the speculative config"),
    **{
        f"method {method}": ({"spec": {"method": method}}, f"method '{method}' of the speculative config does not")
        for method in ("draft_model", "eagle", "eagle3", "mtp", "medusa", "dspark")
    },
    "no S": ({"draft": changed(published(), {"dflash_config.block_size": GONE})}, "has no dflash_config.block_size"),
    "S 0": ({"spec": {"num_speculative_tokens": 0}}, "num_speculative_tokens"),
    "vocab_size": ({"draft": changed(published(), {"vocab_size": 300})}, "vocab_size 300 is not the target's 320"),
    "draft_vocab_size": (
        {"draft": changed(published(), {"draft_vocab_size": 300})},
        "draft_vocab_size 300 is not the target's 320",
    ),
    "hidden_size": (
        {"draft": changed(published(), {"hidden_size": 128})},
        "hidden_size 128 is not the target's hidden size 256",
    ),
    "target_hidden_size": (
        {"draft": changed(published(), {"target_hidden_size": 512})},
        "target_hidden_size 512 is not the target's hidden size 256",
    ),
    "layers of a deeper target": (
        {"draft": changed(published(), {"dflash_config.target_layer_ids": [0, 4]})},
        "dflash_config.target_layer_ids [0, 4] name a layer that the target does not have: it has 4",
    ),
    "float16": ({"engine": {"dtype": "float16"}}, "Use --dtype bfloat16"),
    "a drafter without its target": ({"target": None}, "cannot be served alone: vllm serve TARGET"),
    "ROCM_ATTN": (
        {"rocm": True, "spec": {"attention_backend": "ROCM_ATTN"}},
        "attention_backend ROCM_ATTN of the speculative config drafts badly with a sliding window; give TRITON_ATTN",
    ),
    "Beam with biases": (
        {"draft": changed(published(), {"architectures": ["DFlash2BeamDraftModel"], "attention_bias": True})},
        "attention_bias",
    ),
}
OTHERS = {
    "wrong S": {"spec": {"num_speculative_tokens": 3}},
    "wrong S, block_size at the top level": {
        "draft": changed(published(), {"dflash_config.block_size": GONE, "block_size": 16}),
        "spec": {"num_speculative_tokens": 8},
    },
    "right S": {"spec": {"num_speculative_tokens": 7}},
    "ROCm": {"rocm": True},
    "ROCm, full attention": {
        "rocm": True,
        "draft": changed(published(), {"layer_types": ["full_attention"] * 2}),
    },
    "flagship": {
        "draft": QWEN38,
        "target": str(CONFIGS / "qwen38/target"),
        # The class of the target is not looked at, and its own cannot be imported without torchvision.
        "engine": {"max_model_len": 4096, "hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}},
    },
    "a plain draft model": {"draft": str(TINY / "target"), "spec": {"num_speculative_tokens": 2}},
}


@functools.cache
def outcome_of(name):
    """What vLLM made of the case of that name, or why it refused."""
    case = {**SERVED, **{refused: case for refused, (case, _) in OUTCOMES.items()}, **OTHERS}[name]
    return outcome({"draft": published(), "target": str(TINY / "target"), **case})


@pytest.mark.parametrize("name", SERVED)
def test_served_from_the_checkpoint_alone(dflash2, name):
    found = outcome_of(name)
    assert "refused" not in found, found
    assert (found["method"], found["steps"], found["v2"]) == ("dflash", 7, True)
    assert found["target"] == str(TINY / "target")
    assert found["architectures"] == ["DFlash2DraftModel"]
    assert found["hf_config"]["sliding_window"] == 256
    assert found["hf_config"]["dflash_config"]["target_layer_ids"] == [0, 2, 3]
    assert "num_speculative_tokens is" not in found["log"]


@pytest.mark.parametrize("name", OUTCOMES)
def test_refused_before_anything_loads(name):
    says = OUTCOMES[name][1]
    assert says in outcome_of(name).get("refused", "served"), outcome_of(name)


@pytest.mark.parametrize("name, block", [("wrong S", 8), ("wrong S, block_size at the top level", 16)])
def test_steps_that_the_drafter_was_not_trained_for_warn_once(name, block):
    assert outcome_of(name)["steps"] == OTHERS[name]["spec"]["num_speculative_tokens"]
    assert outcome_of(name)["log"].count(f"trained with block_size {block} ({block - 1} draft tokens)") == 1
    assert "trained with" not in outcome_of("right S")["log"]


def test_rocm_drafts_a_window_with_triton():
    assert outcome_of("ROCm")["backend"] == "TRITON_ATTN"
    assert outcome_of("ROCm, full attention")["backend"] is None
    assert outcome_of("a checkpoint is enough")["backend"] is None


def test_the_flagships_published_pair():
    found = outcome_of("flagship")
    assert (found["method"], found["steps"], found["v2"]) == ("dflash", 7, True), found
    assert found["hf_config"] == {
        "dflash_config": QWEN38["dflash_config"],
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * 5,
        "is_causal": False,
        "rope_parameters": QWEN38["rope_parameters"],
        "vocab_size": 248320,
    }


def test_a_plain_draft_model_is_served_as_ever():
    assert outcome_of("a plain draft model")["method"] == "draft_model"
