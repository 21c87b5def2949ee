"""Makes the virtual environments that the demo and the tests run in. Standard library only.

What was installed is written down in the environment itself, so that a second run installs nothing.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TOOL, DRIFT, TESTS = "requirements.txt", "requirements-drift.txt", "tests/requirements.txt"
CPU, GPU = "demo/requirements-cpu.txt", "demo/requirements-gpu.txt"
OLDEST, NEWEST = (3, 11), (3, 14)  # vLLM 0.27.1 has no wheels for anything newer

# Where torch's CPU builds live. On a closed network, asking it must cost seconds, not pip's usual
# five retries of a long timeout.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
WITH_TORCH_INDEX = ("--extra-index-url", TORCH_CPU_INDEX, "--timeout", "15", "--retries", "1")


def ensure(venv, requirements, say=print):
    """Returns the Python of the folder `venv`, with every file named in `requirements` installed.

    venv          folder; made if there is none
    requirements  paths below the repository
    Raises SystemExit with one line that says what to do when it cannot be made.
    """
    record, python = venv / "dflash2-venv.json", venv / "bin/python"
    if not record.exists():
        claim(venv, record)
    if not (venv / "bin/pip").exists():  # the last thing that `python -m venv` puts there
        create(venv)
    installed = json.loads(record.read_text())
    for name in requirements:
        digest = hashlib.sha256((REPO / name).read_bytes()).hexdigest()
        if installed.get(name) != digest:
            say(f"installing {name} into {venv.name} ({SIZES.get(name, 'seconds')})")
            install(python, name)
            installed[name] = digest
            record.write_text(json.dumps(installed, indent=1))
    return python


SIZES = {CPU: "about 3 GB, some minutes", GPU: "about 10 GB, many minutes"}


def claim(venv, record):
    if venv.exists():
        raise SystemExit(f"error: {venv} was not made by this demo: move it away, or use it with --venv {venv}")
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        version = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(f"error: Python {version}: this needs Python 3.11 to 3.14; start it with one of them")
    venv.mkdir(parents=True)
    record.write_text("{}")


def create(venv):
    made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
    if made.returncode:
        tail = (made.stdout + made.stderr).strip().splitlines()[-1:]
        raise SystemExit(f"error: python -m venv {venv} failed ({' '.join(tail)}); on Debian: apt install python3-venv")


def install(python, name):
    """Installs one requirements file with pip, which finds its index in the user's own configuration."""
    arguments = ["-r", REPO / name]
    if name == CPU:
        arguments = ["--no-deps", *arguments]  # the file is complete: see there
        # An index of the user's may have torch's CPU build; if none has, PyTorch's own does.
        if pip(python, ["--no-deps", *torch_line()]).returncode:
            arguments += WITH_TORCH_INDEX
    done = pip(python, arguments)
    if done.returncode:
        # The first says what, the last often only where to read about it.
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[
            -1:
        ]
        raise SystemExit(
            f"error: pip could not install {name}: {' '.join(errors[:1])}; check the network and pip's index"
        )


def torch_line():
    return [line for line in (REPO / CPU).read_text().splitlines() if line.startswith("torch==")]


def pip(python, arguments):
    """The finished `pip install`. Its progress bars show on a terminal; a log stays quiet."""
    # Compiling every file of every package takes longer than unpacking them; Python compiles what it imports.
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    quiet = None if sys.stdout.isatty() else subprocess.DEVNULL
    return subprocess.run([*command, *arguments], stdout=quiet, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":  # environment.py VENV REQUIREMENTS..., for tests/run.py
    ensure(Path(sys.argv[1]), sys.argv[2:])
