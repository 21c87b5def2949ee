"""dflash2/layers/dflash2/swiglu.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

import pytest
import torch

from tests.support.kernels import load_kernels
from tests.support.kernels.swiglu import BIG, SMALL, check


@pytest.fixture(scope="module")
def module():
    return load_kernels("swiglu")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_interpreted_kernel_matches_float32(module, case):
    assert check(module.launch, case, "cpu") == []


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
