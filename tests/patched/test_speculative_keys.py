"""Every key of the speculative config is honoured beside a DFlash2 drafter, or refused by name; none is ignored.

CASES goes through the fields of SpeculativeConfig: a value that is not the default, and what becomes of it.
"""

import json
from pathlib import Path

import pytest

from tests.support.answers import last_line
from tests.support.trees import TINY

PROBES = Path(__file__).with_name("key_probes.py")
DRAFT = str(TINY / "draft")
SCHEDULE = [[1, 4, 7], [5, 16, 2]]
# key: ({keys of the config}, the value that the configuration has then, or what the refusal says beside the key)
HONOURED = {
    "method": ({"method": "dflash"}, "dflash"),
    "model": ({"model": DRAFT}, DRAFT),
    "num_speculative_tokens": ({"num_speculative_tokens": 3}, "3"),
    "num_speculative_tokens_per_batch_size": (
        {"num_speculative_tokens_per_batch_size": SCHEDULE},
        "[(1, 4, 7), (5, 16, 2)]",
    ),
    "enforce_eager": ({"enforce_eager": True}, "True"),
    "draft_tensor_parallel_size": (
        {"draft_tensor_parallel_size": 2, "target_tensor_parallel_size": 2},
        "2",
    ),
    "max_model_len": ({"max_model_len": 256}, "256"),
    "attention_backend": ({"attention_backend": "TRITON_ATTN"}, "AttentionBackendEnum.TRITON_ATTN"),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8"}, "fp8"),
    "revision": ({"revision": "r1"}, "r1"),
    "code_revision": ({"code_revision": "c1"}, "c1"),
    "draft_load_config": ({"draft_load_config": {"load_format": "dummy"}}, "load_format='dummy'"),
    "parallel_drafting": ({"parallel_drafting": True}, "True"),
    "draft_sample_method": ({"draft_sample_method": "probabilistic"}, "probabilistic"),
    "rejection_sample_method": ({"rejection_sample_method": "block"}, "block"),
    "synthetic_acceptance_rates": (
        {"synthetic_acceptance_rates": [0.5] * 7, "rejection_sample_method": "synthetic"},
        "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]",
    ),
    "synthetic_acceptance_length": (
        # vLLM keeps the rates that it stands for.
        {"synthetic_acceptance_length": 4.0, "rejection_sample_method": "synthetic"},
        "None",
    ),
}
REFUSED = {
    "tensor_parallel_size": ({"tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
    "quantization": ({"quantization": "fp8"}, "a quantised drafter"),
    "moe_backend": ({"moe_backend": "triton"}, "has none"),
    "disable_padded_drafter_batch": ({"disable_padded_drafter_batch": True}, "EAGLE"),
    "use_local_argmax_reduction": ({"use_local_argmax_reduction": True}, "changes nothing"),
    "use_heterogeneous_vocab": ({"use_heterogeneous_vocab": True}, "only works with method='draft_model'"),
    "prompt_lookup_max": ({"prompt_lookup_max": 3}, "n-gram"),
    "prompt_lookup_min": ({"prompt_lookup_min": 2}, "n-gram"),
    "suffix_decoding_max_tree_depth": ({"suffix_decoding_max_tree_depth": 8}, "suffix decoding"),
    "suffix_decoding_max_cached_requests": ({"suffix_decoding_max_cached_requests": 8}, "suffix decoding"),
    "suffix_decoding_max_spec_factor": ({"suffix_decoding_max_spec_factor": 2.0}, "suffix decoding"),
    "suffix_decoding_min_token_prob": ({"suffix_decoding_min_token_prob": 0.2}, "suffix decoding"),
    "draft_model_config": ({"draft_model_config": {"model": DRAFT}}, "made by the engine"),
    "draft_parallel_config": ({"draft_parallel_config": {"tensor_parallel_size": 1}}, "made by the engine"),
}
# EngineArgs overwrites these with its own, whatever is given.
ENGINES_OWN = {"target_model_config", "target_parallel_config"}
VALUES_REFUSED = {
    "draft_tensor_parallel_size of its own": (
        {"draft_tensor_parallel_size": 1, "target_tensor_parallel_size": 2},
        "draft_tensor_parallel_size 1 of the speculative config is not the target's 2",
    ),
    "max_model_len of its own": ({"max_model_len": 128}, "max_model_len 128 of the speculative config is less than"),
    "no eager draft of an eager target": (
        {"enforce_eager": False, "target_enforce_eager": True},
        "enforce_eager False of the speculative config",
    ),
    "more drafts than there are": (
        {"num_speculative_tokens_per_batch_size": [[1, 4, 9]]},
        "asks for 9 draft tokens, more than num_speculative_tokens 7",
    ),
    "an unknown key": ({"draft_len": 3}, "draft_len"),
}


@pytest.fixture(scope="module")
def found(run_patched):
    cases = {name: keys for table in (HONOURED, REFUSED, VALUES_REFUSED) for name, (keys, _) in table.items()}
    done = run_patched(PROBES, json.dumps(cases), interpret=True, env={"VLLM_LOGGING_LEVEL": "ERROR"})
    return last_line(done.stdout)


def served(answer):
    assert "served" in answer, answer["refused"]
    return answer["served"]


def test_every_field_is_in_the_table(found):
    known = served(found["fields"])
    assert sorted(known["said"]) == sorted(known["fields"]), "keys.py says nothing, or too much, about a field"
    assert {*HONOURED, *REFUSED, *ENGINES_OWN} == set(known["fields"]), "so does this test"


@pytest.mark.parametrize("key", HONOURED)
def test_honoured(found, key):
    assert HONOURED[key][1] in served(found["answers"][key])


@pytest.mark.parametrize("key", REFUSED)
def test_refused_by_name(found, key):
    said = found["answers"][key].get("refused", "served")
    assert key in said and REFUSED[key][1] in said


@pytest.mark.parametrize("case", VALUES_REFUSED)
def test_value_refused(found, case):
    assert VALUES_REFUSED[case][1] in found["answers"][case].get("refused", "served")


def test_the_drafter_is_loaded_as_the_keys_say(found):
    """[load format, attention backend, KV cache dtype]: given, and without the keys the target's."""
    assert served(found["loader"]) == [["dummy", "TRITON_ATTN", "fp8"], [None, None, "auto"]]
    assert served(found["drafter_model"]) == ["r1", "c1"]


def test_the_drafts_graphs(found):
    """None with enforce_eager; with a schedule those of the whole block, which is drafted in any case."""
    assert served(found["draft_graphs"]) == [["FULL_DECODE_ONLY", None], ["NONE", None], ["FULL_DECODE_ONLY", None]]


def test_every_s_of_the_schedule_has_graphs_for_the_target(found):
    *uniform, mixed = served(found["target_graphs"])
    assert len(uniform) == 8 + 16 + 16
    for steps, requests, rows, graph in uniform:
        assert rows == steps + 1 and requests <= graph, (steps, requests, rows, graph)
    assert mixed == [None, 24, None, None], "20 tokens of 3 requests: the piecewise graph of the next size"


def test_a_schedule_verifies_what_it_says_and_keeps_the_text(run_patched):
    runs = last_line(run_patched(PROBES, "serve", interpret=True).stdout)
    whole, scheduled = runs["none"], runs["2, then 0"]
    assert scheduled["texts"] == whole["texts"]
    assert whole["draft_tokens"] == 7 * whole["drafts"] > 0
    # While all three run nothing is verified, then two tokens per draft.
    assert scheduled["draft_tokens"] == 2 * scheduled["drafts"] > 0
    assert 0 < scheduled["accepted_tokens"] <= scheduled["draft_tokens"]
