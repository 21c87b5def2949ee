"""vLLM's own tests, before and after patching: `python -m tests.upstream [quick | cpu | gpu | newer ...]`.

Two copies of this Python's vLLM 0.27.1 are made and one of them is patched; the files that tests/upstream.toml lists
run on both, side by side, and whatever passes on the first must pass on the second. `newer` runs later releases' tests
of what was ported, on the patched copy alone: all of them must pass. Without arguments: cpu and newer.
The tests come out of vLLM's source distributions (47 MB each), from the index that pip is configured for, and are kept
in .cache/.

Exit status: 0 nothing was lost; 1 something was, or a file has no test that passes here; 3 the tests could not be had.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import _drift
from _patchlib import Problem
from tests.support.trees import REPO, apply_all, copy_tree, vllm_distribution

DATA = tomllib.loads((REPO / "tests/upstream.toml").read_text())
CACHE = REPO / ".cache"
TEST_LIMIT_S, RUN_LIMIT_S = 300, 3000


class Outcome(NamedTuple):
    passed: frozenset[str]
    failed: frozenset[str]
    log: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", choices=[*DATA["lists"], "newer", []], metavar="LIST", help="see above")
    names = parser.parse_args().lists or ["cpu", "newer"]
    wanted = {DATA["version"]} if set(names) - {"newer"} else set()
    wanted |= set(DATA["newer"]) if "newer" in names else set()
    try:
        folders = {version: fetch(version) for version in sorted(wanted)}
    except Problem as problem:
        print(f"skipped, nothing was checked: {problem}")
        return 3
    with tempfile.TemporaryDirectory(prefix="vllm-tests-") as scratch:
        pristine, patched = two_copies(Path(scratch))
        status = 0
        for name in names:
            compare = later_releases if name == "newer" else before_and_after
            status = max(status, compare(name, folders, pristine, patched))
    return status


def before_and_after(name: str, folders: dict[str, Path], pristine: Path, patched: Path) -> int:
    files = listed(name)
    before, after = run([(folders[DATA["version"]], files, site) for site in (pristine, patched)])
    print(f"{name}: {len(files)} files, {len(before.passed)} passed pristine, {len(after.passed)} patched")
    lost = before.passed - after.passed
    for test in sorted(lost):
        print(f"  lost: {test}")
    if lost:
        print(after.log)
    return 1 if lost else unheard(files, before)


def later_releases(name: str, folders: dict[str, Path], pristine: Path, patched: Path) -> int:
    status = 0
    outcomes = run([(folders[version], files, patched) for version, files in DATA["newer"].items()])
    for (version, files), outcome in zip(DATA["newer"].items(), outcomes):
        print(f"{name}: {version}'s tests on the patched copy: {len(outcome.passed)} passed, {len(outcome.failed)} not")
        for test in sorted(outcome.failed):
            print(f"  failed: {test}")
        if outcome.failed:
            print(outcome.log)
        status = max(status, 1 if outcome.failed else unheard(files, outcome))
    return status


def unheard(files: list[str], outcome: Outcome) -> int:
    """1 if a file has no test that passed, and so says nothing: a missing package, or no GPU. Otherwise 0."""
    modules = {file: file.removesuffix(".py").replace("/", ".") for file in files}
    silent = [file for file, module in modules.items() if not any(t.startswith(module) for t in outcome.passed)]
    for file in silent:
        print(f"  not checked: no test of {file} passes on this machine")
    if silent:
        print(outcome.log)
    return 1 if silent else 0


def listed(name: str) -> list[str]:
    entry = DATA["lists"][name]
    return [*(listed(entry["includes"]) if "includes" in entry else ()), *entry["files"]]


def run(jobs: list[tuple[Path, list[str], Path]]) -> list[Outcome]:
    """Run pytest once per (folder with tests/, files, site-packages folder), all at once."""
    processes = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for number, (folder, files, site) in enumerate(jobs):
                report, log = Path(scratch, f"{number}.xml"), Path(scratch, f"{number}.log")
                command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
                command += ["--timeout", str(TEST_LIMIT_S), f"--junitxml={report}", *files]
                with log.open("w") as out:
                    process = subprocess.Popen(
                        command, cwd=folder, env=environment(site), stdout=out, stderr=out, process_group=0
                    )
                processes.append((process, report, log))
            deadline = time.monotonic() + RUN_LIMIT_S
            for process, _, log in processes:
                try:
                    process.wait(max(0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    with log.open("a") as out:
                        print(f"\nended after {RUN_LIMIT_S} s", file=out)
        finally:
            for process, _, _ in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return [outcome(report, log) for _, report, log in processes]


def environment(site: Path) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    return own | {
        "PYTHONPATH": str(site),
        "HF_HOME": str(CACHE / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def outcome(report: Path, log: Path) -> Outcome:
    passed, failed = set(), set()
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        test = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.add(test)
        elif "skipped" not in kinds:
            passed.add(test)
    return Outcome(frozenset(passed), frozenset(failed), log.read_text(errors="replace")[-6000:])


def two_copies(folder: Path) -> tuple[Path, Path]:
    """An unpatched and a patched copy of this Python's vLLM. Raises SystemExit if it is not the version needed."""
    found = vllm_distribution()
    if found.version.split("+")[0] != DATA["version"]:
        raise SystemExit(f"error: the tests are those of vLLM {DATA['version']}, this Python has {found.version}")
    pristine, patched = (copy_tree(Path(found.locate_file("")), folder / name) for name in ("pristine", "patched"))
    for site, option in ((pristine, ["--revert"]), (patched, [])):
        done = apply_all("--root", site, *option)
        if done.returncode:
            raise SystemExit(f"error: apply_all.py {' '.join(option)} on a copy of vLLM failed\n{done.stderr}")
    return pristine, patched


def fetch(version: str) -> Path:
    """The folder that holds tests/ of one release, kept from an earlier run or fetched. Raises Problem."""
    folder = CACHE / f"vllm-{version}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            print(f"fetching the tests of vLLM {version} (47 MB)", flush=True)
            unpack(download(version, Path(scratch, "sdist.tar.gz")), version, Path(scratch, "tree"))
            Path(scratch, "tree").rename(folder)
    for name, config in DATA["models"].items():
        write_model(CACHE / "hf/hub" / f"models--{name.replace('/', '--')}", config)
    return folder


def download(version: str, path: Path) -> Path:
    with _drift._network_errors(f"the source distribution of vLLM {version} could not be read"):
        index = _drift.Index(_drift._ask_pip())
        links = [link for link in index._links(version) if not link.is_wheel]
        if not links:
            raise Problem(f"the index that pip is configured for has no source distribution of vLLM {version}")
        link = links[0]
        if link.is_file:
            shutil.copyfile(link.file_path, path)
        else:
            with index._session(link.url).get(_drift._without_login(link.url), stream=True, timeout=60) as answer:
                answer.raise_for_status()
                with path.open("wb") as file:
                    shutil.copyfileobj(answer.raw, file)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != (link.hashes or {}).get("sha256", digest):
            raise Problem(f"{link.filename} has the SHA-256 {digest}, not the one that the index names")
    return path


def unpack(archive: Path, version: str, folder: Path) -> None:
    prefix = f"vllm-{version}/"
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith(f"{prefix}tests/"):
                member.name = member.name.removeprefix(prefix)
                tar.extract(member, folder, filter="data")
    # Its tests take their settings from here and not from this repository.
    (folder / "pytest.ini").write_text("[pytest]\n")


def write_model(folder: Path, config: dict) -> None:
    """A model as Hugging Face's cache keeps it, without weights."""
    commit = "0" * 40
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot / "tokenizer_config.json").write_text("{}")


if __name__ == "__main__":
    raise SystemExit(main())
