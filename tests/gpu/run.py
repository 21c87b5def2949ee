"""The engine on a GPU: `python -m tests.gpu.run --out DIR` prints one table and writes DIR/engine.json.

Needs the CUDA build of vLLM 0.27.1 in this Python. It is not touched: a copy is patched and used. Every
engine is a process with a time limit of its own, and several of them share the card (30 GB of it). What
needs two GPUs is printed as not run where there is one.
Exit status: 0 all checks passed, 1 some did not, 3 nothing was checked.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from tests.gpu import jobs, judge
from tests.support.trees import copy_tree, vllm_distribution

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent


# Mean acceptance length of the tiny pair, greedy: bf16, eager, first measured on an H200; the reference's in float32.
ACCEPTANCE, ACCEPTANCE_FLOAT32 = 3.7153, 3.7814
AT_ONCE = 8
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Row(NamedTuple):
    check: str
    result: str
    passed: bool


def patched_site(folder: Path) -> Path:
    """A patched copy of this Python's vLLM below ``folder``. Raises SystemExit with the tool's message."""
    site = copy_tree(Path(vllm_distribution().locate_file("")), folder)
    done = subprocess.run([sys.executable, REPO / "apply_all.py", "--root", site], capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"error: could not patch a copy of vLLM in {site}\n{done.stderr}")
    return site


class Process:
    """A running job: its process, files and deadline."""

    def __init__(self, job, arguments, site: Path, scratch: Path):
        self.job = job
        self.facts_path = scratch / f"{job.name}.json"
        self.log_path = scratch / f"{job.name}.log"
        command = [sys.executable, HERE / "jobs.py", job.name, "--out", self.facts_path, "--scratch", scratch]
        for name in ("tiny", "samples", "seconds", "tokens"):
            command += [f"--{name}", getattr(arguments, name)]
        self.deadline = time.monotonic() + job.limit + arguments.seconds * ("soak" in job.phases)
        with self.log_path.open("w") as log:
            # A process group of its own, so that the workers of an engine over several GPUs end with it.
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(site),
                process_group=0,
            )

    def running(self) -> bool:
        if time.monotonic() > self.deadline:
            self.end()
        return self.process.poll() is None

    def end(self) -> None:
        """Kill what is left of the job, also the workers of one that ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def facts(self) -> dict:
        return json.loads(self.facts_path.read_text()) if self.facts_path.exists() else {}

    def failed(self) -> bool:
        return bool(self.process.returncode) or bool(errors(self.facts()))

    def log(self) -> str:
        return f"--- {self.job.name}: exit status {self.process.returncode}\n" + self.log_path.read_text(
            errors="replace"
        )


def errors(facts: dict) -> list[str]:
    """Last lines of the errors that ended a phase."""
    return [
        value["error"].strip().splitlines()[-1]
        for value in facts.values()
        if isinstance(value, dict) and "error" in value
    ]


def environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(site), str(REPO), os.environ.get("PYTHONPATH"))))
    return {
        # FlashInfer's samplers would be compiled for minutes.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A forked worker could not use CUDA if its parent had looked at it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # See jobs.TWO_GPUS.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": path,
    }


def run_jobs(chosen, arguments, site: Path, scratch: Path) -> list[Process]:
    """Run the jobs until the limit and return them finished; what is known is in the report all along."""
    waiting, processes, ended = list(chosen), [], []
    end = time.monotonic() + arguments.limit
    try:
        while time.monotonic() < end and (waiting or any(p.running() for p in processes)):
            job = next_job(waiting, [p for p in processes if p.running()])
            if job is None:
                time.sleep(0.5)
            else:
                waiting.remove(job)
                processes.append(Process(job, arguments, site, scratch))
            done = [p for p in processes if p not in ended and not p.running()]
            for process in done:
                process.end()
            if done:
                ended += done
                write_report(arguments.out, chosen, processes)
    finally:
        # Also after Ctrl-C, which reaches only this process group; a second one must not stop this.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
        for process in processes:
            if process not in ended:
                process.end()
        for number, handler in before.items():
            signal.signal(number, handler)
    return processes


def stop(number, frame):
    sys.exit(f"error: ended by {signal.Signals(number).name}")


def next_job(waiting: list, busy: list[Process]):
    """The job to start now, if any. Latencies are measured on a card nobody else uses. Of one target, engines with
    CUDA graphs start one after another: the second finds compiled what the first compiled."""
    facts = [(p.job, p.facts()) for p in busy]
    if len(busy) >= AT_ONCE or any("latency" in job.phases and "latency_seconds" not in known for job, known in facts):
        return None
    capturing = {job.target for job, known in facts if job.graphs and "start_seconds" not in known}
    return next((job for job in waiting if not (job.graphs and job.target in capturing)), None)


def split_by_gpus(wanted: list, gpus: int) -> tuple[list, list]:
    """The jobs that ``gpus`` visible GPUs are enough for, and the others."""
    enough = [job for job in wanted if job.gpus <= gpus]
    return enough, [job for job in wanted if job not in enough]


def write_report(out: Path, chosen: list, processes: list[Process]) -> list[Row]:
    """Write engine.json and engine.log (of the jobs that failed) to the folder; returns the rows."""
    facts = {job.name: {} for job in chosen} | {p.job.name: p.facts() for p in processes}
    rows = judge_all(facts)
    report = {"rows": [row._asdict() for row in rows], "facts": facts}
    (out / "engine.json").write_text(json.dumps(report))
    (out / "engine.log").write_text("\n".join(p.log() for p in processes if not p.running() and p.failed()))
    return rows


def text_row(name: str, plain: dict, texts: list[dict], ties: bool) -> Row:
    drafted = [text["tokens"] for text in texts]
    counts = judge.compare_texts(plain["texts"], drafted, ties)
    result = f"{counts['same']} of {len(drafted)} identical"
    if counts["excused"]:
        result += f", {counts['excused']} part at a near-tie"
    if counts["wrong"]:
        result += f", {counts['wrong']} wrong at [text, position] {counts['where'][:4]}"
    return Row(name, result, counts["wrong"] == 0)


def acceptance_row(name: str, phase: dict) -> Row:
    """Between 3 % below the bf16 figure and 3 % above the float32 one: near-ties part texts, and each text
    has an acceptance of its own."""
    value = phase["acceptance"]
    if value is None:
        return Row(name, "nothing was drafted", False)
    result = f"{value:.4f} tokens per step, {value / ACCEPTANCE - 1:+.1%} ({phase['drafts']:.0f} drafts)"
    return Row(name, result, 0.97 * ACCEPTANCE <= value <= 1.03 * ACCEPTANCE_FLOAT32)


def sampled_row(name: str, plain: dict, drafted: dict, temperature: float) -> Row:
    one, other = plain[str(temperature)], drafted[str(temperature)]
    shown = []
    for length in (1, 2, 3, 4):
        p, freedom, _ = judge.homogeneity(judge.prefix_counts(one, length), judge.prefix_counts(other, length))
        shown.append(f"{p:.2g}")
    result = f"p = {' / '.join(shown)} on 1 to 4 tokens, {sum(other.values())} samples, {freedom} degrees of freedom"
    return Row(name, result, p > 1e-3)


def soak_row(phase: dict) -> Row:
    rate = phase["tokens"] / phase["seconds"]
    result = f"{phase['requests']} requests in {phase['seconds']:.0f} s, {phase['lost']} lost, "
    result += f"{phase['malformed_count']} malformed, {rate:.0f} tokens/s, acceptance {phase['acceptance']:.2f}"
    return Row(
        "64 requests in flight", result, phase["requests"] > 64 and phase["lost"] == phase["malformed_count"] == 0
    )


def latency_rows(phase: dict) -> list[Row]:
    seconds, compiled = phase["seconds"], phase["compiled"]
    names = sorted(set(chain.from_iterable(compiled)))
    # Texts differ, and so does how many steps they take: no single request is the measure.
    others = statistics.median(seconds[1:])
    result = f"{1e3 * seconds[0]:.1f} ms, the median of the next nine {1e3 * others:.1f} ms"
    return [
        Row("first request", result, seconds[0] <= 1.2 * others + 0.005),
        Row("kernels compiled after the start", ", ".join(names) or "none", not any(compiled[1:])),
    ]


def hybrid_rows(name: str, plain: dict, facts: dict) -> list[Row]:
    rows = []
    phases = {
        "hybrid": name,
        "hybrid_chunks": f"{name}, chunks of {jobs.STEPS + 1}",
        "hybrid_accepted": f"{name}, drafts that are accepted",
    }
    for phase, label in phases.items():
        done = facts[phase]
        # Other chunks round the delta nets' states otherwise: compare with plain decoding in the same.
        own = plain["hybrid" if phase == "hybrid" else "hybrid_chunks"]
        rows.append(text_row(f"{label}: greedy text", own, done["texts"], True))
        rows.append(Row(f"{label}: rows of q with NaN", str(done["nan_rows"]), done["nan_rows"] == 0))
    accepted = facts["hybrid_accepted"]["acceptance"]
    rows.append(Row(f"{name}: accepted drafts", f"{accepted:.2f} tokens per step", accepted > 2))
    return rows


def beam_rows(label: str, qwen3: dict, beam: dict, graphs: bool) -> list[Row]:
    """The same checkpoint under Beam's architecture string, against the Qwen3 class in an engine like it."""
    one, other = qwen3["text"], beam["text"]
    off = other["acceptance"] / one["acceptance"] - 1
    captured, wanted = other["draft_graphs"], one["draft_graphs"]
    return [
        text_row(f"{label}: greedy text as the Qwen3 class's", one, other["texts"], False),
        Row(
            f"{label}: acceptance",
            f"{other['acceptance']:.4f} tokens per step, {off:+.2%} of the Qwen3 class's",
            abs(off) <= 0.01,
        ),
        Row(
            f"{label}: full draft graphs",
            f"{captured}, the Qwen3 class has {wanted}",
            captured == wanted and (captured > 0) == graphs,
        ),
    ]


def graphs_or_eager(name: str) -> str:
    return "CUDA graphs" if name.startswith("graphs") else "eager"


def checks() -> list[tuple[str, tuple[str, ...], Callable[..., list[Row]]]]:
    """(name, jobs whose facts it needs, function from those facts to rows), in the table's order."""
    table: list = []
    for mode in ("eager", "graphs"):
        for drafter in ("greedy", "probabilistic"):
            job, label = f"{mode}-{drafter}", f"{graphs_or_eager(mode)}, {drafter} drafts"
            table.append(
                (
                    f"{label}: greedy text",
                    (f"{mode}-plain", job),
                    lambda plain, own, label=label, ties=mode == "graphs": [
                        text_row(f"{label}: greedy text", plain["text"], own["text"]["texts"], ties)
                    ],
                )
            )
            table.append(
                (
                    f"{label}: acceptance",
                    (job,),
                    lambda own, label=label: [acceptance_row(f"{label}: acceptance", own["text"])],
                )
            )
            for temperature in jobs.TEMPERATURES:
                name = f"{label}: samples at T = {temperature}"
                table.append(
                    (
                        name,
                        ("graphs-plain", job),
                        lambda plain, own, name=name, t=temperature: [
                            sampled_row(name, plain["sampled"], own["sampled"], t)
                        ],
                    )
                )
    serve = "graphs-serve"
    table += [
        ("64 requests in flight", (serve,), lambda own: [soak_row(own["soak"])]),
        ("prefix caching", ("graphs-plain", serve), prefix_rows),
        ("chunked prefill", ("eager-plain", "eager-chunked"), chunked_rows),
        ("abort and submit again", ("graphs-plain", serve), abort_rows),
        ("first request", (serve,), lambda own: latency_rows(own["latency"])),
        ("tensor parallel", ("graphs-tensor-parallel-plain", "graphs-tensor-parallel"), tensor_parallel_rows),
    ]
    for mode in ("eager", "graphs"):
        name = f"hybrid target, {graphs_or_eager(mode)}"
        table.append(
            (
                name,
                (f"hybrid-{mode}-plain", f"hybrid-{mode}"),
                lambda plain, own, name=name: hybrid_rows(name, plain, own),
            )
        )
    for label, qwen3, beam in (
        ("Beam, eager", "eager-greedy", "eager-beam"),
        ("Beam, CUDA graphs", "graphs-greedy", "graphs-beam"),
        ("Beam, CUDA graphs, fp8 KV cache", "graphs-fp8", "graphs-beam-fp8"),
    ):
        graphs = beam.startswith("graphs")
        table.append(
            (
                label,
                (qwen3, beam),
                lambda one, other, label=label, graphs=graphs: beam_rows(label, one, other, graphs),
            )
        )
    table.append(("vLLM's own tests", ("upstream",), upstream_rows))
    return table


def upstream_rows(own: dict) -> list[Row]:
    return [Row("vLLM's own tests", own["upstream"]["said"], own["upstream"]["status"] == 0)]


def prefix_rows(plain: dict, own: dict) -> list[Row]:
    phase = own["prefix"]
    return [
        text_row("prefix caching, cold: greedy text", plain["text"], phase["texts"], True),
        text_row("prefix caching, warm: greedy text", plain["text"], phase["again"], True),
        Row("prefix caching: tokens from the cache", f"{phase['hits']:.0f}", phase["hits"] > 0),
        acceptance_row("prefix caching, warm: acceptance", phase),
    ]


def chunked_rows(plain: dict, own: dict) -> list[Row]:
    # Other chunks are other shapes for the GEMMs, which round otherwise.
    return [
        text_row("chunked prefill: greedy text", plain["text"], own["text"]["texts"], True),
        acceptance_row("chunked prefill: acceptance", own["text"]),
    ]


def abort_rows(plain: dict, own: dict) -> list[Row]:
    phase = own["abort"]
    whole = len(phase["texts"]) == len(plain["text"]["texts"])
    name = f"{phase['aborted']} aborted and submitted again: greedy text"
    if not whole or phase["revenants"] or not phase["aborted"]:
        return [Row(name, f"{len(phase['texts'])} texts, aborted but finished: {phase['revenants']}", False)]
    return [text_row(name, plain["text"], phase["texts"], True)]


def tensor_parallel_rows(plain: dict, own: dict) -> list[Row]:
    # Two halves of a sum round otherwise than the whole: the measure is plain decoding on two GPUs, not on one.
    name, phase = "tensor parallel, 2 GPUs", own["text"]
    graphs = phase["draft_graphs"]
    return [
        text_row(f"{name}: greedy text", plain["text"], phase["texts"], True),
        acceptance_row(f"{name}: acceptance", phase),
        Row(f"{name}: full draft graphs", f"{graphs} on each GPU", graphs > 0),
    ]


def judge_all(facts: dict[str, dict]) -> list[Row]:
    """Rows of every check whose jobs were run; one without the facts it needs has failed."""
    rows = []
    for name, needed, make in checks():
        if any(job not in facts for job in needed):
            continue
        try:
            rows += make(*(facts[job] for job in needed))
        except (KeyError, TypeError, ValueError) as error:
            reasons = [reason for job in needed for reason in errors(facts[job])] or [f"{error!r}, see engine.log"]
            rows.append(Row(name, f"no result from {' or '.join(needed)}: {reasons[0][:200]}", False))
    return rows


def print_table(rows: list[Row]) -> None:
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{'pass' if row.passed else 'FAIL'}  {row.check:<{width}}  {row.result}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for engine.json and what each engine did")
    parser.add_argument("--tiny", default=str(REPO / "demo" / "tiny"), help="folder of the tiny pair")
    parser.add_argument("--samples", type=int, default=20_000, help="samples per temperature and engine")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long 64 requests are kept in flight")
    parser.add_argument("--tokens", type=int, default=64, help="length of greedy texts")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which whatever still runs is ended")
    parser.add_argument(
        "--only", nargs="+", metavar="JOB", help=f"run these alone: {', '.join(j.name for j in jobs.JOBS)}"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - {job.name for job in jobs.JOBS}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: no such job")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 3
    # The jobs are in other process groups: what ends this process ends them only if it can clean up.
    # What is ignored stays so, as SIGHUP under nohup.
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dflash2-engine-", ignore_cleanup_errors=True) as scratch:
        try:
            site = patched_site(Path(scratch) / "site")
        except SystemExit as error:
            print(error, file=sys.stderr)
            return 3
        rows = run_and_print(arguments, site, Path(scratch))
    return 3 if not rows else int(not all(row.passed for row in rows))


def run_and_print(arguments, site: Path, scratch: Path) -> list[Row]:
    begin = time.monotonic()
    wanted = [job for job in jobs.JOBS if not arguments.only or job.name in arguments.only]
    chosen, left_out = split_by_gpus(wanted, torch.cuda.device_count())
    processes = run_jobs(chosen, arguments, site, scratch)
    for process in processes:
        if process.failed():
            print(f"--- {process.job.name}: exit status {process.process.returncode}\n{process.log()[-1500:]}\n")
    rows = write_report(arguments.out, chosen, processes)
    starts = ", ".join(f"{p.job.name} {p.facts().get('start_seconds', math.nan):.0f}" for p in processes)
    print("seconds to start:", starts)
    for job in left_out:
        print(f"not run: {job.name} needs {job.gpus} GPUs")
    if rows:
        print_table(rows)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} checks, {failed} failed, {time.monotonic() - begin:.0f} s")
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
