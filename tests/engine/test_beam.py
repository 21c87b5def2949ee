"""Beam's drafter: drafts as the Qwen3 one does, scores every edge, and refuses what it cannot serve.

Engines run in processes of their own. What needs no engine is probed in one process, which is this
file run as a script under Triton's interpreter; it prints what each probe found as one line of JSON.
"""

import json
import logging
import types
from pathlib import Path

import pytest
import torch

from tests.support import reference
from tests.support.answers import Answers
from tests.support.pair import draft_shapes, write, write_pair
from tests.support.trees import REPO, TINY

BEAM = "DFlash2BeamDraftModel"
STEPS = 3
SCALED = {
    "mask_token_id": 149,
    "target_layer_ids": [0, 2],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 5,
    "input_embedding_scale": 1.5,
    "output_multiplier": 0.7,
    "final_logit_softcapping": 3.0,
}
STACKED = [[2 * 2 * 32, 96], [2, 32]]  # the K/V projections and K-norm weights of 2 layers
LAYERS = {
    "num_hidden_layers": 2,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 8,
    "use_sliding_window": True,
    "block_size": 4,
}


def beam_draft(folder):
    """A folder with the tiny drafter, its architecture string changed and nothing else."""
    config = json.loads((TINY / "draft/config.json").read_text()) | {"architectures": [BEAM]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(TINY / "draft/model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engine(run_patched, tmp_path_factory):
    """engine(draft, ...) -> what tests/support/engine.py wrote down of one greedy run."""

    def run(target, draft, prompts, tokens, steps):
        out = tmp_path_factory.mktemp("engine") / "out.pt"
        job = {
            "target": str(target),
            "draft": str(draft),
            "prompts": prompts,
            "runs": [{"temperature": 0, "max_tokens": tokens}],
            "speculative": {"num_speculative_tokens": steps},
        }
        run_patched(REPO / "tests/support/engine.py", json.dumps(job), out)
        return torch.load(out)["runs"][0]

    return run


@pytest.fixture(scope="module")
def tiny_runs(engine, tmp_path_factory):
    """Two prompts x 24 tokens with the trained drafter, as Beam and as Qwen3."""
    prompts = json.loads((TINY / "prompts.json").read_text())["prompts"][:2]
    drafts = beam_draft(tmp_path_factory.mktemp("beam")), TINY / "draft"
    return [engine(TINY / "target", draft, prompts, 24, 7) for draft in drafts]


def test_the_architecture_string_changes_no_draft(tiny_runs):
    beam, qwen3 = tiny_runs
    assert len(beam["drafts"]) > 5
    for ours, theirs in zip(beam["drafts"], qwen3["drafts"], strict=True):
        assert (ours["anchor"], ours["position"], ours["tokens"]) == (
            theirs["anchor"],
            theirs["position"],
            theirs["tokens"],
        )
        assert torch.equal(ours["ids"], theirs["ids"]) and torch.equal(ours["unary"], theirs["unary"])


def test_text_and_acceptance_are_the_qwen3_drafters(tiny_runs):
    beam, qwen3 = tiny_runs
    assert beam["num_accepted"] > 0
    for key in ("texts", "num_drafts", "num_accepted"):
        assert beam[key] == qwen3[key]


@torch.no_grad()
def test_scaled_and_capped_drafts_match_float32(engine, tmp_path):
    """input_embedding_scale, output_multiplier and final_logit_softcapping, one draft at a time."""
    folder = tmp_path / "pair"
    write_pair(folder, SCALED, architectures=[BEAM], **LAYERS)
    prompt = torch.randint(0, 148, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    run = engine(folder / "target", folder / "draft", [prompt], 6, STEPS)
    t, d = reference.load(folder / "target"), reference.load(folder / "draft")
    ids = prompt + run["texts"][0]
    context = reference.target_forward(t, torch.tensor(ids), SCALED["target_layer_ids"])[1]
    drafts = [draft for draft in run["drafts"] if draft["position"] < len(ids)]
    assert len(drafts) > 1
    for draft in drafts:
        at = draft["position"]
        wanted = reference.draft_block(d, t, ids[at], at, context[:at], STEPS, path=draft["tokens"])
        torch.testing.assert_close(draft["unary"], wanted[2], atol=1e-3, rtol=0)
        assert draft["tokens"] == reference.draft_block(d, t, ids[at], at, context[:at], STEPS)[0]


@pytest.fixture(scope="module")
def found(run_patched):
    """found(probe) -> what it saw in the patched vLLM."""
    return Answers(run_patched(Path(__file__), interpret=True).stdout)


def test_edges_match_float32(found):
    """bf16 projections and codebooks, float32 sums: 2 requests, 3 steps, 5 candidates."""
    shape, difference = found("edges")
    assert shape == [2, 3, 5, 5] and difference < 1e-2


def test_greedy_walk_over_the_edges_is_the_walk_kernels(found):
    kernel, over_edges = found("walks")
    assert len(kernel) == 24 and kernel == over_edges


def test_public_names(found):
    assert found("names") == {
        "has_own_embed_tokens": False,
        "has_own_lm_head": False,
        "draft_id_to_target_id": None,
        "compiled": False,
        "selector": "DFlash2BeamCandidateSelector",
        "model": "DFlash2BeamModel",
        "causal": [False, False],
        "methods missing": [],
    }


def test_layers_are_numbered_after_the_targets(found):
    assert found("layer_names") == ["model.layers.3.self_attn.attn", "model.layers.4.self_attn.attn"]


def test_loading_returns_every_parameter(found):
    """The two that are the target's included; then the stacked weights are there."""
    returned, parameters, after = found("loaded")
    assert returned == parameters and "lm_head.weight" in returned
    assert after == STACKED


def test_target_hidden_size_is_the_width_of_the_features_only(found):
    """K and V of 2 layers, 9 tokens of 2 features of 160, through the one kernel."""
    assert found("context")["difference"] < 1e-4


def test_no_slots_write_nothing(found):
    assert found("context")["written without slots"] == [0.0, 0.0]


def test_weights_that_nothing_loaded_are_stacked_at_first_use(found):
    before, warnings, after = found("dummy")
    assert not before and after == STACKED
    assert warnings == 0


# What is refused: the error, and what it must name.
REFUSED = {
    "quantised draft": ("NotImplementedError", "quantization_config"),
    "attention bias": ("NotImplementedError", "attention_bias"),
    "decode context parallel": ("NotImplementedError", "decode_context_parallel_size is 2"),
    "prefill context parallel": ("NotImplementedError", "prefill_context_parallel_size is 2"),
    "layers of two KV cache groups": ("NotImplementedError", "layer_types"),
    "feature width": ("ValueError", "320", "321", "target_layer_ids"),
    "float32 selector input": ("ValueError", "bfloat16", "torch.float32"),
    "float16 selector input": ("ValueError", "bfloat16", "torch.float16"),
    "two slot mappings": ("ValueError", "different slot mappings"),
    "slots of one layer only": ("ValueError", "different slot mappings"),
    "slots of the other layer only": ("ValueError", "different slot mappings"),
    "slots of two lengths": ("ValueError", "different slot mappings"),
    "cache shapes": ("ValueError", "caches differ", "(4, 1, 16, 64)", "(4, 1, 32, 64)"),
    "cache strides": ("ValueError", "caches differ", "strides"),
    "cache dtypes": ("ValueError", "caches differ", "torch.bfloat16"),
    "cache formats": ("ValueError", "caches differ", "fp8_e4m3"),
    "KV sharing": ("NotImplementedError", "model.layers.4.self_attn.attn", "model.layers.0.self_attn.attn"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(found, case):
    error = found("refusals")[case]
    assert error is not None, "it was served"
    kind, *named = REFUSED[case]
    assert error.startswith(kind + ": ")
    for text in named:
        assert text in error


def test_one_group_for_layers_of_two_kinds_is_served(found):
    """--disable-hybrid-kv-cache-manager puts all layers into one."""
    assert found("refusals")["layers of two kinds in one group"] is None


# The probes.


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
        DFlash2BeamForCausalLM.load_weights = lambda m, w: self.returned.append(load(m, w)) or self.returned[-1]
        self.model = load_drafter(self.config)
        self.attentions = [layer.self_attn.attn for layer in self.model.model.layers]
        self.bind([new_cache(), new_cache()])

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


def edges(subject):
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
    return list(got.shape), float((got - wanted).abs().max() / scale)


def walks(subject):
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import walk

    selector, requests = new_selector(subject, torch.bfloat16), 24
    ids, unary, hidden, anchors = selector_inputs(requests, seed=5)
    kernel = torch.zeros(requests, STEPS, dtype=torch.int64)
    slots = torch.arange(requests, dtype=torch.int32).repeat_interleave(STEPS)
    walk(kernel, ids, unary, selector.hidden_projection(hidden), selector.predecessor_codebook,
         selector.successor_codebook, anchors, slots, torch.zeros(requests * STEPS, dtype=torch.int64),
         torch.zeros(requests), torch.zeros(requests, dtype=torch.int64))  # fmt: skip
    scores = selector(ids, unary, hidden, anchors)
    ids, at, paths = ids.view(requests, STEPS, 5), torch.zeros(requests, dtype=torch.int64), []
    for step in range(STEPS):
        at = scores[torch.arange(requests), step, at].argmax(-1)
        paths.append(ids[torch.arange(requests), step, at])
    return kernel.tolist(), torch.stack(paths, 1).tolist()


def names(subject):
    model = subject.model
    documented = [
        "embed_input_ids",
        "forward",
        "combine_hidden_states",
        "precompute_and_store_context_kv",
        "load_weights",
    ]
    documented += ["get_draft_kv_cache_layer_names", "get_draft_attn_causal", "compute_logits", "compute_candidates"]
    missing = [name for name in documented if not callable(getattr(model, name, None))]
    return {
        **{
            key: getattr(type(model), key)
            for key in ("has_own_embed_tokens", "has_own_lm_head", "draft_id_to_target_id")
        },
        "compiled": not model.model.do_not_compile,
        "selector": type(model.model.candidate_selector).__name__,
        "model": type(model.model).__name__,
        "causal": model.get_draft_attn_causal(),
        "methods missing": missing,
    }


def layer_names(subject):
    return subject.model.get_draft_kv_cache_layer_names()


def loaded(subject):
    return sorted(subject.returned[0]), sorted(dict(subject.model.named_parameters())), stacked(subject.model.model)


def stacked(model):
    """Shapes of the K/V projections and of the K-norm weights of all layers."""
    return [list(model._fused_kv_weight.shape), list(model._k_norm_weights.shape)]


def context(subject):
    d, slots = reference.load(subject.draft), slots_of()
    subject.bind([new_cache(), new_cache()])
    subject.store(None)
    subject.store([None, None])
    untouched = [float(attention.kv_cache.abs().max()) for attention in subject.attentions]
    subject.store([slots, slots])
    states = reference.rms_norm(features() @ d.weights["fc.weight"].T, d.weights["hidden_norm.weight"], d.rms_norm_eps)
    differences = []
    for i, attention in enumerate(subject.attentions):
        stored = attention.kv_cache[slots // 16, :, slots % 16]
        wanted = reference.keys(d, f"layers.{i}.", states, torch.arange(9)), reference.values(d, f"layers.{i}.", states)
        differences.append(float((stored - torch.cat(wanted, -1)).abs().max()))
    return {"difference": max(differences), "written without slots": untouched}


def dummy(subject):
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
    return before, sum("dummy weights" in message for message in messages), stacked(model)


def refusals(subject):
    return (
        built_refusals(subject)
        | stored_refusals(subject)
        | {
            "feature width": error_of(lambda: subject.model.combine_hidden_states(features(321))),
            "float32 selector input": selector_refusal(subject, torch.float32),
            "float16 selector input": selector_refusal(subject, torch.float16),
        }
    )


def selector_refusal(subject, dtype):
    ids, unary, hidden, anchors = selector_inputs(1, seed=6)
    selector = new_selector(subject, dtype)
    return error_of(lambda: selector(ids, unary, hidden.to(dtype), anchors))


def built_refusals(subject):
    """Of drafters that are not even built: what their config or the engine's is refused for."""
    from vllm.transformers_utils.configs.dflash2 import check_engine

    mixed = {"layer_types": ["sliding_attention", "full_attention"]}

    def build(arguments=(), parallel=(), **keys):
        folder = subject.folder / f"refused-{len(list(subject.folder.iterdir()))}"
        folder.mkdir()
        config = json.loads((subject.draft / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))

        def config():
            engine_config = config_of(subject.folder / "pair/target", folder, load_format="dummy", **dict(arguments))
            for key, value in dict(parallel).items():  # one process cannot start two ranks
                setattr(engine_config.parallel_config, key, value)
            check_engine(engine_config)

        return error_of(config)

    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    return {
        "quantised draft": build({"dtype": "bfloat16"}, quantization_config=awq),
        "attention bias": build(attention_bias=True),
        "decode context parallel": build(parallel={"decode_context_parallel_size": 2}),
        "prefill context parallel": build(parallel={"prefill_context_parallel_size": 2}),
        "layers of two KV cache groups": build(**mixed),
        "layers of two kinds in one group": build({"disable_hybrid_kv_cache_manager": True}, **mixed),
    }


def stored_refusals(subject):
    """Of slots and caches, when context K/V is to be stored."""
    one, other = slots_of(), slots_of()
    found = {
        "two slot mappings": error_of(lambda: subject.store([one, other])),
        "slots of one layer only": error_of(lambda: subject.store([one, None])),
        "slots of the other layer only": error_of(lambda: subject.store([None, one])),
        "slots of two lengths": error_of(lambda: subject.store([one, one[:8]])),
    }
    caches = {
        "cache shapes": new_cache(block=32),
        "cache strides": new_cache(block=17)[:, :, :16],
        "cache dtypes": new_cache(dtype=torch.bfloat16),
    }
    for name, cache in caches.items():
        subject.bind([new_cache(), cache])
        found[name] = error_of(lambda: subject.store(one))
    subject.bind([new_cache(), new_cache()])
    last = subject.attentions[1]
    for name, key, value in (
        ("cache formats", "kv_cache_dtype", "fp8_e4m3"),
        ("KV sharing", "kv_sharing_target_layer_name", "model.layers.0.self_attn.attn"),
    ):
        before = getattr(last, key)
        setattr(last, key, value)
        found[name] = error_of(lambda: subject.store(one))
        setattr(last, key, before)
    return found


def error_of(action):
    """The error that `action` raises, as text, or None."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@torch.inference_mode()
def main(folder):
    import traceback

    subject, answers = Subject(Path(folder)), {}
    for probe in (edges, walks, names, layer_names, loaded, context, dummy, refusals):
        try:
            answers[probe.__name__] = probe(subject)
        except Exception:
            answers[probe.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(answers))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
