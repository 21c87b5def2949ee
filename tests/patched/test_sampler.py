"""vLLM's sampler on blocks of drafts: sampler_blocks.py, against the patched vLLM."""

from pathlib import Path

BLOCKS = Path(__file__).with_name("sampler_blocks.py")


def test_blocks_are_processed_as_plain_decoding(run_patched):
    code = f"import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(BLOCKS)!r}]))"
    run_patched(code, interpret=True)
