"""Fixtures that all tests share. support/runner.py makes the trees once for all of its processes."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.settings import ENGINE_ENVIRONMENT
from tests.support.trees import REPO, TINY, copy_tree, make_patched, make_pristine, run_group


def pytest_addoption(parser):
    parser.addoption("--unpatched", action="store_true", help="tests/patched: run what must fail without our patches")


@pytest.fixture(scope="session")
def trees():
    """Folder with the trees that the runner made, pristine and patched, or None."""
    return Path(os.environ["DFLASH2_TREES"]) if "DFLASH2_TREES" in os.environ else None


@pytest.fixture(scope="session")
def pristine(trees, tmp_path_factory):
    """A site-packages folder with an unpatched vLLM 0.27.1. Shared by all tests: never write to it."""
    return trees / "pristine" if trees else make_pristine(tmp_path_factory.mktemp("pristine"))


@pytest.fixture(scope="session")
def make_tree(pristine, tmp_path_factory):
    """make_tree(destination=None) -> a private, writable, unpatched copy of the site-packages folder."""

    def make(destination=None):
        return copy_tree(pristine, Path(destination or tmp_path_factory.mktemp("tree")))

    return make


@pytest.fixture(scope="session")
def patched(trees, pristine, tmp_path_factory):
    """A site-packages folder to which apply_all.py was applied. Shared by all tests: never write to it."""
    return trees / "patched" if trees else make_patched(pristine, tmp_path_factory.mktemp("patched"))


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
            code = "from tests.support import interpret\n" + code
        folders = [patched, REPO]
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
