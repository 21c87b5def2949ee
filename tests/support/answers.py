"""Reading back the JSON that code in a process of its own prints as its last line."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent


class Answers:
    """answers(probe) -> what the probe of that name found; fails with the probe's own error where it has one."""

    def __init__(self, output):
        self.found = last_line(output)

    def __call__(self, probe):
        value = self.found[probe]
        assert not (isinstance(value, dict) and "error" in value), value["error"]
        return value


def last_line(output):
    return json.loads(output.splitlines()[-1])


def run_interpreted(module):
    """What a test module prints when it is run as a script that needs no vLLM, under Triton's interpreter."""
    # The variable has to be set before Triton is imported, which other tests may have done in this process.
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module], cwd=REPO, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return last_line(done.stdout)
