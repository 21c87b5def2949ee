"""A DFlash2 config.json is read in every form it is published in, and refused by key before weights load.

transformers knows no model_type "dflash2", and drops the window of a config without use_sliding_window;
0.27.1 finds out that it cannot serve a drafter when the target has loaded, minutes later. Reading stands
outside get_config's retries: what is refused once will be refused again.
"""

from _patchlib import Hunk, Patch

FILE = "vllm/transformers_utils/config.py"
VLLM_CONFIG = "vllm/config/vllm.py"

PATCH = Patch(
    name="drafter-config",
    why="a drafter's config.json is read in all its forms, and what cannot be served is refused before weights load",
    upstream="none",
    shipped_in=None,
    hunks=(
        Hunk(
            FILE,
            "HFConfigParser.parse",
            old="""\
        # Use custom model class if it's in our registry
""",
            new="""\
        from vllm.transformers_utils.configs.dflash2 import is_dflash2

        if is_dflash2(config_dict):
            return config_dict, PretrainedConfig()  # get_config reads it
        # Use custom model class if it's in our registry
""",
        ),
        Hunk(
            FILE,
            "get_config",
            old="""\
    # Architecture mapping for models without explicit architectures field
""",
            new="""\
    from vllm.transformers_utils.configs import dflash2

    if dflash2.is_dflash2(config_dict):
        config_dict, config = dflash2.read_config(config_dict)

    # Architecture mapping for models without explicit architectures field
""",
        ),
        Hunk(
            FILE,
            "get_config",
            old="""\
        config.quantization_config = quantization_config
""",
            new="""\
        dflash2.check_quantization(config, quantization_config)
        config.quantization_config = quantization_config
""",
        ),
        Hunk(
            VLLM_CONFIG,
            "VllmConfig.__post_init__",
            old="""\
        self.try_verify_and_update_config()
""",
            new="""\
        from vllm.transformers_utils.configs import dflash2

        dflash2.check_engine(self)
        self.try_verify_and_update_config()
""",
        ),
    ),
)
