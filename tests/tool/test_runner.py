"""tests/run.py: which processes an argument asks for, what is counted, and the exit status."""

import json
from types import SimpleNamespace

import pytest

from tests.support import runner


@pytest.mark.parametrize(
    "arguments, jobs, options",
    [
        ([], {job.name: [f"tests/{job.folder}"] for job in runner.JOBS}, []),
        (["tool"], {"tool": ["tests/tool"]}, []),
        (["patched", "-k", "walk"], {"patched": ["tests/patched"], "unpatched": ["tests/patched"]}, ["-k", "walk"]),
        (["tests/tool/test_a.py::test_b", "-x"], {"tool": ["tests/tool/test_a.py::test_b"]}, ["-x"]),
        (["tool", "tests/tool/test_a.py", "gpu"], {"tool": ["tests/tool/test_a.py"], "gpu": ["tests/gpu"]}, []),
    ],
)
def test_what_is_asked_for(arguments, jobs, options):
    found, rest = runner.chosen(arguments)
    assert ({job.name: targets for job, targets in found}, rest) == (jobs, options)


@pytest.mark.parametrize(
    "running, waiting, lanes, seconds",
    [([], [5, 3, 2], 2, 5), ([4], [5, 3], 2, 7), ([4, 1], [5], 2, 6), ([], [5, 3], 1, 8), ([2], [], 2, 2)],
)
def test_how_much_is_left(running, waiting, lanes, seconds):
    assert runner.makespan(running, waiting, lanes) == seconds


def passed(test, **more):
    return [
        {"test": test, "outcome": o, "seconds": 1, "over": o is None and w} | more
        for o, w in ((None, False), ("passed", False), (None, True))
    ]


COUNTED = {
    "a good run": ([*passed("a"), *passed("b")], 0, {"passed": 2}),
    "a failed test": ([*passed("a"), {"test": "b", "outcome": "failed"}], 1, {"passed": 1, "failed": 1}),
    "torn down badly": ([*passed("a"), {"test": "a", "outcome": "failed"}], 1, {"failed": 1}),
    "nothing collected": ([], 5, {}),
    "died between tests": (passed("a"), -9, {"passed": 1, "failed": 1}),
    "a usage error": ([], 4, {"failed": 1}),
    "a line that is not finished": ([*passed("a"), '{"test"'], 0, {"passed": 1}),
}


@pytest.mark.parametrize("case", COUNTED)
def test_counts(tmp_path, case):
    lines, status, counts = COUNTED[case]
    run = object.__new__(runner.Run)
    run.progress, run.process = tmp_path / "lines", SimpleNamespace(poll=lambda: status)
    run.progress.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    assert +run.counts() == counts


@pytest.mark.parametrize(
    "folder, status, last",
    [
        ("tests/gpu/test_judge.py", 0, "15 passed, 0 failed, 0 skipped"),
        ("tests/gpu/none.py", 1, "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_the_last_line_and_the_exit_status(trees, monkeypatch, capsys, folder, status, last):
    monkeypatch.setattr(runner, "make_pristine", lambda site: site)
    monkeypatch.setattr(runner, "make_patched", lambda pristine, site: site)
    assert runner.main([folder]) == status
    assert capsys.readouterr().out.splitlines()[-1] == last
