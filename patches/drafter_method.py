"""A DFlash2 checkpoint needs no further keys: its architecture gives the method, its block_size S.

0.27.1 guesses the method from the checkpoint's path: without "dflash" in it a drafter is taken for a
draft model of its own, or for EAGLE's. A local folder with a dot in its name is no Python module.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/config/speculative.py"
SCOPE = "SpeculativeConfig.__post_init__"

PATCH = Patch(
    name="drafter-method",
    why="a DFlash2 checkpoint says itself how it is served: method and num_speculative_tokens can be left out",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            SCOPE,
            old="""\
        # infer method from user args
""",
            new="""\
        given_method = self.method
        # infer method from user args
""",
        ),
        Hunk(
            FILE,
            SCOPE,
            old="""\
                # Automatically detect the method
""",
            new="""\
                from vllm.transformers_utils.configs import dflash2

                if dflash2.is_dflash2(self.draft_model_config.hf_config):
                    self.method = dflash2.settle_method(given_method)
                    dflash2.check_pair(
                        self.draft_model_config, self.target_model_config
                    )
                    self.num_speculative_tokens = dflash2.settle_steps(
                        self.draft_model_config.hf_config, self.num_speculative_tokens
                    )

                # Automatically detect the method
""",
        ),
        Hunk(
            FILE,
            "SpeculativeConfig._is_custom_proposer_path",
            old="""\
        parts = model.split(".")
""",
            new="""\
        import os

        if os.path.isdir(model):
            return False
        parts = model.split(".")
""",
        ),
    ),
)
