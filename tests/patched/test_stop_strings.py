"""Tokens of one verified block that follow a stop string: the detokenizer keeps what it would if each came alone."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

TEXT = "a port, an import\nand more"
BLOCKS = [[TEXT], [TEXT[:4], TEXT[4:]], [TEXT[:14], TEXT[14:18], TEXT[18:]], list(TEXT)]


class Detokenizer(BaseIncrementalDetokenizer):
    """A token is a character."""

    def __init__(self, **parameters):
        super().__init__(SimpleNamespace(sampling_params=SamplingParams(**parameters)))

    def decode_next(self, token):
        return chr(token)


def read(blocks, stop_terminated=False, **parameters):
    """(text, tokens, stop string) once the blocks have come, or as many as it takes."""
    detokenizer = Detokenizer(**parameters)
    for i, block in enumerate(blocks):
        ended = stop_terminated and i == len(blocks) - 1
        stop = detokenizer.update([ord(letter) for letter in block], ended)
        if stop:
            break
    return detokenizer.output_text, "".join(map(chr, detokenizer.token_ids)), stop


CASES = {
    "one": ({"stop": ["port"]}, ("a ", "a port", "port")),
    "included": ({"stop": ["port"], "include_stop_str_in_output": True}, ("a port", "a port", "port")),
    "the one that ends first": ({"stop": ["and", "import", "rt"]}, ("a po", "a port", "rt")),
    "after min_tokens": ({"stop": ["port"], "min_tokens": 7}, ("a port, an im", "a port, an import", "port")),
    "none": ({"stop": ["never"]}, (TEXT, TEXT, None)),
    "not asked for": ({}, (TEXT, TEXT, None)),
    "a stop token at the end": ({"stop": ["never"], "stop_terminated": True}, (TEXT[:-1], TEXT, None)),
}


@pytest.mark.parametrize("blocks", BLOCKS, ids=len)
@pytest.mark.parametrize("case", CASES)
def test_blocks_read_as_single_tokens(case, blocks):
    parameters, wanted = CASES[case]
    text, tokens, stop = read(blocks, **parameters)
    assert (text, stop) == (wanted[0], wanted[2])
    if len(blocks) == len(TEXT):
        assert tokens == wanted[1]


@pytest.mark.needs_patch("stop-string-tokens")
@pytest.mark.parametrize("case", [case for case, (_, wanted) in CASES.items() if wanted[2]])
def test_no_token_is_kept_past_a_stop_string(case):
    parameters, wanted = CASES[case]
    assert [read(blocks, **parameters)[1] for blocks in BLOCKS] == [wanted[1]] * len(BLOCKS)
