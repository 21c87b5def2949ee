"""dflash2/layers/dflash2/top_k.py against a stable sort: small rows through Triton's interpreter, big ones on a GPU."""

import pytest
import torch

from tests.support.kernels import load_kernels
from tests.support.kernels.top_k import BIG, FP32, SMALL, TINY_TILE, Case, check, expected, logits_of


@pytest.fixture(scope="module")
def module():
    return load_kernels("top_k")


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_interpreted_kernel_is_exact(module, case):
    """With a piece per program and with two."""
    tile = module.Tile(**TINY_TILE)
    assert [check(module, case, "cpu", tile, pieces) for pieces in (1, 2)] == [[], []]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cpu_is_exact(module, case):
    logits = logits_of(case, "cpu")
    ids, values = module.top_k(logits, case.k, case.valid)
    wanted = expected(logits, case.k, case.valid or case.vocab)
    assert values.dtype == torch.float32 and ids.dtype == torch.int64
    assert torch.equal(ids, wanted[0]) and torch.equal(values, wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + BIG, ids=lambda case: case.name)
def test_kernel_is_exact(module, case):
    assert check(module, case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("counters", ["none", "the caller's", "the caller's, new to the graph"])
def test_graph_replays_see_new_logits(module, counters):
    case = Case("", 56, 151936, 16)
    logits = logits_of(case, "cuda")
    kept = None if counters == "none" else module.Counters()
    module.top_k(logits, case.k, counters=kept)  # compiles
    if counters == "the caller's, new to the graph":
        kept = module.Counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, values = module.top_k(logits, case.k, counters=kept)
    for _ in range(20):
        logits.copy_(torch.randn_like(logits, dtype=FP32))
        values.fill_(float("nan")), ids.fill_(-1)
        graph.replay()
        wanted = expected(logits, case.k, case.vocab)
        assert torch.equal(ids, wanted[0]) and torch.equal(values, wanted[1])


@pytest.mark.parametrize(
    ("k", "valid", "message"),
    [
        (0, None, "k = 0; it must be in 1 .. 100"),
        (101, None, "k = 101; it must be in 1 .. 100"),
        (6, 5, "k = 6; it must be in 1 .. 5"),
        (1, 0, "valid = 0; it must be in 1 .. 100"),
        (1, 101, "valid = 101; it must be in 1 .. 100"),
    ],
)
def test_impossible_requests_name_the_number(module, k, valid, message):
    with pytest.raises(ValueError, match=message):
        module.top_k(torch.zeros(2, 100), k, valid)


def test_counters_stay_where_a_graph_has_seen_them(module):
    counters = module.Counters()
    few, more = counters.get(5, torch.device("cpu")), counters.get(9, torch.device("cpu"))
    assert (len(few), len(more)) == (8, 16) and not few.any() and not more.any()
    assert counters.get(8, torch.device("cpu")) is few and counters.get(16, torch.device("cpu")) is more


def test_programs_fill_the_device_once(module):
    """Rows of 16 pieces: as many programs as run at once, or a few less; two per row beyond those."""
    programs = {rows: rows * -(-16 // module.choose_pieces(rows, 16, 264)) for rows in (1, 7, 56, 224, 896)}
    assert programs == {1: 16, 7: 112, 56: 224, 224: 224, 896: 1792}
    assert module.choose_pieces(56, 16, 200) > module.choose_pieces(56, 16, 264)


def test_no_rows(module):
    ids, values = module.top_k(torch.zeros(0, 100), 4)
    assert values.shape == ids.shape == (0, 4)
