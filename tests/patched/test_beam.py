"""Beam's drafter without an engine: its edges against float32, its public names, its weights, and what it refuses."""

import json
import logging
import types
from unittest.mock import patch

import pytest
import torch

from tests.support import reference
from tests.support.beam import BEAM, LAYERS, SCALED, STEPS
from tests.support.pair import draft_shapes, write, write_pair

STACKED = [[2 * 2 * 32, 96], [2, 32]]  # the K/V projections and K-norm weights of 2 layers


def config_of(target, draft, **arguments):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        speculative_config={"method": "dflash", "model": str(draft), "num_speculative_tokens": STEPS},
        **{"dtype": "float32", **arguments},
    ).create_engine_config()


def load_drafter(config):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        return get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)


class Subject:
    """A random pair whose target hands over features of 160 where H is 96, and its drafter."""

    def __init__(self, folder):
        from vllm.models.beam import DFlash2BeamForCausalLM

        self.folder = folder
        plain = {k: v for k, v in SCALED.items() if k not in ("output_multiplier", "final_logit_softcapping")}
        write_pair(folder / "pair", plain, architectures=[BEAM], **LAYERS)
        self.draft = folder / "wide"
        keys = json.loads((folder / "pair/draft/config.json").read_text())
        shapes = draft_shapes(keys) | {"fc.weight": (96, 2 * 160)}
        write(self.draft, keys, shapes, torch.Generator().manual_seed(2))
        self.config = config_of(folder / "pair/target", self.draft)
        # Refused for a real target, whose layers are all as wide as H.
        self.config.speculative_config.draft_model_config.hf_config.target_hidden_size = 160
        start_distributed(self.config)
        self.returned, load = [], DFlash2BeamForCausalLM.load_weights

        def kept(model, weights):
            return self.returned.append(load(model, weights)) or self.returned[-1]

        with patch.object(DFlash2BeamForCausalLM, "load_weights", kept):
            self.model = load_drafter(self.config)
        self.attentions = [layer.self_attn.attn for layer in self.model.model.layers]

    def bind(self, caches):
        for attention, cache in zip(self.attentions, caches):
            attention.kv_cache = cache
            attention.get_attn_backend = lambda: types.SimpleNamespace(get_name=lambda: "FLASH_ATTN")

    def store(self, slots):
        states = self.model.combine_hidden_states(features())
        self.model.precompute_and_store_context_kv(states, torch.arange(9), slots)


def start_distributed(config):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, get_distributed_init_method("127.0.0.1", get_open_port()), 0, "gloo")
        initialize_model_parallel(1, 1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from vllm.distributed import cleanup_dist_env_and_memory

    with torch.inference_mode():
        yield Subject(tmp_path_factory.mktemp("beam"))
    cleanup_dist_env_and_memory()


@pytest.fixture
def subject(loaded):
    """With new, empty caches."""
    loaded.bind([new_cache(), new_cache()])
    with torch.inference_mode():
        yield loaded


def features(width=320):
    return torch.randn(9, width, generator=torch.Generator().manual_seed(3))


def new_cache(block=16, dtype=torch.float32):
    return torch.zeros(4, block, 1, 64, dtype=dtype).transpose(1, 2)


def slots_of(tokens=9):
    return 5 + 2 * torch.arange(tokens)


def new_selector(subject, dtype):
    from vllm.config import set_current_vllm_config
    from vllm.models.beam.nvidia.dflash2 import DFlash2BeamCandidateSelector
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(subject.config), set_default_torch_dtype(dtype):
        selector = DFlash2BeamCandidateSelector(96, 150, 12, prefix="selector")
    for name, w in reference.load(subject.draft).weights.items():
        if name.startswith("candidate_selector."):
            selector.get_parameter(name.removeprefix("candidate_selector.")).data.copy_(w)
    projection = selector.hidden_projection
    projection.quant_method.process_weights_after_loading(projection)
    return selector


def selector_inputs(requests, seed):
    """Candidates, as compute_candidates returns them, states [requests * 3, 96], anchors."""
    generator = torch.Generator().manual_seed(seed)
    rows = requests * STEPS
    ids = torch.stack([torch.randperm(150, generator=generator)[:5] for _ in range(rows)])
    unary = torch.randn(rows, 5, generator=generator).sort(-1, descending=True).values
    hidden = torch.randn(rows, 96, generator=generator).bfloat16()
    return ids, unary, hidden, torch.randint(0, 150, (requests,), generator=generator).int()


def test_edges_match_float32(subject):
    """bf16 projections and codebooks, float32 sums: 2 requests, 3 steps, 5 candidates."""
    d = reference.load(subject.draft)
    ids, unary, hidden, anchors = selector_inputs(2, seed=4)
    got = new_selector(subject, torch.bfloat16)(ids, unary, hidden, anchors)
    wanted = torch.empty(2, STEPS, 5, 5)
    for row in range(2 * STEPS):
        request, step = divmod(row, STEPS)
        before = ids[row - 1].tolist() if step else [int(anchors[request])] * 5
        for i, token in enumerate(before):
            wanted[request, step, i] = reference.edge_scores(d, hidden[row].float(), ids[row], unary[row], token)
    scale = wanted.abs().max()
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() / scale < 1e-2


def test_greedy_walk_over_the_edges_is_the_walk_kernels(subject):
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import walk

    selector, requests = new_selector(subject, torch.bfloat16), 24
    ids, unary, hidden, anchors = selector_inputs(requests, seed=5)
    kernel = torch.zeros(requests, STEPS, dtype=torch.int64)
    slots = torch.arange(requests, dtype=torch.int32).repeat_interleave(STEPS)
    projected = selector.hidden_projection(hidden)
    codebooks = selector.predecessor_codebook, selector.successor_codebook
    positions, zeros = torch.zeros(requests * STEPS, dtype=torch.int64), torch.zeros(requests)
    walk(kernel, ids, unary, projected, *codebooks, anchors, slots, positions, zeros, zeros.long())
    scores = selector(ids, unary, hidden, anchors)
    ids, at, paths = ids.view(requests, STEPS, 5), torch.zeros(requests, dtype=torch.int64), []
    for step in range(STEPS):
        at = scores[torch.arange(requests), step, at].argmax(-1)
        paths.append(ids[torch.arange(requests), step, at])
    assert torch.equal(kernel, torch.stack(paths, 1))


METHODS = [
    "embed_input_ids",
    "forward",
    "combine_hidden_states",
    "precompute_and_store_context_kv",
    "load_weights",
    "get_draft_kv_cache_layer_names",
    "get_draft_attn_causal",
    "compute_logits",
    "compute_candidates",
]


def test_public_names(subject):
    model = subject.model
    assert [name for name in METHODS if not callable(getattr(model, name, None))] == []
    kind = type(model)
    assert (kind.has_own_embed_tokens, kind.has_own_lm_head, kind.draft_id_to_target_id) == (False, False, None)
    assert model.model.do_not_compile
    assert type(model.model).__name__ == "DFlash2BeamModel"
    assert type(model.model.candidate_selector).__name__ == "DFlash2BeamCandidateSelector"
    assert model.get_draft_attn_causal() == [False, False]


def test_layers_are_numbered_after_the_targets(subject):
    names = subject.model.get_draft_kv_cache_layer_names()
    assert names == ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"]


def stacked(model):
    """Shapes of the K/V projections and of the K-norm weights of all layers."""
    return [list(model._fused_kv_weight.shape), list(model._k_norm_weights.shape)]


def test_loading_returns_every_parameter(subject):
    """The two that are the target's included; then the stacked weights are there."""
    returned = subject.returned[0]
    assert returned == set(dict(subject.model.named_parameters())) and "lm_head.weight" in returned
    assert stacked(subject.model.model) == STACKED


def test_target_hidden_size_is_the_width_of_the_features_only(subject):
    """K and V of 2 layers, 9 tokens of 2 features of 160, through the one kernel."""
    d, slots = reference.load(subject.draft), slots_of()
    subject.store([slots, slots])
    states = reference.rms_norm(features() @ d.weights["fc.weight"].T, d.weights["hidden_norm.weight"], d.rms_norm_eps)
    for i, attention in enumerate(subject.attentions):
        stored = attention.kv_cache[slots // 16, :, slots % 16]
        wanted = reference.keys(d, f"layers.{i}.", states, torch.arange(9)), reference.values(d, f"layers.{i}.", states)
        torch.testing.assert_close(stored, torch.cat(wanted, -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("slots", [None, [None, None]])
def test_no_slots_write_nothing(subject, slots):
    subject.store(slots)
    assert not any(attention.kv_cache.any() for attention in subject.attentions)


def test_weights_that_nothing_loaded_are_stacked_at_first_use(subject):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config, messages = subject.config, []
    # Not through the loader: on a CPU it replaces the weights of a linear layer by packed ones.
    with set_current_vllm_config(config):
        model = initialize_model(
            config, model_config=config.speculative_config.draft_model_config, prefix="dummy"
        ).model
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm.model_executor.models.qwen3_dflash")
    logger.addHandler(handler)
    before = hasattr(model, "_fused_kv_weight")
    for _ in range(2):
        model.precompute_and_store_context_kv(torch.zeros(2, 96), torch.arange(2), None)
    logger.removeHandler(handler)
    assert not before and stacked(model) == STACKED
    assert sum("dummy weights" in message for message in messages) == 0


# What is refused before the drafter is even built: its config or the engine's. Further keys of the draft's
# config.json, arguments of the engine, what is set in its parallel config, and what is said.
BUILT = {
    "quantised draft": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}},
        {"dtype": "bfloat16"},
        {},
        "quantization_config",
    ),
    "attention bias": ({"attention_bias": True}, {}, {}, "attention_bias"),
    "decode context parallel": ({}, {}, {"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
    "prefill context parallel": ({}, {}, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
    "layers of two KV cache groups": ({"layer_types": ["sliding_attention", "full_attention"]}, {}, {}, "layer_types"),
}


def check(subject, folder, keys, arguments, parallel):
    from vllm.transformers_utils.configs.dflash2 import check_engine

    config = json.loads((subject.draft / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    engine_config = config_of(subject.folder / "pair/target", folder, load_format="dummy", **arguments)
    for key, value in parallel.items():  # one process cannot start two ranks
        setattr(engine_config.parallel_config, key, value)
    check_engine(engine_config)


@pytest.mark.parametrize("case", BUILT)
def test_refused_before_it_is_built(subject, tmp_path, case):
    *given, says = BUILT[case]
    with pytest.raises((NotImplementedError, ValueError), match=says):
        check(subject, tmp_path, *given)


def test_one_group_for_layers_of_two_kinds_is_served(subject, tmp_path):
    """--disable-hybrid-kv-cache-manager puts all layers into one."""
    mixed = {"layer_types": ["sliding_attention", "full_attention"]}
    check(subject, tmp_path, mixed, {"disable_hybrid_kv_cache_manager": True}, {})


def test_a_feature_width_is_refused(subject):
    with pytest.raises(ValueError) as error:
        subject.model.combine_hidden_states(features(321))
    for text in ("320", "321", "target_layer_ids"):
        assert text in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_selector_input_that_is_not_bfloat16_is_refused(subject, dtype):
    ids, unary, hidden, anchors = selector_inputs(1, seed=6)
    selector = new_selector(subject, dtype)
    with pytest.raises(ValueError, match="bfloat16") as error:
        selector(ids, unary, hidden.to(dtype), anchors)
    assert str(dtype) in str(error.value)


SLOTS = {
    "two slot mappings": [slots_of(), slots_of()],
    "slots of one layer only": [slots_of(), None],
    "slots of the other layer only": [None, slots_of()],
    "slots of two lengths": [slots_of(), slots_of()[:8]],
}


@pytest.mark.parametrize("case", SLOTS)
def test_layers_must_share_their_slots(subject, case):
    with pytest.raises(ValueError, match="different slot mappings"):
        subject.store(SLOTS[case])


CACHES = {
    "shapes": (new_cache(block=32), "(4, 1, 16, 64)", "(4, 1, 32, 64)"),
    "strides": (new_cache(block=17)[:, :, :16], "strides"),
    "dtypes": (new_cache(dtype=torch.bfloat16), "torch.bfloat16"),
}


@pytest.mark.parametrize("case", CACHES)
def test_layers_must_have_caches_alike(subject, case):
    cache, *named = CACHES[case]
    subject.bind([new_cache(), cache])
    with pytest.raises(ValueError, match="caches differ") as error:
        subject.store(slots_of())
    for text in named:
        assert text in str(error.value)


def test_layers_must_have_caches_of_one_format(subject, monkeypatch):
    monkeypatch.setattr(subject.attentions[1], "kv_cache_dtype", "fp8_e4m3")
    with pytest.raises(ValueError, match=r"caches differ.*fp8_e4m3"):
        subject.store(slots_of())


def test_a_shared_cache_is_refused(subject, monkeypatch):
    monkeypatch.setattr(subject.attentions[1], "kv_sharing_target_layer_name", "model.layers.0.self_attn.attn")
    with pytest.raises(NotImplementedError) as error:
        subject.store(slots_of())
    for name in ("model.layers.4.self_attn.attn", "model.layers.0.self_attn.attn"):
        assert name in str(error.value)
