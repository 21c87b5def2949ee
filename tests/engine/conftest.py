"""Engines run in this process, whose vLLM is patched, one after another; two ranks are processes of their own.

tests/run.py puts the patched vLLM first on PYTHONPATH. Triton's interpreter stands in for a GPU.
"""

import json
import os
from pathlib import Path

import pytest

from tests.support.serve import clean_up
from tests.support.settings import ENGINE_ENVIRONMENT
from tests.support.trees import is_patched


def pytest_configure():
    if is_patched():
        os.environ.update(ENGINE_ENVIRONMENT)
        from tests.support import interpret  # noqa: F401  before vLLM


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    if not is_patched() and not config.option.collectonly and any(item.get_closest_marker("engine") for item in mine):
        raise pytest.UsageError("tests/engine needs a vLLM made for it: python tests/run.py engine")


@pytest.fixture(scope="session")
def run_engine():
    """run_engine(target=..., runs=..., ...) -> what tests/support/engine.py says of the job."""

    def run(**job):
        from tests.support import engine

        try:
            return engine.run(engine.Job(**json.loads(json.dumps(job, default=str))))
        finally:
            clean_up()

    return run
