"""Fixtures that all tests share; see support/trees.py for what they copy."""

import os
import sys
from pathlib import Path

import pytest

from _patchdata import HOME
from tests.support.settings import ENGINE_ENVIRONMENT
from tests.support.trees import REPO, TINY, apply_all, changed_files, copy_tree, run_group, vllm_distribution


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
