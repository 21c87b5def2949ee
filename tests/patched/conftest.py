"""These tests run in the vLLM that they import: a patched one, or, with --unpatched, 0.27.1 as released.

tests/run.py puts it first on PYTHONPATH. Without a GPU its GPU code runs on the CPU, through Triton's interpreter.
With --unpatched only what is marked needs_patch runs, and each must fail.
"""

from pathlib import Path

import pytest
import torch

from patches import PATCHES
from tests.support.trees import is_patched


def pytest_configure(config):
    if not torch.cuda.is_available() and is_patched() is not config.getoption("--unpatched"):
        from tests.support import interpret  # noqa: F401  before vLLM


NAMES = {patch.name for patch in PATCHES}
FAILS = (AssertionError, pytest.fail.Exception)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    unpatched = config.getoption("--unpatched")
    if (
        is_patched() is unpatched
        and not config.option.collectonly
        and any(not item.get_closest_marker("gpu") for item in mine)
    ):
        raise pytest.UsageError("tests/patched needs a vLLM made for it: python tests/run.py patched")
    for item in mine:
        for mark in item.iter_markers("needs_patch"):
            assert mark.args and NAMES.issuperset(mark.args), f"{item.nodeid} needs a patch that is none: {mark.args}"
            if unpatched:
                raises = (*FAILS, *as_tuple(mark.kwargs.get("raises", ())))
                item.add_marker(pytest.mark.xfail(raises=raises, strict=True, reason=f"without {', '.join(mark.args)}"))
    if unpatched:
        others = [item for item in mine if not item.get_closest_marker("needs_patch")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_ignore_collect(collection_path, config):
    """A file without such marks may import what an unpatched vLLM does not have."""
    if config.getoption("--unpatched") and collection_path.name.startswith("test_"):
        return "needs_patch" not in collection_path.read_text() or None


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)
