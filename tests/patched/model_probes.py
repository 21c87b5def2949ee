"""What test_model.py runs against the patched vLLM: imports, the registry, configs, and the walk.

model_probes.py OUT    OUT is read with torch.load: {probe: what it found}
"""

from tests.support import interpret  # noqa: F401, I001  before vLLM
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import _site
import patches
from tests.support.trees import REPO

GOOD = {
    "mask_token_id": 257,
    "target_layer_ids": [0, 2, 3],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 32,
    "selector_top_k": 16,
}
# key, a value that cannot be served (None: the key is left out)
BAD = [
    *((key, None) for key in GOOD),
    ("conv_group_size", 24),
    ("conv_group_size", 0),
    ("conv_kernel_size", 0),
    ("selector_top_k", 321),
    ("selector_top_k", 0),
    ("selector_top_k", -1),
    ("selector_rank", 0),
    ("mask_token_id", 320),
    ("mask_token_id", -1),
    ("target_layer_ids", []),
    ("output_multiplier", 0.0),
    ("output_multiplier", -1.0),
    ("use_aux_hidden_state", False),
]


def touched_modules():
    files = {hunk.file for patch in patches.PATCHES for hunk in patch.hunks}
    files |= set(_site.list_installed(REPO, patches.INSTALLED).values())
    return sorted(file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in files)


def imports():
    """What importing each touched module raises; not there where it raises nothing."""
    errors = {}
    for module in touched_modules():
        try:
            importlib.import_module(module)
        except Exception as error:
            errors[module] = repr(error)
    return errors


def registry():
    """The class that an architecture of the draft resolves to."""
    from vllm.model_executor.models.registry import ModelRegistry

    found = ModelRegistry._try_load_model_cls("DFlash2DraftModel")
    return f"{found.__module__}.{found.__name__}"


def refusals():
    """(key, value) -> what reading a dflash_config with that value raises."""
    from vllm.transformers_utils.configs.dflash2 import DFlash2Config

    def attempt(key, value):
        given = {**GOOD, key: value} if value is not None else {k: v for k, v in GOOD.items() if k != key}
        try:
            DFlash2Config.from_hf_config(SimpleNamespace(dflash_config=given, hidden_size=256, vocab_size=320))
        except ValueError as error:
            return str(error)

    return [(key, value, attempt(key, value)) for key, value in BAD]


def walk_inputs(requests, steps, k, rank, vocab, seed=0):
    """Random arguments of `walk` for as many requests in as many slots, by name."""
    g = torch.Generator().manual_seed(seed)
    rows = requests * steps

    def randn(*shape):
        return torch.randn(shape, generator=g)

    # Candidates with a stride, as the k best of several ranks' are.
    ids = torch.stack([torch.randperm(vocab, generator=g)[: k + 1] for _ in range(rows)])[:, :k]
    return {
        "draft_tokens": torch.zeros(requests, steps, dtype=torch.int64),
        "candidate_ids": ids,
        "unary": randn(rows, k + 1)[:, :k],
        "projected": randn(rows, rank) / rank**0.5,
        "predecessor_codebook": randn(vocab, rank),
        "successor_codebook": randn(vocab, rank),
        "anchors": torch.randint(0, vocab, (requests,), generator=g, dtype=torch.int32),
        "idx_mapping": torch.arange(requests, dtype=torch.int32).repeat_interleave(steps),
        "sample_pos": 100 + torch.arange(steps).repeat(requests),
        "temperature": torch.zeros(requests),
        "seeds": torch.arange(requests) + 3,
        "ids": torch.zeros(requests, steps, k, dtype=torch.int64),
        "scores": torch.full((requests, steps, k), -torch.inf),
    }


def walked(given, **others):
    """The arguments after the walk has run, and the proposal as rows of the vocabulary."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.rejection import SparseProposal
    from vllm.v1.worker.gpu.spec_decode.dflash2.walk import walk

    vocab = len(given["predecessor_codebook"])
    cached = {name: given[name] for name in ("ids", "scores")}
    walk(
        **{name: value for name, value in given.items() if name not in (*cached, "draft_logits")},
        proposal=SparseProposal(**cached, vocab_size=vocab),
        **others,
    )
    rows = torch.full((*given["ids"].shape[:2], vocab), -torch.inf)
    return given | {"draft_logits": rows.scatter_reduce_(2, given["ids"], given["scores"], "amax")}


def dense_walks():
    """Two rounds that also keep the dense form: (that form, the sparse one as rows)."""
    dense = torch.full((3, 2, 40), -torch.inf)
    first = walk_inputs(3, 2, 3, 8, 40)
    first["temperature"] = torch.tensor([0.0, 0.6, 1.3])
    walked(first, draft_logits=dense)
    second = walk_inputs(3, 2, 3, 8, 40, seed=1) | {name: first[name] for name in ("ids", "scores")}
    return dense, walked(second, draft_logits=dense)["draft_logits"]


def truncated_walks():
    """One greedy request and four sampled ones: top-k 2, top-p 0.5, min-p 0.6, and all three at nothing."""
    given = walk_inputs(5, 2, 8, 8, 40)
    given["temperature"] = torch.tensor([0.0, 1.0, 1.0, 0.7, 1.0])
    truncation = (
        torch.tensor([1, 2, 40, 40, 40], dtype=torch.int32),
        torch.tensor([0.1, 1.0, 0.5, 1.0, 1.0]),
        torch.tensor([0.9, 0.0, 0.0, 0.6, 0.0]),
    )
    return walked(given, truncation=truncation)


def greedy_walks():
    """K and rank with and without powers of two, one step and several."""
    shapes = [(1, 1, 8), (3, 3, 12), (4, 5, 32), (2, 16, 20)]
    return [walked(walk_inputs(2, steps, k, rank, 40)) for steps, k, rank in shapes]


def sampled_walks():
    """Two rounds in the same slots at several temperatures; the second leaves nothing of the first."""
    first = walk_inputs(3, 2, 3, 8, 40)
    first["temperature"] = torch.tensor([0.0, 0.6, 1.3])
    walked(first)
    second = walk_inputs(3, 2, 3, 8, 40, seed=1)
    kept = {name: first[name] for name in ("temperature", "ids", "scores")}
    return walked(second | kept)


def lost_rows():
    """NaN and infinite scores, ids and anchors past the vocabulary, and a padded request."""
    given = walk_inputs(4, 2, 4, 8, 40)
    given["temperature"] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    given["unary"][0:2] = torch.nan
    given["unary"][2] = torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf])
    given["candidate_ids"][4:6] = torch.tensor([40, 41, -1, 7])
    given["anchors"][2] = 40
    given["idx_mapping"][6:] = -1
    return walked(given)


def poisoned_rows():
    """The same walk with every predecessor row that it has no business with set to NaN."""
    clean = walked(walk_inputs(1, 3, 5, 8, 40))
    dirty = walk_inputs(1, 3, 5, 8, 40)
    needed = [int(dirty["anchors"][0]), *clean["draft_tokens"][0, :-1].tolist()]
    unneeded = torch.ones(40, dtype=torch.bool)
    unneeded[needed] = False
    dirty["predecessor_codebook"][unneeded] = torch.nan
    return clean["draft_tokens"], walked(dirty)["draft_tokens"]


PROBES = (
    imports,
    registry,
    refusals,
    greedy_walks,
    sampled_walks,
    dense_walks,
    truncated_walks,
    lost_rows,
    poisoned_rows,
)

if __name__ == "__main__":
    torch.save({probe.__name__: probe() for probe in PROBES}, Path(sys.argv[1]))
