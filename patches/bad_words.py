"""A bad word of several tokens is kept out of a verified block, too.

The kernel takes the tokens before a row from the request's history and, past it, from the block's
inputs. The first of those inputs is the last token of the history; 0.27.1 reads it as the first draft,
and every draft one place early. So words that lie within a block are emitted, and innocent ones withheld.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/worker/gpu/sample/bad_words.py"

PATCH = Patch(
    name="bad-words",
    why="a bad word of several tokens was emitted if it lay within one verified block",
    upstream="_bad_words_kernel of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            FILE,
            "_bad_words_kernel",
            old="            spec_offset = actual_pos - output_len\n",
            new="""\
            # The block's first input is the history's last token; its drafts follow.
            spec_offset = actual_pos - output_len + 1
""",
        ),
    ),
    shipped=((Marker(FILE, "_bad_words_kernel", "tl.load(input_ids_ptr + cur_req_first_pos + spec_offset + 1)"),),),
)
