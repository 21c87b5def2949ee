"""Which engines start when, and what ends with them. No engine is started."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import jobs
from tests.gpu import run as gpu_run

JOBS = {job.name: job for job in jobs.JOBS}
TENSOR_PARALLEL = ["graphs-tensor-parallel-plain", "graphs-tensor-parallel"]
STARTED = {"start_seconds": 1.0}


@pytest.mark.parametrize("gpus, left_out", [(1, TENSOR_PARALLEL), (2, []), (8, [])])
def test_jobs_for_two_gpus_are_left_out_with_one(gpus, left_out):
    enough, others = gpu_run.split_by_gpus(jobs.JOBS, gpus)
    assert [job.name for job in others] == left_out
    assert sorted(enough + others) == sorted(jobs.JOBS)


def test_what_is_left_out_is_printed_and_not_judged(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_run.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_run, "run_jobs", lambda chosen, *others: started.extend(chosen) or [])
    started = []
    rows = gpu_run.run_and_print(SimpleNamespace(only=TENSOR_PARALLEL, out=tmp_path), tmp_path, tmp_path)
    assert (started, rows) == ([], [])
    printed = [line for line in capsys.readouterr().out.splitlines() if "not run" in line]
    assert printed == [f"not run: {name} needs 2 GPUs" for name in TENSOR_PARALLEL]


@pytest.mark.parametrize(
    "busy, waiting, next_name",
    [
        ({}, ["graphs-serve", "hybrid-graphs"], "graphs-serve"),
        ({"graphs-serve": STARTED}, ["hybrid-graphs"], None),
        ({"graphs-serve": {**STARTED, "latency_seconds": 1.0}}, ["hybrid-graphs"], "hybrid-graphs"),
        ({"hybrid-graphs": {}}, ["hybrid-graphs-plain", "graphs-plain"], "graphs-plain"),
        ({"hybrid-graphs": STARTED}, ["hybrid-graphs-plain", "graphs-plain"], "hybrid-graphs-plain"),
        ({"graphs-plain": {}}, ["graphs-greedy", *TENSOR_PARALLEL], None),
        ({"graphs-plain": {}}, ["graphs-greedy", "graphs-beam"], "graphs-beam"),
        ({"graphs-plain": {}}, ["graphs-greedy", "eager-greedy"], "eager-greedy"),
        ({"eager-plain": {}}, ["graphs-greedy"], "graphs-greedy"),
        (dict.fromkeys(list(JOBS)[-gpu_run.AT_ONCE :], STARTED), ["graphs-greedy"], None),
    ],
)
def test_next_job(busy, waiting, next_name):
    running = [SimpleNamespace(job=JOBS[name], facts=lambda known=known: known) for name, known in busy.items()]
    job = gpu_run.next_job([JOBS[name] for name in waiting], running)
    assert (job and job.name) == next_name


def test_every_job_has_a_check_and_every_check_its_jobs():
    assert {name for _, needed, _ in gpu_run.checks() for name in needed} == set(JOBS)


@pytest.mark.parametrize(
    "changes, failed",
    [
        ({}, []),
        ({"texts": [{"tokens": [1, 9]}]}, ["greedy text"]),
        ({"acceptance": 3.5}, ["acceptance"]),
        ({"draft_graphs": 0}, ["full draft graphs"]),
    ],
)
def test_tensor_parallel_rows(changes, failed):
    texts = [{"tokens": [1, 2], "top": [[9.0, 5.0]] * 2}]
    own = {"texts": texts, "acceptance": 3.7, "drafts": 5.0, "draft_graphs": 4} | changes
    rows = gpu_run.judge_all(dict(zip(TENSOR_PARALLEL, ({"text": {"texts": texts}}, {"text": own}))))
    assert len(rows) == 3
    assert [row.check.split(": ")[1] for row in rows if not row.passed] == failed


@pytest.mark.parametrize(
    "value, passed",
    [
        (gpu_run.ACCEPTANCE, True),
        (gpu_run.ACCEPTANCE_FLOAT32, True),
        *((3.60, False), (3.61, True), (3.89, True), (3.90, False), (None, False)),
    ],
)
def test_acceptance_row(value, passed):
    assert gpu_run.acceptance_row("", {"acceptance": value, "drafts": 5.0}).passed == passed


FAKE_JOB = """
import json, subprocess, sys, time
worker = subprocess.Popen(["sleep", "60"])
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps({"worker": worker.pid}))
time.sleep(%d)
"""


def start(monkeypatch, folder, seconds):
    """A `gpu_run.Process` that started a worker; the worker's process id."""
    (folder / "jobs.py").write_text(FAKE_JOB % seconds)
    monkeypatch.setattr(gpu_run, "HERE", folder)
    arguments = SimpleNamespace(tiny="", samples=1, seconds=0, tokens=1)
    process = gpu_run.Process(JOBS["graphs-tensor-parallel"], arguments, folder, folder)
    wait_for(lambda: process.facts_path.exists() and process.facts_path.read_text())
    return process, process.facts()["worker"]


def wait_for(outcome):
    end = time.monotonic() + 20
    while not (found := outcome()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def is_gone(pid: int) -> bool:
    try:
        # A killed orphan may stay a zombie where nobody reaps it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_workers_end_with_their_job(monkeypatch, tmp_path):
    process, worker = start(monkeypatch, tmp_path, 60)
    assert not is_gone(worker)
    process.end()
    wait_for(lambda: is_gone(worker))
    assert not process.running() and process.failed()


def test_workers_end_after_a_job_that_left_them(monkeypatch, tmp_path):
    process, worker = start(monkeypatch, tmp_path, 0)
    wait_for(lambda: not process.running())
    assert not is_gone(worker)
    process.end()
    wait_for(lambda: is_gone(worker))
