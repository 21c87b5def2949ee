"""What test_fixes_runtime.py runs against the patched vLLM, in one process under Triton's interpreter.

Prints one line of JSON: {probe: what it found, or {"error": type and text}}. A probe only reports;
the test decides. `python runtime_probes.py [probe ...]`, all of them without arguments.
"""

from tests.support import interpret  # noqa: I001  before vLLM
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace as Namespace

import numpy as np
import torch

from vllm.engine.arg_utils import EngineArgs

TINY = Path(interpret.__file__).parent.parent.parent / "demo/tiny"
PAD = -1


def engine_config(steps=7, draft=TINY / "draft", **arguments):
    """The engine's config for the tiny target and the drafter in folder `draft`; none for 0 steps."""
    speculative = {"method": "dflash", "model": str(draft), "num_speculative_tokens": steps}
    return EngineArgs(
        model=str(TINY / "target"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config=speculative if steps else None,
        **{"max_model_len": 256, **arguments},
    ).create_engine_config()


@contextlib.contextmanager
def drafter(**keys):
    """A folder with the tiny drafter's config.json, `keys` replaced in it; no weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((TINY / "draft" / "config.json").read_text()) | keys
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder


def refusal(make):
    """The error that `make` raises, as text, or what it returned."""
    try:
        return {"served": make()}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# --- the inputs of one draft (B4) -------------------------------------------------------------


def reference_inputs(requests, tables, block_size, rows, limit, from_anchor):
    """What _prepare_dflash_inputs_kernel must write, in plain Python.

    requests  (first position, scheduled tokens, rejected tokens) each
    tables    page table of each
    rows      query rows a request
    """

    def slot(table, position, live):
        page = table[position // block_size] if live and position < limit else 0
        return page * block_size + position % block_size if page else PAD

    wanted = {"context": [], "context_slots": [], "positions": [], "slots": [], "lengths": [], "samples": [], "ids": []}
    for index, ((first, scheduled, rejected), table) in enumerate(zip(requests, tables)):
        last = first + scheduled - rejected - 1
        for j in range(scheduled):
            wanted["context"].append(first + j if j < scheduled - rejected else None)
            wanted["context_slots"].append(slot(table, first + j, j < scheduled - rejected))
        for row in range(rows):
            position = last + 1 + row
            wanted["positions"].append(min(position, limit - 1))
            wanted["slots"].append(slot(table, position, True))
            wanted["ids"].append(1000 + index if row == 0 else 7)
            if from_anchor or row:
                wanted["samples"].append((index * rows + row, position + from_anchor, index))
        wanted["lengths"].append(min(last + 1 + rows, limit))
    return wanted


def written_inputs(requests, tables, block_size, rows, steps, limit, from_anchor):
    """The same from the kernel, with rows of canaries around the page tables it is given."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

    n, width = len(requests), len(tables[0])
    spare = 2  # request slots and rows that are not used in this batch
    pages = torch.full((n + 2, width), CANARY, dtype=torch.int32)
    pages[1 : n + 1] = torch.tensor(tables, dtype=torch.int32)
    scheduled = np.array([request[1] for request in requests], dtype=np.int32)
    starts = torch.from_numpy(np.concatenate([[0], scheduled.cumsum()]).astype(np.int32))
    context = int(starts[-1])
    slots_of_rows = torch.full(((n + spare) * rows,), CANARY, dtype=torch.int64)
    out = {
        "context": torch.full((context,), CANARY, dtype=torch.int64),
        "context_slots": torch.full((context,), CANARY, dtype=torch.int64),
        "indices": torch.full(((n + spare) * steps,), CANARY, dtype=torch.int64),
        "pos": torch.full(((n + spare) * steps,), CANARY, dtype=torch.int64),
        "mapping": torch.full(((n + spare) * steps,), CANARY, dtype=torch.int32),
    }
    buffers = Namespace(
        input_ids=torch.zeros((n + spare) * rows, dtype=torch.int32),
        positions=torch.zeros((n + spare) * rows, dtype=torch.int64),
        query_start_loc=torch.zeros(n + spare + 1, dtype=torch.int32),
        seq_lens=torch.zeros(n + spare, dtype=torch.int32),
    )
    positions = [first + j for first, count, _ in requests for j in range(count)]
    prepare_dflash_inputs(
        buffers,
        slots_of_rows,
        out["context"],
        out["context_slots"],
        out["indices"],
        out["pos"],
        out["mapping"],
        torch.zeros(n + spare),
        torch.zeros(n + spare, dtype=torch.int64),
        Namespace(
            num_reqs=n,
            num_scheduled_tokens=scheduled,
            positions=torch.tensor(positions, dtype=torch.int64),
            query_start_loc=starts,
            idx_mapping=torch.arange(n, dtype=torch.int32),
        ),
        torch.ones(n, dtype=torch.int32),
        torch.tensor([rejected for _, _, rejected in requests], dtype=torch.int32),
        1000 + torch.arange(n + spare, dtype=torch.int64),
        torch.zeros(n + spare, dtype=torch.int64),
        torch.ones(n + spare),
        torch.ones(n + spare, dtype=torch.int64),
        pages[1 : n + 1],
        block_size,
        7,
        rows,
        steps,
        n + spare,
        len(slots_of_rows),
        limit,
        from_anchor,
    )
    live = n * steps
    return {
        "context": out["context"].tolist(),
        "context_slots": out["context_slots"].tolist(),
        "positions": buffers.positions[: n * rows].tolist(),
        "slots": slots_of_rows[: n * rows].tolist(),
        "lengths": buffers.seq_lens[:n].tolist(),
        "samples": list(
            zip(out["indices"][:live].tolist(), out["pos"][:live].tolist(), out["mapping"][:live].tolist())
        ),
        "ids": buffers.input_ids[: n * rows].tolist(),
        "padding": {
            *slots_of_rows[n * rows :].tolist(),
            *out["mapping"][live:].tolist(),
            *buffers.seq_lens[n:].tolist(),
        },
    }


CANARY = 10**6


def slot_cases(steps, block_size, limit, evicted):
    """Every request length up to `limit`, verified after a draft of `steps` with a changing rejection."""
    width = -(-limit // block_size)
    requests, tables = [], []
    for length in range(1, limit + 1):
        scheduled = min(length, steps + 1)
        requests.append((length - scheduled, scheduled, length % scheduled))
        held = -(-min(length + steps + 1, limit) // block_size)
        gone = min(max(0, length - evicted) // block_size, held) if evicted else 0
        first_page = 1 + len(tables) * width
        tables.append([0] * gone + [first_page + i for i in range(gone, held)] + [CANARY] * (width - held))
    return requests, tables


def draft_slots(steps_of=range(1, 16)):
    """Differences between kernel and reference; [] is right."""
    wrong = []
    for steps in steps_of:
        for limit, evicted, from_anchor in ((40, None, 0), (37, 3, 0), (40, 3, 1)):
            rows = steps if from_anchor else steps + 1
            requests, tables = slot_cases(steps, 8, limit, evicted)
            wanted = reference_inputs(requests, tables, 8, rows, limit, from_anchor)
            found = written_inputs(requests, tables, 8, rows, steps, limit, bool(from_anchor))
            case = f"S={steps} max_model_len={limit} anchor={from_anchor}"
            if not found.pop("padding") <= {PAD, 0}:
                wrong.append(f"{case}: padding rows are not inert")
            # Positions of rejected context rows are never read.
            found["context"] = [None if w is None else f for w, f in zip(wanted["context"], found["context"])]
            for what, values in wanted.items():
                bad = [i for i, (w, f) in enumerate(zip(values, found[what], strict=True)) if w != f]
                if bad:
                    i = bad[0]
                    wrong.append(f"{case}: {what}[{i}] is {found[what][i]}, wanted {values[i]} ({len(bad)} differ)")
            if max(found["slots"] + found["context_slots"]) >= CANARY:
                wrong.append(f"{case}: a slot lies in a page of somebody else")
            pages = -(-max(found["lengths"]) // 8)
            if pages > len(tables[0]):
                wrong.append(f"{case}: attention reads {pages} pages of a table of {len(tables[0])}")
    return wrong


# --- configs (B5, B7, B8, B9, B17 and faults) --------------------------------------------------


def cache_estimates():
    """What is said at start about the cached proposal: drafting greedily, then max_num_seqs 1, 64, 1024."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import describe_cache

    found = [describe_cache(engine_config(15), 320, 16)]
    for seqs in (1, 64, 1024):
        config = engine_config(15, max_num_seqs=seqs, max_num_batched_tokens=16384)
        config.speculative_config.draft_sample_method = "probabilistic"
        found.append(describe_cache(config, 320, 16))
    os.environ["DFLASH2_DENSE_PROPOSAL"] = "1"
    try:
        found.append(describe_cache(config, 320, 16))
        os.environ["DFLASH2_DENSE_PROPOSAL"] = "yes"
        found.append(refusal(lambda: describe_cache(config, 320, 16)))
    finally:
        del os.environ["DFLASH2_DENSE_PROPOSAL"]
    return found


def rope_lengths():
    """[drafter's own max_position_embeddings, rows of its rotary cache] under a target of 256 positions."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    found = []
    for own in (128, 256, 4096):
        with drafter(max_position_embeddings=own) as folder:
            config = engine_config(draft=folder)
        hf = config.speculative_config.draft_model_config.hf_config
        with set_current_vllm_config(config):
            rope = get_rope(hf.head_dim, hf.max_position_embeddings, rope_parameters=hf.rope_parameters)
        found.append([own, rope.cos_sin_cache.shape[0]])
    return found


def compile_keys():
    """Compile-cache key for S = 7, 7 again, 15."""
    return [engine_config(steps).compute_hash() for steps in (7, 7, 15)]


def runner_choice():
    """Answer for each value of VLLM_USE_V2_MODEL_RUNNER: the runner's version or the error."""
    found = {}
    for value in (None, "0", "1"):
        env = {} if value is None else {"VLLM_USE_V2_MODEL_RUNNER": value}
        os.environ.update(env)
        found[str(value)] = refusal(lambda: 2 if engine_config().use_v2_model_runner else 1)
        for name in env:
            del os.environ[name]
    return found


def refusals():
    def served(**arguments):
        return refusal(lambda: str(engine_config(**arguments).model_config.dtype))

    return {
        "bfloat16": served(dtype="bfloat16"),
        "float16": served(dtype="float16"),
        "pipeline parallel": served(pipeline_parallel_size=2),
    }


# --- zeroed blocks (B6) ------------------------------------------------------------------------


def hybrid_specs(block_size=16, **mamba):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    heads = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    state = ((16 * block_size,),)  # as many bytes as a page of K/V
    return {
        "mamba": MambaSpec(block_size=block_size, shapes=state, dtypes=(torch.float32,), **mamba),
        "full": FullAttentionSpec(**heads),
        "window": SlidingWindowSpec(sliding_window=32, **heads),
    }


def recorded_blocks():
    """{group: [blocks allocated to a request, of those told to the worker to zero]}, hybrid and not."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    found = {}
    for name, kinds in (("hybrid", ("mamba", "full", "window")), ("plain", ("full", "window"))):
        groups = [KVCacheGroupSpec([kind], hybrid_specs()[kind]) for kind in kinds]
        manager = KVCacheManager(
            KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=256,
            scheduler_block_size=16,
            hash_block_size=16,
            enable_caching=False,
        )
        request = Request("0", list(range(40)), SamplingParams(max_tokens=8), None)
        blocks = manager.allocate_slots(request, 40).get_block_ids()
        zeroed = set(manager.take_new_block_ids())
        found[name] = {kind: [len(ids), len(zeroed & set(ids))] for kind, ids in zip(kinds, blocks)}
    return found


def zeroed_memory():
    """{layer: blocks of its cache that hold no NaN} after blocks 2 and 5 were zeroed, of 8 blocks of NaN."""
    from vllm.v1.worker.utils import AttentionGroup, KVBlockZeroer

    backend = Namespace(get_kv_cache_block_dim=lambda *args, **kwargs: 0)
    caches = {kind: torch.full((8, 16, 16), float("nan")) for kind in ("full", "window")}
    zeroer = KVBlockZeroer(
        torch.device("cpu"),
        [AttentionGroup(backend, [kind], hybrid_specs()[kind], i) for i, kind in enumerate(caches)],
        [16, 16],
        "auto",
        {kind: Namespace(kv_cache=cache) for kind, cache in caches.items()},
    )
    zeroer.zero_block_ids([2, 5])
    return {kind: [i for i in range(8) if not cache[i].isnan().any()] for kind, cache in caches.items()}


# --- prefix caching (B19) ----------------------------------------------------------------------


def prefix_hits(block_size=64):
    """[prompt length, tokens found cached when the same prompt comes again] under a hybrid target."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    config = engine_config(enable_prefix_caching=True, max_model_len=1024, block_size=block_size)
    config.cache_config.mamba_cache_mode, config.cache_config.num_gpu_blocks = "align", 256
    specs = hybrid_specs(block_size, mamba_cache_mode="align", num_speculative_blocks=7)
    groups = [KVCacheGroupSpec([kind], spec) for kind, spec in specs.items()]
    scheduler = Scheduler(
        config,
        KVCacheConfig(num_blocks=256, kv_cache_tensors=[], kv_cache_groups=groups),
        StructuredOutputManager(config),
        block_size=block_size,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)

    def serve(name, prompt):
        """One token after the prompt; returns how much of the prompt was found cached."""
        request = Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        scheduler.add_request(request)
        cached = None
        while not request.is_finished():
            step = scheduler.schedule()
            if cached is None:
                cached = request.num_computed_tokens - step.num_scheduled_tokens[name]
            done = request.num_computed_tokens >= len(prompt)
            scheduler.update_from_output(
                step,
                ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=[[1] if done else []]),
            )
        return cached

    found = []
    for length in (100, 129, 200, 500):
        prompt = [length + i for i in range(length)]
        serve(f"{length} first", prompt)
        found.append([length, serve(f"{length} again", prompt)])
    return found


# --- FlashAttention (B10, B11) -----------------------------------------------------------------


def attention_layer(num_heads, window):
    """An attention layer as far as FlashAttention's metadata builder looks at it."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    layer, impl = Attention.__new__(Attention), FlashAttentionImpl.__new__(FlashAttentionImpl)
    torch.nn.Module.__init__(layer)
    impl.sliding_window = (-1, -1) if window is None else (window - 1, 0)
    impl.num_heads = layer.num_heads = num_heads
    layer.impl = impl
    return layer


def draft_builder(config, window):
    """FlashAttention's builder for a draft of 8 query heads, 4 KV heads and head size 32, FA3 assumed."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    heads = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
    spec = FullAttentionSpec(**heads) if window is None else SlidingWindowSpec(sliding_window=window, **heads)
    config.compilation_config.static_forward_context["draft"] = attention_layer(8, window)
    builder = FlashAttentionMetadataBuilder(spec, ["draft"], config, torch.device("cpu"))
    builder.aot_schedule = True
    return builder


def scheduled(builder):
    """Head counts, head size and window that the builder's schedule is made for, or None: no schedule."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import flash_attn

    calls = []
    starts = torch.tensor([0, 8], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([100], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=8,
        max_query_len=8,
        max_seq_len=100,
        block_table_tensor=torch.zeros(1, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(8, dtype=torch.int64),
        causal=False,
    )
    with replaced(flash_attn, "get_scheduler_metadata", lambda **asked: calls.append(asked)):
        builder.build(0, batch)
    keys = ("num_heads_q", "num_heads_kv", "headdim", "window_size")
    return [calls[0][key] for key in keys] if calls else None


def fa3_geometry():
    """Schedule for a draft of 8 / 4 heads of 32 beside the tiny target's 4 / 2 heads of 64."""
    return scheduled(draft_builder(engine_config(), None))


def fa3_window():
    """{window of the draft's group: its schedule} after DFlashSpeculator.set_attn."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.utils import AttentionGroup

    found = {}
    for window in (None, 64):
        builder = draft_builder(engine_config(), window)
        group = AttentionGroup(Namespace(), ["draft"], builder.kv_cache_spec, 0, [builder])
        speculator = DFlashSpeculator.__new__(DFlashSpeculator)
        speculator.attn_groups = [[group]]
        speculator.max_num_tokens, speculator.device = 8, torch.device("cpu")
        speculator.requires_non_causal, speculator.model = True, object()
        with replaced(DraftModelSpeculator, "set_attn", lambda *args: None):
            speculator.set_attn(None, Namespace(kv_cache_groups=[]), None, None, None)
        found[str(window)] = scheduled(builder)
    return found


def layer_windows():
    """[layer's window, causal, window it attends with] in a cache group whose window is 256."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn

    found, config = [], engine_config()
    for window, causal in ((None, True), (512, True), (256, True), (256, False), (None, False)):
        asked = {}
        with set_current_vllm_config(config):
            impl = flash_attn.FlashAttentionImpl(2, 32, 1.0, 2, None, window, "auto")
        impl.vllm_flash_attn_version, impl.dcp_world_size = 3, 1
        group_window = flash_attn._maybe_symmetrize_window((255, 0), causal)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        metadata = flash_attn.FlashAttentionMetadata(
            num_actual_tokens=1,
            max_query_len=1,
            query_start_loc=starts,
            max_seq_len=16,
            seq_lens=torch.tensor([16], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            use_cascade=False,
            common_prefix_len=0,
            cu_prefix_query_lens=None,
            prefix_kv_lens=None,
            suffix_kv_lens=None,
            causal=causal,
            sliding_window=group_window,
        )
        row, scale = torch.zeros(1, 2, 32), torch.ones(())
        layer = Namespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)
        with replaced(flash_attn, "flash_attn_varlen_func", lambda **given: asked.update(given)):
            impl.forward(layer, row, row, row, torch.zeros(1, 2, 16, 64), metadata, row)
        found.append([window, causal, asked["window_size"]])
    return found


PROBES = (
    draft_slots,
    cache_estimates,
    rope_lengths,
    compile_keys,
    runner_choice,
    refusals,
    recorded_blocks,
    zeroed_memory,
    prefix_hits,
    fa3_geometry,
    fa3_window,
    layer_windows,
)


def report(probe):
    try:
        return probe()
    except Exception as error:
        import traceback

        return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}


def main(names):
    print(json.dumps({probe.__name__: report(probe) for probe in PROBES if not names or probe.__name__ in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
