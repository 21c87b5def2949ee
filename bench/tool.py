"""CPU time of apply_all.py, Python's own start included: a first apply, a second run, --revert.

    python -m bench.tool [--root SITE_PACKAGES] [--repeat N]

Works on a copy of an unpatched vLLM: that of this Python, or of --root. Prints the medians.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _site

TOOL = Path(_site.__file__).with_name("apply_all.py")
STEPS = {"first apply": (), "second run": (), "revert": ("--revert",)}


def copy_of(site: _site.Site, to: Path) -> Path:
    """Python sources and the wheel's metadata; extension modules do not matter to the tool."""
    for folder in (site.root / "vllm", *site.root.glob("vllm*.dist-info")):
        shutil.copytree(folder, to / folder.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return to


def cpu_seconds(root: Path, *arguments: str) -> float:
    command = [sys.executable, str(TOOL), "--root", str(root), *arguments]
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", metavar="SITE_PACKAGES")
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of(_site.locate(given.root), Path(folder))
        times: dict[str, list[float]] = {step: [] for step in STEPS}
        for _ in range(given.repeat):
            for step, arguments in STEPS.items():
                times[step].append(cpu_seconds(root, *arguments))
    for step, seconds in times.items():
        print(f"{step:<12} {statistics.median(seconds):.2f} s of CPU")


if __name__ == "__main__":
    main()
