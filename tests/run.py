"""Runs the tests: `python tests/run.py [pytest's arguments]`. Makes the demo's environment if need be."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "demo"))

from environment import CPU, TESTS, TOOL, ensure  # noqa: E402


def main(arguments):
    python = ensure(REPO / ".venv", (CPU, TOOL, "requirements-drift.txt", TESTS))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A later -m of the caller's replaces this one.
    command = [python, "-m", "pytest", "-m", "not gpu", *arguments]
    return subprocess.run(command, cwd=REPO, env=env).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
