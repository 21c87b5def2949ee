"""Fixtures of the patch tool's tests; see patching.py."""

import shutil

import pytest

import _patchlib
import _tree
from tests.tool.patching import REPO, call, patch_set


@pytest.fixture(scope="session")
def template(pristine, tmp_path_factory):
    """An unpatched tree with the files that the tool asks for and no others. Never write to it."""
    asked = {"vllm/__init__.py", "vllm/_version.py", "vllm/logger.py"}
    read = _tree.reader(pristine)

    def spy(path):
        asked.add(path)
        return read(path)

    report = _patchlib.survey(spy, "0.27.1", patch_set())
    assert report.verdict == "APPLY", report.message
    site = tmp_path_factory.mktemp("template")
    for path in asked:
        if read(path) is not None:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pristine / path, site / path)
    for folder in pristine.glob("vllm*.dist-info"):
        shutil.copytree(folder, site / folder.name)
    return site


@pytest.fixture
def tree(template, tmp_path):
    """A private, unpatched copy of the template."""
    return shutil.copytree(template, tmp_path / "site-packages")


@pytest.fixture(scope="session")
def patched_template(template, tmp_path_factory):
    site = shutil.copytree(template, tmp_path_factory.mktemp("patched") / "site-packages")
    result = call("--root", site)
    assert result.code == 0, result.out + result.err
    return site


@pytest.fixture
def patched_tree(patched_template, tmp_path):
    """A private copy of the template, patched."""
    return shutil.copytree(patched_template, tmp_path / "site-packages", symlinks=True)


@pytest.fixture
def tool(tmp_path):
    """A private copy of the tool, for tests that change it or run it as a process of its own."""
    folder = tmp_path / "tool"
    folder.mkdir()
    for name in ("apply_all.py", "_patchlib.py", "_patchdata.py", "_patchtext.py", "_tree.py"):
        shutil.copyfile(REPO / name, folder / name)
    for name in ("patches", "dflash2"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
