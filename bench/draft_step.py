"""The whole draft step on a GPU, from the embedding to the cached proposal, as CUDA-graph replays.

    python -m bench.draft_step [--out DIR] [--architecture DFlash2BeamDraftModel]

Needs a GPU and a vLLM 0.27.1 that this tool was applied to. The engine is the real one, at the
dimensions of Qwen3.8-27B's drafter with dummy weights; the target has only the layers the drafter
reads. Each row is one batch size:

    step    the captured draft step
    floor   the same step with everything taken out but its GEMMs, its LM head and its attention
    ratio   step / floor

and then what each piece costs: the step less the step without that piece. Microseconds, medians.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from vllm import LLM
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from bench._common import require_gpu, write

QWEN3_8_27B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LAYERS = 5
STEPS = 7
CONTEXT = 1024
GOALS = {1: 1.10, 8: 1.10, 32: 1.15}

MODEL = "vllm.model_executor.models.qwen3_dflash2"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash2.speculator"
TOP_K = "vllm.model_executor.layers.dflash2.top_k"


def write_configs(folder: Path, architecture: str) -> None:
    target = {**QWEN3_8_27B, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": LAYERS}
    draft = {
        **QWEN3_8_27B,
        "architectures": [architecture],
        "num_hidden_layers": LAYERS,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * LAYERS,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "block_size": STEPS + 1,
        "dflash_config": {
            "mask_token_id": 248070,
            "target_layer_ids": list(range(LAYERS)),
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }
    for name, config in (("target", target), ("draft", draft)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def make_engine(folder: Path, batches: list[int]) -> LLM:
    return LLM(
        str(folder / "target"),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=max(batches),
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        kernel_config={"enable_flashinfer_autotune": False},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [n * (STEPS + 1) for n in batches],
        },
        speculative_config={
            "method": "dflash",
            "model": str(folder / "draft"),
            "num_speculative_tokens": STEPS,
            "draft_sample_method": "probabilistic",
        },
    )


def find_speculator(llm: LLM):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator


class Stubs:
    """What stands in for each piece: nothing runs, and the GEMMs behind it still get normal numbers
    (a GEMM is faster on zeros, and slower rows behind NaN would not be the drafter's)."""

    def __init__(self, speculator, rows: int, k: int):
        config = speculator.draft_model_config.hf_config
        normal = torch.randn(rows, config.intermediate_size, dtype=torch.bfloat16, device="cuda")
        self.wide, self.hidden = normal, normal[:, : config.hidden_size].contiguous()
        self.scores = torch.zeros(rows, k, device="cuda")
        self.ids = torch.arange(k, device="cuda").expand(rows, k).contiguous()
        self.model = speculator.model.model

    def conv(self):
        def side1(y, delta, base, residual, *_):
            return self.hidden[: len(y)], residual

        yield patch(f"{MODEL}.conv_side0", lambda x, *_: self.hidden[: len(x)])
        yield patch(f"{MODEL}.conv_side1_add_norm", side1)

    def norm_and_rope(self):
        yield patch(f"{MODEL}.rms_norm", lambda x, norm: self.hidden[: len(x)])
        yield patch("vllm._custom_ops.fused_qk_norm_rope", lambda *_: None)

    def activation(self):
        def linear_only(mlp, x):
            mlp.gate_up_proj(x)
            return mlp.down_proj(self.wide[: len(x)])[0]

        yield patch(f"{MODEL}.swiglu", linear_only)

    def top_k(self):
        yield patch(f"{TOP_K}.top_k", lambda x, *_: (self.ids[: len(x)], self.scores[: len(x)]))

    def walk(self):
        yield patch(f"{SPECULATOR}.walk", lambda *_, **__: None)

    def embedding(self):
        yield patch.object(self.model, "embed_input_ids", lambda ids: self.hidden[: len(ids)])


def graphs(speculator, stubs) -> DFlashCudaGraphManager:
    """The draft step's CUDA graphs, captured as the speculator does, with the stubs in place."""
    manager = DFlashCudaGraphManager(
        speculator.vllm_config,
        speculator.device,
        CUDAGraphMode.FULL_DECODE_ONLY,
        decode_query_len=speculator.num_query_per_req,
    )
    with ExitStack() as stack:
        for stub in stubs:
            stack.enter_context(stub)
        manager.capture(
            speculator._generate_draft,
            speculator.input_buffers,
            speculator.block_tables,
            speculator.attn_groups,
            speculator.kv_cache_config,
            speculator.max_model_len,
            causal=speculator._group_causal,
        )
    return manager


def fill_inputs(speculator, batch: int) -> None:
    """A batch in mid-decode: CONTEXT tokens behind every request, temperatures mixed."""
    rows = batch * speculator.num_query_per_req
    buffers, steps = speculator.input_buffers, speculator.num_speculative_steps
    requests = torch.arange(batch, device="cuda")
    buffers.input_ids[:rows].random_(0, 1000)
    buffers.positions[:rows].copy_((CONTEXT + torch.arange(speculator.num_query_per_req, device="cuda")).repeat(batch))
    buffers.seq_lens[:batch].fill_(CONTEXT + speculator.num_query_per_req)
    buffers.query_start_loc[: batch + 1].copy_(torch.arange(batch + 1, device="cuda") * speculator.num_query_per_req)
    offsets = torch.arange(1, steps + 1, device="cuda")
    speculator.sample_indices[: batch * steps].copy_(
        (requests[:, None] * speculator.num_query_per_req + offsets).flatten()
    )
    speculator.sample_pos[: batch * steps].copy_((CONTEXT + offsets).repeat(batch))
    speculator.sample_idx_mapping[: batch * steps].copy_(requests.repeat_interleave(steps))
    speculator.temperature[:batch].copy_(requests % 2 * 0.7)
    speculator.seeds[:batch].copy_(requests)


def replay_times(managers: dict[str, DFlashCudaGraphManager], batch: int, rounds: int = 40) -> dict[str, float]:
    """Median microseconds of one replay of every variant, taken in turn so that the card's clocks
    and temperature are the same for all. The weights alone are many times the L2."""
    times: dict[str, list[float]] = {name: [] for name in managers}
    for _ in range(rounds + 3):
        for name, manager in managers.items():
            desc = next(d for d in manager.graphs if d.num_reqs == batch)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            manager.run_fullgraph(desc)
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000)
    return {name: statistics.median(values[3:]) for name, values in times.items()}


def plot(axes, rows: list[dict]) -> None:
    for name in ("step", "floor"):
        axes.semilogx([row["batch"] for row in rows], [row[name] for row in rows], marker="o", label=name)
    axes.set(ylim=(0, None), xlabel="batch", ylabel="µs", title="Draft step at the dimensions of Qwen3.8-27B's drafter")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for draft_step_ARCHITECTURE.md, .json and .png")
    parser.add_argument("--architecture", default="DFlash2DraftModel", help="or DFlash2BeamDraftModel")
    args = parser.parse_args()
    require_gpu()
    folder = Path(tempfile.mkdtemp())
    write_configs(folder, args.architecture)
    speculator = find_speculator(make_engine(folder, list(GOALS)))
    stubs = Stubs(speculator, max(GOALS) * (STEPS + 1), 16)
    pieces = {
        "conv, add, norm": stubs.conv,
        "norm, rope": stubs.norm_and_rope,
        "activation": stubs.activation,
        "top-k": stubs.top_k,
        "walk": stubs.walk,
        "embedding": stubs.embedding,
    }
    managers = {"step": graphs(speculator, [])}
    managers |= {name: graphs(speculator, piece()) for name, piece in pieces.items()}
    managers["floor"] = graphs(speculator, [stub for piece in pieces.values() for stub in piece()])

    rows, missed = [], 0
    for batch, goal in GOALS.items():
        fill_inputs(speculator, batch)
        times = replay_times(managers, batch)
        ratio = times["step"] / times["floor"]
        missed += ratio > goal
        row = {"batch": batch, "step": times["step"], "floor": times["floor"]}
        row |= {"ratio": ratio, "goal": goal}
        rows.append(row | {name: times["step"] - times[name] for name in pieces})
    name, sections = f"draft_step_{args.architecture}", {f"{args.architecture}, µs": rows}
    write(args.out, name, sections, lambda axes: plot(axes, rows))
    print(f"{len(GOALS) - missed} of {len(GOALS)} batch sizes within their goal")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
