"""dflash2/layers/dflash2/conv.py against float32: small shapes through Triton's interpreter, big ones on a GPU."""

import pytest
import torch

from tests.support.kernels import load_kernels
from tests.support.kernels.conv import BIG, EPS, SMALL, Case, check, inputs, kernels


@pytest.fixture(scope="module")
def module():
    return load_kernels("conv")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_interpreted_kernels_match_float32(module, case):
    assert check(kernels(module), case, "cpu") == []


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cpu_matches_float32(module, case):
    assert check((module.conv_side0, module.conv_side1_add_norm), case, "cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + BIG, ids=lambda case: case.name)
def test_kernels_match_float32(module, case):
    assert check((module.conv_side0, module.conv_side1_add_norm), case, "cuda") == []


def test_a_request_does_not_see_another(module):
    case = Case("", 16, 8, 64, 16, taps=4)
    x, delta, base, residual, weight = inputs(case, "cpu")
    first = module.conv_side0(x, delta, base, 8), *module.conv_side1_add_norm(x, delta, base, residual, weight, EPS, 8)
    x[:8] = float("nan")
    delta[:8] = float("nan")
    second = module.conv_side0(x, delta, base, 8), *module.conv_side1_add_norm(x, delta, base, residual, weight, EPS, 8)
    assert all(torch.equal(a[8:], b[8:]) for a, b in zip(first, second, strict=True))


def test_four_dimensional_delta_is_the_same(module):
    case = Case("", 16, 8, 64, 16, taps=3)
    x, delta, base, *_ = inputs(case, "cpu")
    shaped = delta.view(16, 2, 3, 4)
    assert torch.equal(module.conv_side0(x, delta, base, 8), module.conv_side0(x, shaped, base, 8))


@pytest.mark.parametrize(
    ("delta", "base", "block"),
    [
        ((8, 2 * 2 * 3), (2, 2, 64), 8),  # three groups do not divide 64
        ((8, 2 * 2 * 4 + 1), (2, 2, 64), 8),
        ((7, 2 * 2 * 4), (2, 2, 64), 8),
        ((8, 2 * 2 * 4), (2, 2, 32), 8),
        ((8, 2 * 2 * 4), (1, 2, 64), 8),
        ((8, 2 * 2 * 4), (2, 2, 64), 0),
    ],
)
def test_shapes_that_do_not_fit_are_named(module, delta, base, block):
    with pytest.raises(ValueError, match="do not fit"):
        module.conv_side0(torch.zeros(8, 64), torch.zeros(delta), torch.zeros(base), block)


def test_a_residual_that_does_not_fit_is_named(module):
    x, delta, base = torch.zeros(8, 64), torch.zeros(8, 16), torch.zeros(2, 2, 64)
    with pytest.raises(ValueError, match="residual"):
        module.conv_side1_add_norm(x, delta, base, torch.zeros(8, 32), torch.zeros(64), EPS, 8)


def test_no_rows(module):
    x, delta, base, weight = torch.zeros(0, 64), torch.zeros(0, 16), torch.zeros(2, 2, 64), torch.zeros(64)
    assert module.conv_side0(x, delta, base, 8).shape == (0, 64)
    assert [t.shape for t in module.conv_side1_add_norm(x, delta, base, x, weight, EPS, 8)] == [(0, 64)] * 2
