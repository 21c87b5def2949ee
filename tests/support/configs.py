"""Engine configs for the tiny pair, without an engine."""

import contextlib
import json
import tempfile
from pathlib import Path

TINY = Path(__file__).resolve().parent.parent.parent / "demo/tiny"


def engine_config(steps=7, draft=TINY / "draft", **arguments):
    """The engine's config for the tiny target and the drafter in folder `draft`; none for 0 steps."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "dflash", "model": str(draft), "num_speculative_tokens": steps}
    return EngineArgs(
        model=str(TINY / "target"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config=speculative if steps else None,
        **{"max_model_len": 256, **arguments},
    ).create_engine_config()


@contextlib.contextmanager
def drafter(**keys):
    """A folder with the tiny drafter's config.json, `keys` replaced in it; no weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((TINY / "draft" / "config.json").read_text()) | keys
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder


def refusal(make):
    """The error that `make` raises, as text, or what it returned."""
    try:
        return {"served": make()}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
