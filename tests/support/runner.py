"""Runs pytest once per group of tests, as many at a time as there are processors, and adds up what they found.

tests/run.py is the command. On a terminal the last line tells how much is left; a log gets only the sections, each
when its process has ended, and the sum.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.support.trees import REPO, make_patched, make_pristine

SECONDS = REPO / "tests/seconds.json"  # how long tests took, for the estimate
LAST = REPO / ".pytest_cache/seconds.json"  # ... when this checkout last ran them all; copy it over when tests changed
GRACE = 20  # seconds that pytest has for ending what its tests have started


class Job(NamedTuple):
    """One process of pytest. `tree` is the vLLM that its tests import: patched, pristine, or the environment's own."""

    name: str
    folder: str
    tree: str = ""
    options: tuple[str, ...] = ()


# The longest first.
JOBS = (
    Job("engine", "engine", "patched"),
    Job("patched", "patched", "patched"),
    Job("tool", "tool"),
    Job("unpatched", "patched", "pristine", ("--unpatched", "-rfE")),
    Job("gpu", "gpu"),
)
FOLDERS = {job.folder for job in JOBS}


def chosen(arguments):
    """(job, its targets) of each job that the arguments ask for, and the arguments that are pytest's."""
    targets, options = {}, []
    for argument in arguments:
        parts = Path(argument.split("::")[0]).parts
        if argument in FOLDERS:
            targets.setdefault(argument, [])
        elif parts[:1] == ("tests",) and parts[1:2] and parts[1] in FOLDERS:
            targets.setdefault(parts[1], []).append(argument)
        else:
            options.append(argument)
    targets = targets or dict.fromkeys(FOLDERS, ())
    return [(job, targets[job.folder] or [f"tests/{job.folder}"]) for job in JOBS if job.folder in targets], options


class Run:
    """A job's process, what it has printed, and how far it is."""

    def __init__(self, job, targets, options, trees, scratch, known):
        self.job, self.known, self.begin = job, known, time.monotonic()
        self.output, self.progress = scratch / f"{job.name}.log", scratch / f"{job.name}.jsonl"
        self.progress.touch()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DFLASH2_TREES": str(trees),
            "DFLASH2_PROGRESS": str(self.progress),
        }
        if job.tree:
            env["PYTHONPATH"] = str(trees / job.tree)
        colour = ["--color=yes"] if sys.stdout.isatty() else []
        # A later -m of the caller's replaces this one.
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.progress", "-m", "not gpu"]
        command += [*colour, *targets, *job.options, *options]
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(command, cwd=REPO, env=env, stdout=stream, stderr=subprocess.STDOUT)

    def lines(self):
        return [json.loads(line) for line in self.progress.read_text().splitlines(keepends=True) if line[-1] == "\n"]

    def counts(self):
        """{outcome: number of tests}; a process that ended badly without a failed test counts as one."""
        outcomes = {}
        for line in self.lines():
            if line.get("outcome") and outcomes.get(line["test"]) != "failed":
                outcomes[line["test"]] = line["outcome"]
        counts = Counter(outcomes.values())
        if self.process.poll() not in (None, 0, 5) and not counts["failed"]:  # 5: nothing was collected
            counts["failed"] = 1
        return counts

    def seconds(self):
        """{test: seconds that it took}, and what the process needed beside its tests as "".
        What takes no time to speak of is not listed."""
        took = Counter()
        for line in self.lines():
            if "seconds" in line:
                took[line["test"]] += line["seconds"]
        took[""] = time.monotonic() - self.begin - sum(took.values())
        return {test: round(s, 1) for test, s in sorted(took.items()) if s >= 0.5}

    def left(self):
        """Estimated seconds until the process ends."""
        lines = self.lines()
        collected = next((line["collected"] for line in lines if "collected" in line), None)
        if collected is None:
            return max(1.0, expected(self.job, self.known) - (time.monotonic() - self.begin))
        over = {line["test"] for line in lines if line.get("over")}
        return sum(self.known.get(test, 0.02) for test in collected if test not in over)


def expected(job, known):
    return sum(known.values()) or 60.0


def makespan(running, waiting, lanes):
    """Seconds until all is done: `running` and `waiting` are seconds, the latter in their order."""
    free = sorted([*running, *[0.0] * lanes])[-lanes:] if lanes > len(running) else sorted(running)
    for seconds in waiting:
        free.sort()
        free[0] += seconds
    return max(free, default=0.0)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def show(run):
    title = f" {run.job.name}: tests/{run.job.folder}, {clock(time.monotonic() - run.begin)} minutes "
    print(f"\n{title:=^100}\n{run.output.read_text().rstrip()}", flush=True)


def run_all(jobs, options, trees, scratch, known):
    """Runs the jobs and returns them, printing each one's section when it has ended."""
    waiting, running, ended = list(jobs), [], []
    lanes = min(len(jobs), len(os.sched_getaffinity(0)))
    terminal = sys.stdout.isatty()
    try:
        while waiting or running:
            for run in [run for run in running if run.process.poll() is not None]:
                if terminal:
                    print("\r\033[K", end="")
                show(run)
                running.remove(run)
                ended.append(run)
            while waiting and len(running) < lanes:
                job, targets = waiting.pop(0)
                running.append(Run(job, targets, options, trees, scratch, known.get(job.name, {})))
            if terminal:
                done = sum(sum(run.counts().values()) for run in [*running, *ended])
                left = makespan(
                    [run.left() for run in running],
                    [expected(job, known.get(job.name, {})) for job, _ in waiting],
                    lanes,
                )
                names = ", ".join(run.job.name for run in running)
                print(f"\r\033[K{done} tests done, about {clock(left)} left ({names})", end="", flush=True)
            time.sleep(0.5)
    finally:
        for run in running:  # interrupted: what the tests have started ends with them
            run.process.send_signal(signal.SIGINT)
        for run in running:
            try:
                run.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                run.process.kill()
    return ended


def main(arguments):
    jobs, options = chosen(arguments)
    known = json.loads((LAST if LAST.exists() else SECONDS).read_text()) if LAST.exists() or SECONDS.exists() else {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash2-tests-") as folder:
        scratch = Path(folder)
        trees = scratch / "trees"
        make_patched(make_pristine(trees / "pristine"), trees / "patched")
        lanes = min(len(jobs), len(os.sched_getaffinity(0)))
        about = makespan([], [expected(job, known.get(job.name, {})) for job, _ in jobs], lanes)
        if not options and len(jobs) > 1:
            print(
                f"about {clock(about)} minutes, {lanes} at a time: {', '.join(job.name for job, _ in jobs)}", flush=True
            )
        runs = run_all(jobs, options, trees, scratch, known)
        counts = sum((run.counts() for run in runs), Counter())
        if not arguments and not counts["failed"]:
            LAST.parent.mkdir(exist_ok=True)
            LAST.write_text(json.dumps({run.job.name: run.seconds() for run in runs}, indent=1, sort_keys=True))
    print(f"\n{clock(time.monotonic() - begin)} minutes")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return int(bool(counts["failed"]) or not counts["passed"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
