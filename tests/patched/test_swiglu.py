"""dflash2/layers/dflash2/swiglu.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

import json

import pytest
import torch

from tests.support.answers import run_interpreted
from tests.support.kernels import load_kernels
from tests.support.kernels.swiglu import BIG, SMALL, check


@pytest.fixture(scope="module")
def interpreted():
    """{name of case: what is wrong}, from one process that runs every small case without a GPU."""
    return run_interpreted(__name__)


@pytest.fixture(scope="module")
def module():
    return load_kernels("swiglu")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_interpreted_kernel_matches_float32(interpreted, case):
    assert interpreted[case.name] == []


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cpu_matches_float32(module, case):
    assert check(module.silu_and_mul, case, "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + BIG, ids=lambda case: case.name)
def test_kernel_matches_float32(module, case):
    assert check(module.silu_and_mul, case, "cuda") == []


def test_an_odd_width_is_named(module):
    with pytest.raises(ValueError, match="7 columns"):
        module.silu_and_mul(torch.zeros(2, 7))


def test_no_rows(module):
    assert module.silu_and_mul(torch.zeros(0, 12)).shape == (0, 6)


if __name__ == "__main__":
    launch = load_kernels("swiglu").launch
    print(json.dumps({case.name: check(launch, case, "cpu") for case in SMALL}))
