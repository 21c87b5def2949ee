"""A request that ends at a stop string keeps no token that was verified after it.

Several tokens of a block arrive together. 0.27.1 cuts the text at the stop string, but the token ids, their
logprobs and the usage count go on to the end of the block. Here tokens are looked at one by one if a request
has stop strings, and what follows the one that completes a stop string is dropped.
"""

from _patchlib import Hunk, Marker, Patch

DETOKENIZER = "vllm/v1/engine/detokenizer.py"
UPDATE = "BaseIncrementalDetokenizer.update"
OUTPUT = "vllm/v1/engine/output_processor.py"
PROCESS = "OutputProcessor.process_outputs"

PATCH = Patch(
    name="stop-string-tokens",
    why="token ids, logprobs and usage ran past a stop string to the end of the verified block",
    upstream="OutputProcessor._trim_surplus_tokens of vLLM 0.32.0",
    shipped_in="0.32.0",
    hunks=(
        Hunk(
            DETOKENIZER,
            UPDATE,
            old="        if stop_terminated and not self.include_stop_str_in_output:\n",
            new="""\
        if self.stop and len(new_token_ids) > 1:
            # As if each had come alone: none is taken past a stop string.
            for i in range(len(new_token_ids)):
                is_last = i == len(new_token_ids) - 1
                stop_string = self.update(
                    new_token_ids[i : i + 1], stop_terminated and is_last
                )
                if stop_string is not None:
                    return stop_string
            return None

        if stop_terminated and not self.include_stop_str_in_output:
""",
        ),
        Hunk(
            OUTPUT,
            PROCESS,
            old="                stop_string = req_state.detokenizer.update(\n",
            new="""\
                num_tokens_before = req_state.detokenizer.num_output_tokens()
                stop_string = req_state.detokenizer.update(
""",
        ),
        Hunk(
            OUTPUT,
            PROCESS,
            old="                    stop_reason = stop_string\n",
            new="""\
                    stop_reason = stop_string
                    # Tokens of the same block after the stop string are dropped.
                    num_kept = (
                        req_state.detokenizer.num_output_tokens() - num_tokens_before
                    )
                    new_token_ids = new_token_ids[:num_kept]
                    if engine_core_output.new_logprobs is not None:
                        engine_core_output.new_logprobs = (
                            engine_core_output.new_logprobs.slice_request(0, num_kept)
                        )
""",
        ),
    ),
    shipped=((Marker(OUTPUT, PROCESS, "self._trim_surplus_tokens("),),),
)
