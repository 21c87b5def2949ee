"""Full batches and the profiling run under compute-sanitizer: `python -m tests.gpu.memcheck [--out DIR]`.

Needs a GPU, the CUDA build of vLLM 0.27.1 that this tool was applied to, and compute-sanitizer of the CUDA toolkit
(on PATH, below CUDA_HOME, or in an nvidia wheel). The tiny pair serves with fewer tokens per step than a full batch
drafts rows: 64 sequences, S = 7 and 480 tokens, at which the profiling run alone needs 512 rows. Torch's caching
allocator is off, so that each tensor is an allocation of its own and an access past its end an error.
Exit status: 0 no error, 1 errors, 3 there is no compute-sanitizer.
"""

import argparse
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

from tests.support.trees import TINY

SEQS, STEPS, BATCHED = 64, 7, 480
LIMIT = 150  # seconds


def find_sanitizer() -> str | None:
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    places += [path.parent for folder in site.getsitepackages() for path in Path(folder, "nvidia").glob("**/bin/*san*")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for memcheck.log")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("not run: there is no compute-sanitizer on this machine")
        return 3
    command = [sanitizer, "--tool", "memcheck", "--target-processes", "application-only", "--error-exitcode", "1"]
    command += [sys.executable, "-m", "tests.gpu.memcheck", "--serve"]
    env = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = f"{late.stdout or ''}\nended after {LIMIT} s", 1
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "memcheck.log").write_text(output)
    shown = [line for line in output.splitlines() if line.startswith(("========= ", "served "))]
    print("\n".join(shown[:40] or output.splitlines()[-20:]))
    return int(status != 0)


def serve() -> None:
    """The profiling run, while it starts; then a step in which 64 requests of one token draft, and a few more."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(TINY / "target"),
        dtype="bfloat16",
        speculative_config={"method": "dflash", "model": str(TINY / "draft"), "num_speculative_tokens": STEPS},
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=SEQS,
        max_num_batched_tokens=BATCHED,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**28,
        kernel_config={"enable_flashinfer_autotune": False},
    )
    settings = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": [i]} for i in range(SEQS)], settings, use_tqdm=False)
    print("served", sum(len(output.outputs[0].token_ids) for output in outputs), "tokens")


if __name__ == "__main__":
    raise SystemExit(main())
