"""Trees of the real vLLM 0.27.1 that are small: the files that the tool asks for, and no others."""

import shutil

import pytest

import _patchlib
import _site
from tests.tool.patching import REPO, make_small_tree, patch_set, succeed


@pytest.fixture(scope="session")
def template(pristine, tmp_path_factory):
    """An unpatched tree with the files that a survey asks for. Never write to it."""
    asked = {"vllm/__init__.py", "vllm/_version.py", "vllm/logger.py"}
    read = _site.reader(pristine)

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
    """The template, patched. Never write to it."""
    site = shutil.copytree(template, tmp_path_factory.mktemp("patched") / "site-packages")
    succeed(site)
    return site


@pytest.fixture
def patched_tree(patched_template, tmp_path):
    """A private copy of the template, patched."""
    return shutil.copytree(patched_template, tmp_path / "site-packages")


@pytest.fixture
def small(tmp_path):
    """The least vLLM, unpatched; `small_patch_set()` fits it."""
    return make_small_tree(tmp_path / "small")


@pytest.fixture
def tool(tmp_path):
    """A private copy of the tool, for tests that change it or run it as a process of its own."""
    folder = tmp_path / "tool"
    folder.mkdir()
    for path in (REPO / "apply_all.py", *REPO.glob("_*.py")):
        shutil.copyfile(path, folder / path.name)
    for name in ("patches", "dflash2"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
