"""What vLLM makes of a drafter's configuration, from the command line's arguments to its VllmConfig; no weights.

A case is a dict whose keys may be
    draft      the folder of a drafter, or a config.json's content
    files      further files beside that config.json: name -> content
    named      the name of the drafter's folder
    target     the folder of the target; null serves the drafter itself
    spec       further keys of speculative_config
    engine     further arguments of EngineArgs
    rocm       pretend that the platform is ROCm
"""

import contextlib
import io
import json
import logging
import os
import tempfile
from pathlib import Path
from unittest.mock import patch


def write_drafter(folder, case):
    place = Path(folder, case.get("named", "drafter"))
    place.mkdir()
    for name, content in {"config.json": case["draft"], **case.get("files", {})}.items():
        (place / name).write_text(json.dumps(content))
    return str(place)


def tried(case):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        drafter = case["draft"] if isinstance(case["draft"], str) else write_drafter(folder, case)
        if case.get("relative"):
            drafter = os.path.relpath(drafter)
        target = case.get("target")
        rocm = patch.object(type(current_platform), "is_rocm", lambda platform: True)
        with rocm if case.get("rocm") else contextlib.nullcontext():
            try:
                arguments = {
                    "skip_tokenizer_init": True,
                    "enforce_eager": True,
                    "max_model_len": 64,
                    "speculative_config": {"model": drafter, **case.get("spec", {})} if target else None,
                    **case.get("engine", {}),
                }
                return described(EngineArgs(target or drafter, **arguments).create_engine_config())
            except Exception as error:
                return {"refused": f"{type(error).__name__}: {error}".replace(folder, "FOLDER")}


def described(config):
    spec = config.speculative_config
    hf_config = spec.draft_model_config.hf_config
    backend = spec.attention_backend
    return {
        "target": config.model_config.model,
        "method": spec.method,
        "steps": spec.num_speculative_tokens,
        "architectures": spec.draft_model_config.architectures,
        "backend": backend and backend.name,
        "v2": config.use_v2_model_runner,
        "hf_config": {
            key: getattr(hf_config, key, None)
            for key in ("dflash_config", "sliding_window", "layer_types", "is_causal", "rope_parameters", "vocab_size")
        },
    }


def outcome(case):
    """What was made of the case, or {"refused": the error's text}, beside {"log": what was logged}."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("vllm").addHandler(handler)
    try:
        return {**tried(case), "log": log.getvalue()}
    finally:
        logging.getLogger("vllm").removeHandler(handler)
