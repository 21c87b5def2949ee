"""All or nothing: a failure at any step of writing leaves every byte as it was, and a killed process can be undone."""

import builtins
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import _patchlib
import _tree
from _patchlib import Hunk, Patch
from tests.tool.patching import (
    CAUSALITY,
    HOME,
    PYTHON,
    REPO,
    call,
    contents,
    older_patch_set,
    patch_set,
    snapshot,
)


class Fault:
    """Lets `count` calls of a function of os through and then fails once, or every time."""

    def __init__(self, real, count, error, lasting=False):
        self.real, self.left, self.error, self.lasting, self.failed = real, count, error, lasting, False

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.left < 0 and (self.lasting or not self.failed):
            self.failed = True
            raise self.error
        return self.real(*arguments, **options)


def steps(monkeypatch, tree, name, **options):
    """How often an application calls a function of os."""
    calls = []
    real = getattr(os, name)
    with monkeypatch.context() as patched:
        patched.setattr(os, name, lambda *a, **o: (calls.append(a), real(*a, **o))[1])
        assert call("--root", tree, **options).code == 0
    return len(calls)


FULL = OSError(errno.ENOSPC, "No space left on device", "file.py")


@pytest.mark.parametrize("start", ["pristine", "older"])
@pytest.mark.parametrize("name", ["replace", "chmod", "mkdir", "unlink"])
def test_a_failure_at_each_step_is_rolled_back(tree, tmp_path, monkeypatch, name, start, template):
    if start == "older":
        assert call("--root", tree, patch_set=older_patch_set()).code == 0
    before = contents(tree)
    rehearsal = shutil.copytree(tree, tmp_path / "rehearsal")
    total = steps(monkeypatch, rehearsal, name)
    assert total or (name, start) == ("unlink", "pristine")
    # Some on the way and the last two: each costs an application.
    for step in sorted({*range(0, total, total // 5 + 1), *range(max(0, total - 2), total)}):
        fault = Fault(getattr(os, name), step, FULL)
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fault)
            result = call("--root", tree)
        assert fault.failed
        assert result.code == 3, (step, result.out, result.err)
        assert "No space left on device" in result.err and "put back" in result.err
        assert contents(tree) == before, step
    assert call("--root", tree).code == 0


@pytest.mark.parametrize("name", ["replace", "unlink"])
def test_a_failing_revert_is_rolled_back(patched_tree, monkeypatch, name):
    before = contents(patched_tree)
    for step in (0, 3, 9):
        fault = Fault(getattr(os, name), step, FULL)
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fault)
            result = call("--root", patched_tree, "--revert")
        assert fault.failed and result.code == 3
        assert contents(patched_tree) == before, (name, step)
    assert call("--root", patched_tree, "--revert").code == 0


def test_an_interrupt_is_rolled_back(tree, monkeypatch):
    before = contents(tree)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", Fault(os.replace, 30, KeyboardInterrupt()))
        result = call("--root", tree)
    assert result.code == 130
    assert contents(tree) == before


def test_a_link_is_a_link_again_after_a_failure(tree, tmp_path, monkeypatch):
    outside = tmp_path / "outside.py"
    shutil.move(tree / CAUSALITY, outside)
    (tree / CAUSALITY).symlink_to(outside)
    before = contents(tree)
    total = steps(monkeypatch, shutil.copytree(tree, tmp_path / "rehearsal", symlinks=True), "replace")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", Fault(os.replace, total - 1, FULL))
        assert call("--root", tree).code == 3
    assert (tree / CAUSALITY).readlink() == outside and contents(tree) == before


def test_bytecode_that_is_kept_elsewhere(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    compiled = Path(importlib.util.cache_from_source(str(tree / CAUSALITY)))
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"stale")
    assert call("--root", tree).code == 0
    assert not compiled.exists()


def test_where_nothing_can_be_put_back_it_says_so(tree, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", Fault(os.replace, 40, FULL, lasting=True))
        result = call("--root", tree)
    assert result.code == 3 and "--revert" in result.err
    assert call("--root", tree).code == 2
    assert call("--root", tree, "--revert").code == 0


def test_bytecode_that_cannot_be_removed_stops_before_the_change(tree, monkeypatch):
    """Another user's .pyc in a sticky folder: the change would not take effect, and nothing may stay half written."""
    cache = (tree / CAUSALITY).parent / "__pycache__"
    cache.mkdir()
    (cache / "qwen3_dflash.cpython-311.pyc").write_bytes(b"")
    before = contents(tree)
    real = os.unlink

    def unlink(path, **options):
        if str(path).endswith(".pyc"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    result = call("--root", tree)
    assert result.code == 3 and ".pyc: Operation not permitted. Everything was put back" in result.err
    assert contents(tree) == before


def killed(tree, name, count, *arguments):
    """apply_all.py in a process that ends outright at one call of a function of os."""
    code = (
        "import os, sys, apply_all\n"
        "name, left = sys.argv.pop(1), [int(sys.argv.pop(1))]\n"
        "real = getattr(os, name)\n"
        "def call(*a, **o):\n"
        "    left[0] -= 1\n"
        "    return os._exit(9) if left[0] < 0 else real(*a, **o)\n"
        "setattr(os, name, call)\n"
        "apply_all.main(sys.argv[1:])\n"
    )
    command = [PYTHON, "-c", code, name, str(count), "--root", tree, *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True)
    assert done.returncode == 9, done.stderr


def test_a_killed_revert_leaves_nothing_for_good(patched_tree, template):
    """Killed when the record is gone and some originals are not: they are litter, and the next run clears it."""
    record, left = patched_tree / HOME / "record.json", 0
    while record.exists():
        left += 8
        killed(patched_tree, "unlink", left, "--revert")
    assert (patched_tree / HOME).exists()
    assert call("--root", patched_tree, "--revert").code == 0
    assert contents(patched_tree) == contents(template)


def test_an_only_copy_is_no_litter(patched_tree):
    (patched_tree / HOME / "record.json").unlink()
    before = contents(patched_tree)
    assert call("--root", patched_tree, "--revert").code == 2
    assert contents(patched_tree) == before


def test_record_lists_our_files_before_they_come(tree):
    """Killed at any moment, what is there of ours is listed, so that pip uninstall takes it along."""
    total = len(patch_set().files)
    killed(tree, "replace", 2 * len({hunk.file for hunk in patch_set().hunks()}) + 3 + total // 2)
    (wheel,) = tree.glob("vllm*.dist-info/RECORD")
    listed = {line.split(",")[0] for line in wheel.read_text().splitlines()}
    ours = {path for path in patch_set().files if (tree / path).exists()}
    assert ours and ours < set(patch_set().files)
    assert ours <= listed and f"{HOME}/record.json" in listed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_from_outside_it_rolls_back(tree, number):
    before = contents(tree)
    code = (
        "import os, runpy, signal, sys\n"
        "number, left, real = int(sys.argv.pop(1)), [30], os.replace\n"
        # Whatever the tests run under: nohup would have it ignored.
        "signal.signal(number, signal.SIG_DFL)\n"
        "def replace(*a):\n"
        "    left[0] -= 1\n"
        "    real(*a)\n"
        # Once while writing, and again while everything is put back.
        "    if left[0] in (0, -9): os.kill(os.getpid(), number)\n"
        "os.replace = replace\n"
        "sys.argv[0] = 'apply_all.py'\n"
        "sys.path.insert(0, '')\n"
        "runpy.run_path('apply_all.py', run_name='__main__')\n"
    )
    command = [PYTHON, "-c", code, str(int(number)), "--root", tree]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert contents(tree) == before


@pytest.mark.parametrize("renames", [5, 35])
def test_a_killed_process_is_undone_by_revert(tree, template, renames):
    """Killed outright, nothing can roll back: the record is there before the first change, so --revert can."""
    killed(tree, "replace", renames)
    changed = [path for path, data in contents(template).items() if contents(tree).get(path) != data]
    if (tree / HOME / "record.json").exists():
        result = call("--root", tree)
        assert result.code == 2 and "--revert" in result.out
        assert call("--root", tree, "--revert").code == 0
    else:
        assert not changed
        assert call("--root", tree).code == 0
        assert call("--root", tree, "--revert").code == 0
    assert contents(tree) == contents(template)


def test_what_was_written_is_read_back(tree, monkeypatch):
    """A disk that keeps other bytes than it was given is found out."""
    before = contents(tree)
    real, lies = os.replace, ["gumbel.py"]

    def lying(source, destination):
        if lies and str(destination).endswith(lies[0]):
            lies.clear()
            with open(source, "ab") as file:
                file.write(b"\n")
        real(source, destination)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lying)
        result = call("--root", tree)
    assert result.code == 2 and "gumbel.py" in result.err and "put back" in result.err
    assert contents(tree) == before


def test_no_original_no_revert(patched_tree):
    kept = patched_tree / HOME / "originals" / (CAUSALITY + ".orig")
    kept.write_bytes(kept.read_bytes() + b"\n")
    before = snapshot(patched_tree)
    for options in ((), ("--force",)):
        result = call("--root", patched_tree, "--revert", *options)
        assert result.code == 2 and "reinstall vLLM" in result.err
    assert snapshot(patched_tree) == before
    kept.unlink()
    assert call("--root", patched_tree, "--revert").code == 2


@pytest.mark.parametrize(
    "record",
    [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "files": []}', b"\xff", b"[" * 10**5],
    ids=lambda record: repr(record[:10]),
)
def test_a_damaged_record(patched_tree, record):
    (patched_tree / HOME / "record.json").write_bytes(record)
    for arguments in ((), ("--check",), ("--revert",), ("--check", "--json")):
        result = call("--root", patched_tree, *arguments)
        assert result.code == 2 and "record.json is damaged" in result.err
    assert result.json()["verdict"] == "PARTIAL"
    status = call("--root", patched_tree, "--status", "--json")
    assert (status.code, status.json()["exit_code"], status.json()["verdict"]) == (0, 0, "PARTIAL")


@pytest.mark.parametrize(
    "change",
    [
        {"version": None},
        {"version": 5},
        {"patches": None},
        {"digest": []},
        {"files": {}},
        {"files": {"": [None, "0"]}},
        {"files": {"vllm/\0": [None, "0"]}},
        {"files": {"vllm/\ud800": [None, "0"]}},
        {"files": {"vllm/../../x.py": [None, "0"]}},
        {"files": {"torch/__init__.py": [None, "0"]}},
        {"files": {f"{HOME}/record.json": [None, "0"]}},
        {"files": {"vllm/x.py": [["0"], {}]}},
        {"folders": ["torch"]},
        {"folders": [f"{HOME}/../.."]},
        {"wheel": "vllm/__init__.py"},
        {"wheel": "../x.dist-info/RECORD"},
    ],
    ids=str,
)
def test_a_record_with_what_is_not_ours(patched_tree, change):
    place = patched_tree / HOME / "record.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    before = snapshot(patched_tree)
    for arguments in (("--check",), ("--revert", "--force")):
        result = call("--root", patched_tree, *arguments)
        assert result.code == 2 and "record.json is damaged" in result.err
    assert snapshot(patched_tree) == before


def test_a_record_that_lacks_a_file(patched_tree, template):
    """Cut short by hand: no crash, and no revert may throw away the originals that it does not name."""
    place = patched_tree / HOME / "record.json"
    record = json.loads(place.read_text())
    del record["files"][CAUSALITY]
    place.write_text(json.dumps(record))
    assert call("--root", patched_tree, "--check").code == 0
    call("--root", patched_tree, "--revert")
    assert (patched_tree / HOME / "originals" / f"{CAUSALITY}.orig").read_bytes() == (template / CAUSALITY).read_bytes()


def test_a_record_of_another_vllm(patched_tree):
    """Something replaced vLLM without uninstalling it: the kept originals must not go into the new one."""
    (info,) = patched_tree.glob("vllm*.dist-info")
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("Version: 0.27.1", "Version: 0.28.0"))
    before = snapshot(patched_tree)
    for arguments in ((), ("--check",), ("--revert", "--force")):
        result = call("--root", patched_tree, *arguments)
        assert result.code == 2 and "was vLLM 0.27.1 when it was patched and is 0.28.0 now" in result.err
    assert snapshot(patched_tree) == before


def test_others_keep_what_they_put_beside_ours(patched_tree):
    folder = (patched_tree / "vllm/model_executor/layers/dflash2/__init__.py").parent
    (folder / "theirs.txt").write_text("theirs")
    assert call("--root", patched_tree, "--revert").code == 0
    assert [path.name for path in folder.iterdir()] == ["theirs.txt"]


def test_others_keep_their_lines_in_record(patched_tree, template):
    (wheel,) = patched_tree.glob("vllm*.dist-info/RECORD")
    (before,) = template.glob("vllm*.dist-info/RECORD")
    wheel.write_bytes(wheel.read_bytes() + b"theirs.py,,\n")
    result = call("--root", patched_tree, "--revert")
    assert result.code == 0
    assert wheel.read_bytes() == before.read_bytes() + b"theirs.py,,\n"


def test_a_tree_without_record(tree):
    """Conda, editable and distribution packages may have none."""
    (wheel,) = tree.glob("vllm*.dist-info/RECORD")
    info = wheel.parent.rename(tree / "vllm-0.27.1.dist-info")
    (info / "RECORD").unlink()
    before = contents(tree)
    assert call("--root", tree).code == 0
    assert not (info / "RECORD").exists()
    assert call("--root", tree, "--revert").code == 0
    assert contents(tree) == before


def test_check_and_status_open_nothing_for_writing(tree, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"writes: {arguments}")

    before = snapshot(tree)
    for name in ("replace", "unlink", "mkdir", "rmdir", "chmod", "rename", "remove", "symlink", "link", "utime"):
        monkeypatch.setattr(os, name, refuse)
    real = os.open
    reads = builtins.open

    def open_to_read(file, mode="r", *arguments, **options):
        return reads(file, mode, *arguments, **options) if set(mode) <= set("rbt") else refuse(file, mode)

    monkeypatch.setattr(builtins, "open", open_to_read)
    writes = os.O_WRONLY | os.O_RDWR
    monkeypatch.setattr(os, "open", lambda path, flags, *a: refuse(path) if flags & writes else real(path, flags, *a))
    assert call("--root", tree, "--check").code == 1
    assert call("--root", tree, "--status").code == 0
    monkeypatch.undo()
    assert snapshot(tree) == before


def test_revert_restores_everything(tree, template):
    (tree / CAUSALITY).chmod(0o640)
    before = {path: state[:2] for path, state in snapshot(tree).items()}
    assert call("--root", tree).code == 0
    assert (tree / CAUSALITY).stat().st_mode & 0o777 == 0o640
    assert call("--root", tree, "--revert").code == 0
    assert {path: state[:2] for path, state in snapshot(tree).items()} == before
    again = call("--root", tree, "--revert")
    assert again.code == 0 and "Nothing to revert" in again.out


def test_new_files_can_be_read_by_those_who_read_vllm(tree):
    previous = os.umask(0o077)
    try:
        assert call("--root", tree).code == 0
    finally:
        os.umask(previous)
    like = (tree / "vllm/__init__.py").stat()
    report = json.loads((tree / HOME / "record.json").read_text())
    for path, (before, _) in report["files"].items():
        if before is None:
            assert (tree / path).stat().st_mode == like.st_mode, path


def test_others_owner_is_kept(tree):
    if os.getuid() != 0:
        pytest.skip("only root can give files to someone else")
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert call("--root", tree).code == 0
    assert {path.stat().st_uid for path in tree.rglob("*")} == {12345}


def test_a_failing_lock_is_no_failure(tree, monkeypatch):
    """Some network file systems have none."""

    def refuse(*arguments):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert call("--root", tree).code == 0


def test_a_writer_waits_for_another(tree):
    with _tree.locked(tree, exclusive=True):
        process = subprocess.Popen(
            [PYTHON, "apply_all.py", "--root", tree, "--check"], cwd=REPO, stdout=subprocess.DEVNULL
        )
        time.sleep(1.5)
        assert process.poll() is None
    assert process.wait() == 1


def test_the_plan_is_pure(template):
    """One survey reads each file once and writes none; its result depends on nothing else."""
    asked = []
    read = _tree.reader(template)

    def spy(path):
        asked.append(path)
        return read(path)

    first = _patchlib.survey(spy, "0.27.1", patch_set())
    assert len(asked) == len(set(asked))
    assert _patchlib.survey(read, "0.27.1", patch_set()) == first


def test_overlaps_that_only_the_tree_shows(tree):
    """Two scopes, one inside the other, whose anchors meet in one line."""
    anchor = "    if override is not None:\n"
    one = Hunk(CAUSALITY, "_dflash_layer_causal", anchor, "    if override or override is False:\n")
    other = Hunk(CAUSALITY, "", "def _dflash_layer_causal(config: Qwen3Config, layer_idx: int) -> bool:\n", "")
    text = (tree / CAUSALITY).read_text()
    start = text.index(other.old)
    old = text[start : text.index(anchor) + len(anchor)]
    other = Hunk(CAUSALITY, "", old, old + "        pass\n    if override is not None:\n")
    both = patch_set([Patch("one", "", "", None, "", hunks=(one,)), Patch("two", "", "", None, "", hunks=(other,))])
    before = snapshot(tree)
    result = call("--root", tree, patch_set=both)
    assert result.code == 3 and "patch one: a hunk overlaps one of patch two" in result.err
    assert snapshot(tree) == before
