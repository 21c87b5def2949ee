"""Runs the tests: `python tests/run.py [GROUP or file ...] [pytest's arguments]`. Makes .venv if it is not there.

    python tests/run.py                     everything but what needs a GPU
    python tests/run.py tool                the patch tool's tests
    python tests/run.py patched -k walk     of tests/patched, those whose names have "walk" in them

The last line is `N passed, N failed, N skipped`, and the exit status is 0 if none failed and one at least ran.

Each folder is a group. One process of pytest runs a group, several at a time; see support/runner.py.
    tool      the patch tool and the documents; needs vLLM's files, imports none of them
    patched   runs in a patched vLLM, which is first on PYTHONPATH: import what you test. Triton's kernels run in
              its interpreter. What a patch cures is marked `@pytest.mark.needs_patch("its name")`; the same folder
              is run again on an unpatched copy, where each test so marked must fail by an assertion (another
              exception must be named: `needs_patch("its name", raises=TypeError)`). Only those run there, so import
              what 0.27.1 does not have inside tests and fixtures, not at the top of a file that has such marks.
    engine    starts whole engines in a patched vLLM, likewise
    gpu       what the checks on a GPU conclude from what they see, without one
"""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("demo/requirements-cpu.txt", "requirements.txt", "requirements-drift.txt", "tests/requirements.txt")


def main(arguments):
    made = subprocess.run([sys.executable, REPO / "demo/environment.py", REPO / ".venv", *REQUIREMENTS])
    if made.returncode:
        return made.returncode
    command = [REPO / ".venv/bin/python", "-m", "tests.support.runner", *arguments]
    return subprocess.run(command, cwd=REPO).returncode


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
