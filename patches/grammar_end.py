"""Tokens after the end of a grammar are nobody's error.

A draft may run past the point where the structured output is complete. 0.27.1 feeds the rest to a
matcher that has terminated: the call reports failure and the scheduler ends the request with an error.
The check before the call does not help when one call holds both the end and what follows it.
"""

from _patchlib import Hunk, Marker, Patch

FILE = "vllm/v1/structured_output/backend_xgrammar.py"

PATCH = Patch(
    name="grammar-end",
    why="a draft that runs past the grammar's end ends the request with an error",
    upstream="XgrammarGrammar.accept_tokens of vLLM 0.29.0",
    shipped_in="0.29.0",
    hunks=(
        Hunk(
            FILE,
            "XgrammarGrammar.accept_tokens",
            old='''\
        Returns False if the FSM failed to advance.
        """
        if self._is_terminated:
            return False
''',
            new='''\
        Returns False if the FSM failed to advance.
        Tokens after the grammar's end are ignored.
        """
        if self._is_terminated:
            return True
''',
        ),
        Hunk(
            FILE,
            "XgrammarGrammar.accept_tokens",
            old="""\
            self.num_processed_tokens += 1
        self._is_terminated = self.matcher.is_terminated()
""",
            new="""\
            self.num_processed_tokens += 1
            self._is_terminated = self.matcher.is_terminated()
            if self._is_terminated:
                break
""",
        ),
        Hunk(
            FILE,
            "XgrammarGrammar.validate_tokens",
            old="            if self.matcher.accept_token(token):\n",
            new="            if not self.matcher.is_terminated() and self.matcher.accept_token(token):\n",
        ),
    ),
    shipped=((Marker(FILE, "XgrammarGrammar.validate_tokens", "self.matcher.is_terminated()"),),),
)
