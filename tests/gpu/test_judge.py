"""The verdicts of the engine tests, on made-up outcomes."""

import random
from collections import Counter

import pytest

from tests.gpu import judge

FAR, TIE = [9.0, 5.0], [9.0, 8.8125]  # at 9 a bf16 step is 1/16: 3 steps apart


@pytest.mark.parametrize("value, ulp", [(1.0, 2**-7), (1.99, 2**-7), (-2.0, 2**-6), (300.0, 2.0), (0.0, 2.0**-133)])
def test_ulp(value, ulp):
    assert judge.bf16_ulp(value) == ulp


@pytest.mark.parametrize(
    "drafted, top, excused, verdict",
    [
        ([1, 2, 3], FAR, False, "same"),
        ([1, 9, 3], FAR, True, "wrong"),
        ([1, 9, 3], TIE, True, "excused"),
        ([1, 9, 3], TIE, False, "wrong"),
        ([1, 2], TIE, True, "wrong"),
        ([1, 9], TIE, True, "wrong"),
        ([1, 2, 3, 4], TIE, True, "wrong"),
    ],
)
def test_texts(drafted, top, excused, verdict):
    plain = [{"tokens": [1, 2, 3], "top": [top] * 3}]
    counts = judge.compare_texts(plain, [drafted], excused)
    assert {name: counts[name] for name in ("same", "excused", "wrong")} == {
        name: int(name == verdict) for name in ("same", "excused", "wrong")
    }


def draw(weights, seed, n=20_000):
    return Counter(random.Random(seed).choices(range(len(weights)), weights, k=n))


def test_homogeneity_keeps_equal_and_finds_unequal():
    weights = [2.0**-i for i in range(30)]
    tilted = [w * (1.2 if i == 1 else 1) for i, w in enumerate(weights)]
    passed = [judge.homogeneity(draw(weights, 2 * s), draw(weights, 2 * s + 1))[0] for s in range(40)]
    # p is uniform when nothing differs: forty of them below 1e-3 or all above a half would be a broken test.
    assert min(passed) > 1e-3 and 0.25 < sum(passed) / len(passed) < 0.75
    assert judge.homogeneity(draw(weights, 0), draw(tilted, 1))[0] < 1e-3


def test_homogeneity_of_one_outcome():
    assert judge.homogeneity(Counter("aaa"), Counter("aaaa")) == (1.0, 0, 1)


def test_prefixes():
    samples = {"0:5,6,7": 2, "0:5,6,8": 1, "1:5,6,7": 4}
    assert judge.prefix_counts(samples, 2) == Counter({("0", ("5", "6")): 3, ("1", ("5", "6")): 4})
