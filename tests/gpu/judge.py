"""Verdicts on what the engines did: pure functions of plain data."""

import math
from collections import Counter

import torch


def bf16_ulp(value: float) -> float:
    """Spacing of bf16 numbers (eight bits of mantissa) at ``value``."""
    return 2.0 ** (math.floor(math.log2(max(abs(value), 2.0**-126))) - 7)


def is_near_tie(top: list[float], ulps: int = 4) -> bool:
    """Whether the two largest logits lie within ``ulps`` bf16 spacings."""
    return top[0] - top[1] <= ulps * bf16_ulp(top[0])


def compare_texts(plain: list[dict], drafted: list[list[int]], ties_excused: bool) -> dict:
    """Compare greedy texts. ``plain`` has ``tokens`` and ``top`` (the two largest logits, a position).

    Returns counts of texts: same, excused (the first difference is at a near-tie of plain decoding,
    after which texts part), wrong; and where each wrong one starts.
    """
    result = {"same": 0, "excused": 0, "wrong": 0, "where": []}
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        first = first_difference(one["tokens"], other)
        if first is None:
            result["same"] += 1
        elif ties_excused and first < len(other) == len(one["tokens"]) and is_near_tie(one["top"][first]):
            result["excused"] += 1
        else:
            result["wrong"] += 1
            result["where"].append([number, first])
    return result


def first_difference(one: list[int], other: list[int]) -> int | None:
    for position, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def homogeneity(one: Counter, other: Counter, rare: int = 10) -> tuple[float, int, int]:
    """Chi-square test that two samples come from one distribution.

    Outcomes seen fewer than ``rare`` times in both samples together are pooled. Returns the p-value,
    the degrees of freedom and how many outcomes were pooled.
    """
    cells, pooled, pool = [], 0, [0, 0]
    for outcome in one.keys() | other.keys():
        counts = [one[outcome], other[outcome]]
        if sum(counts) < rare:
            pool = [a + b for a, b in zip(pool, counts)]
            pooled += 1
        else:
            cells.append(counts)
    if sum(pool):
        cells.append(pool)
    table = torch.tensor(cells, dtype=torch.float64)
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    statistic = ((table - expected).square() / expected).sum()
    freedom = len(cells) - 1
    if freedom == 0:
        return 1.0, 0, pooled
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2)), freedom, pooled


def prefix_counts(samples: dict[str, int], length: int) -> Counter:
    """Counts of the first ``length`` tokens; keys are "prompt:token,token,..."."""
    counts: Counter = Counter()
    for key, count in samples.items():
        prompt, tokens = key.split(":")
        counts[prompt, tuple(tokens.split(",")[:length])] += count
    return counts
