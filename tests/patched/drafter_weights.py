"""What a drafter makes of the tensors that it is given, at the start and later, in the patched vLLM; no engine.

drafter_weights.py OUT    OUT is read with torch.load: {probe: what it found}
"""

from tests.support import interpret  # noqa: F401, I001  before vLLM
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.trees import TINY
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.network_utils import get_distributed_init_method, get_open_port
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

MASK = 257
FIRST = load_file(TINY / "draft/model.safetensors")
LATER = {name: (1.5 * w.float() + 0.01).bfloat16() for name, w in FIRST.items()}
TARGETS = load_file(TINY / "target/model.safetensors")
EMBEDDING, HEAD = TARGETS["model.embed_tokens.weight"], TARGETS["lm_head.weight"]


def config(draft=TINY / "draft", **arguments):
    return EngineArgs(
        model=str(TINY / "target"),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        speculative_config={"model": str(draft)},
        **arguments,
    ).create_engine_config()


class Drafters:
    """Drafters of the tiny pair. Each has attention layers of its own name, as vLLM demands."""

    def __init__(self):
        self.config = config()
        self.count = 0
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, get_distributed_init_method("127.0.0.1", get_open_port()), 0, "gloo")
            initialize_model_parallel(1, 1)
            self.target = get_model(vllm_config=self.config)

    def built(self):
        """One without weights."""
        self.count += 1
        draft_config = self.config.speculative_config.draft_model_config
        with set_current_vllm_config(self.config):
            return initialize_model(self.config, model_config=draft_config, prefix=f"drafter{self.count}")

    def started(self, weights=FIRST):
        """One that has started, but whose linear layers keep their weights, as on a GPU."""
        drafter = self.built()
        drafter.load_weights(weights.items())
        drafter.process_weights_after_loading()
        return drafter

    def loaded(self, draft=TINY / "draft", **arguments):
        """One as the worker loads it, from a folder and beside the target."""
        engine_config = config(draft, **arguments)
        with set_current_vllm_config(engine_config):
            return load_dflash_model(self.target, engine_config)


def buckets(weights, size=2):
    names = list(weights)
    return [{name: weights[name] for name in names[i : i + size]} for i in range(0, len(names), size)]


def context_kv(drafter):
    """K and V that the drafter writes of ten states, layer by layer, and the K of DFlash's own path."""
    model = drafter.model
    states = torch.randn(10, 256, generator=torch.Generator().manual_seed(1))
    model.precompute_and_store_context_kv(states, torch.arange(10), None)  # as a dummy run
    k, v = model._project_context_kv(states, 10, model._num_attn_layers, model._num_kv_heads, model._head_dim)
    return torch.stack([model._normalize_context_k(k), v, model.context_writer.k_norm_weights.expand_as(k)])


def error(action):
    try:
        action()
    except ValueError as problem:
        return str(problem)
    return None


def parts(drafters):
    """Context K/V of a drafter given other weights two tensors at a time, and of one that started with them."""
    drafter = drafters.started()
    before = context_kv(drafter)
    for bucket in buckets(LATER):
        drafter.load_weights(bucket.items())
    parameters = dict(drafter.named_parameters())
    wanted = drafters.started(LATER)
    same = {name: torch.equal(parameters[name], p) for name, p in wanted.named_parameters() if "embed" not in name}
    same.pop("lm_head.weight")
    return {"before": before, "after": context_kv(drafter), "wanted": context_kv(wanted), "same": same}


def reloaded(drafters):
    """The same through vLLM's reload, which the engine's weight transfer uses, with linear layers packed."""
    drafter = drafters.loaded()
    before = context_kv(drafter)
    draft_config = drafters.config.speculative_config.draft_model_config
    with set_current_vllm_config(drafters.config):
        initialize_layerwise_reload(drafter)
        for bucket in buckets(LATER):
            drafter.load_weights(bucket.items())
        finalize_layerwise_reload(drafter, draft_config)
    return {"before": before, "after": context_kv(drafter), "wanted": context_kv(drafters.started(LATER))}


def faults(drafters):
    """What is said to wrong tensors at the start, and later."""
    fresh, drafter = drafters.built(), drafters.started()
    k = "layers.0.self_attn.k_proj.weight"
    ones = torch.ones(320, dtype=torch.bool)
    return {
        "start, one missing": error(lambda: fresh.load_weights((n, w) for n, w in FIRST.items() if n != k)),
        "later, one of 36": error(lambda: drafter.load_weights([(k, FIRST[k])])),
        "later, none": error(lambda: drafter.load_weights([])),
        "later, unknown": error(lambda: drafter.load_weights([("layers.9.mlp.up_proj.weight", FIRST[k])])),
        "later, misshapen": error(lambda: drafter.load_weights([(k, FIRST[k][:-1])])),
        "identity maps": error(
            lambda: fresh.load_weights((FIRST | {"t2d": ones, "d2t": torch.zeros(320, dtype=torch.long)}).items())
        ),
        "t2d": error(lambda: fresh.load_weights((FIRST | {"t2d": ones.logical_not()}).items())),
        "d2t": error(lambda: fresh.load_weights((FIRST | {"d2t": torch.arange(320)}).items())),
        "short t2d": error(lambda: fresh.load_weights((FIRST | {"t2d": ones[:100]}).items())),
        "embedding": error(lambda: fresh.load_weights((FIRST | {"embed_tokens.weight": EMBEDDING[:100]}).items())),
    }


def write_drafter(folder, tensors=(), mask_embedding=None):
    place = Path(folder, "draft")
    place.mkdir()
    shutil.copyfile(TINY / "draft/config.json", place / "config.json")
    save_file(FIRST | dict(tensors), place / "model.safetensors", {"format": "pt"})
    if mask_embedding is not None:
        torch.save(mask_embedding, place / "mask_embedding.pt")
    return place


def vocabulary(drafters):
    """Which of a drafter's embedding and LM head are the target's, by what its checkpoint has of them."""
    target, found = drafters.target, {}
    cases = {
        "none": {},
        "the target's": {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD},
        "an embedding": {"embed_tokens.weight": EMBEDDING + 1},
        "a head": {"lm_head.weight": HEAD + 1},
    }
    for name, tensors in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            drafter = drafters.loaded(write_drafter(folder, tensors))
        embedding, head = drafter.model.embed_tokens, drafter.lm_head
        shared = embedding is target.model.embed_tokens, head is target.lm_head
        own = embedding.weight.data, head.weight.data
        wanted = tensors.get("embed_tokens.weight", EMBEDDING).float(), tensors.get("lm_head.weight", HEAD).float()
        right = [torch.equal(a[:320], b) for a, b in zip(own, wanted, strict=True)]
        # Later weights of them reach the drafter's own only.
        drafter.load_weights([("embed_tokens.weight", EMBEDDING + 2)])
        kept = torch.equal(target.model.embed_tokens.weight[:320], EMBEDDING.float())
        taken = torch.equal(embedding.weight[:320], (EMBEDDING + 2).float())
        found[name] = {"shared": shared, "right": right, "target kept": kept, "later taken": taken}
    return found


def mask_embeddings(drafters):
    """Embeddings of the mask token and of another, without and with a mask_embedding.pt."""
    own = torch.randn(256, generator=torch.Generator().manual_seed(2))
    found, ids = {"own": own, "table": EMBEDDING[[MASK, 5]].float()}, torch.tensor([MASK, 5])
    cases = {
        "none": None,
        "a tensor": own,
        "a dict": {"embedding": own[None], "mask_token_id": MASK},
        "of another token": {"embedding": own, "mask_token_id": 3},
        "too short": own[:100],
    }
    for name, content in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            place = write_drafter(folder, mask_embedding=content)
            try:
                found[name] = drafters.loaded(place).embed_input_ids(ids)
            except ValueError as problem:
                found[name] = str(problem)
    found["target"] = drafters.target.model.embed_tokens(ids)
    return found


def dummies(drafters):
    """Context K/V of a drafter whose weights are dummies, and of the projections that its layers then have."""
    drafter = drafters.loaded(load_format="dummy")
    attention = drafter.model.layers[1].self_attn
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    qkv, _ = attention.qkv_proj(x)
    rows = 2 * drafter.model._kv_size
    return {
        "projected": torch.nn.functional.linear(x, drafter.model._fused_kv_weight[rows : 2 * rows]),
        "wanted": qkv[:, attention.q_size :],
        "started": drafter.started,
    }


PROBES = (parts, reloaded, faults, vocabulary, mask_embeddings, dummies)

if __name__ == "__main__":
    with torch.inference_mode():
        subject = Drafters()
        torch.save({probe.__name__: probe(subject) for probe in PROBES}, sys.argv[1])
