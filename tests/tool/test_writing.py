"""Writing into real installations: links, owners, line ends, locales, bytecode, RECORD, pip; and taking it all back."""

import base64
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

import _site
from tests.tool.disk import changes
from tests.tool.patching import (
    CAUSALITY,
    HOME,
    MODULE,
    OURS,
    PYTHON,
    RECORD,
    REPO,
    call,
    contents,
    crlf,
    edit_file,
    info,
    small_patch_set,
    snapshot,
    succeed,
    targets,
    unchanged,
)

COMMAND = [PYTHON, REPO / "apply_all.py"]


def test_check_and_status_change_nothing(tree):
    with unchanged(tree):
        assert changes(tree, call, tree, "--check") == changes(tree, call, tree, "--status") == []
    assert call(tree, "--check").code == 1
    succeed(tree, "--status")


def test_revert_restores_everything(tree):
    (tree / CAUSALITY).chmod(0o640)
    before = {path: state[:2] for path, state in snapshot(tree).items()}
    succeed(tree)
    assert (tree / CAUSALITY).stat().st_mode & 0o777 == 0o640
    assert "files are as they were before this tool" in succeed(tree, "--revert").out
    assert {path: state[:2] for path, state in snapshot(tree).items()} == before
    with unchanged(tree):
        assert "Nothing to revert" in succeed(tree, "--revert").out


def test_twice_at_the_same_moment(tree, patched_template):
    running = [subprocess.Popen([*COMMAND, "--root", tree], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted("Applied" in output for output in outputs) == [False, True]
    assert contents(tree) == contents(patched_template)


def test_a_writer_waits_for_another(tree):
    with _site.locked(tree, exclusive=True):
        process = subprocess.Popen([*COMMAND, "--root", tree, "--check"], stdout=subprocess.DEVNULL)
        time.sleep(1.5)
        assert process.poll() is None
    assert process.wait() == 1


def test_a_failing_lock_is_no_failure(small, monkeypatch):
    """Some network file systems have none."""

    def refuse(*arguments):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    succeed(small, patch_set=small_patch_set())


# Where the tree lies


def test_inside_a_dirty_checkout(tmp_path, template, patched_template):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    (checkout / "dirty.py").write_text("x = (\n")
    site = shutil.copytree(template, checkout / ".venv" / "lib" / "site-packages")
    environment = {**os.environ, "PATH": ""}  # nothing that could be consulted
    done = subprocess.run([*COMMAND, "--root", site], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert contents(site) == contents(patched_template)
    assert (checkout / "dirty.py").read_text() == "x = (\n"


def test_a_linked_site_packages(tree, tmp_path, patched_template):
    """The folder that --root names may itself be a link: lib64 is one."""
    (tmp_path / "lib64").symlink_to(tree)
    succeed(tmp_path / "lib64")
    assert contents(tree) == contents(patched_template)


def test_hard_links_into_a_cache(tree, tmp_path, patched_template):
    cache = tmp_path / "cache"
    shutil.copytree(tree, cache, copy_function=os.link)
    before = snapshot(cache)
    succeed(tree)
    assert contents(tree) == contents(patched_template)
    succeed(tree, "--revert")
    assert snapshot(cache) == before


def test_a_target_is_a_symlink_out_of_the_tree(tree, tmp_path, template):
    outside = tmp_path / "outside.py"
    shutil.move(tree / CAUSALITY, outside)
    (tree / CAUSALITY).symlink_to(outside)
    before = outside.read_bytes()
    succeed(tree)
    assert outside.read_bytes() == before
    assert not (tree / CAUSALITY).is_symlink() and b"is_causal" in (tree / CAUSALITY).read_bytes()
    succeed(tree, "--revert")
    assert outside.read_bytes() == before and contents(tree) == contents(template)


@pytest.mark.parametrize("part", ["vllm", "vllm/model_executor", "vllm/model_executor/models"])
def test_a_folder_is_a_symlink_out_of_the_tree(tree, tmp_path, part):
    outside = tmp_path / "outside"
    shutil.move(tree / part, outside)
    (tree / part).symlink_to(outside)
    with unchanged(outside), unchanged(tree):
        result = call(tree)
    assert result.code == 3 and "is a symlink to" in result.err


def test_a_folder_where_our_record_goes(tree):
    (tree / RECORD).mkdir(parents=True)
    result = call(tree)
    assert result.code == 3 and "record.json" in result.err
    shutil.rmtree(tree / HOME)
    (tree / HOME).write_text("")
    with unchanged(tree):
        result = call(tree)
    assert result.code == 3 and HOME in result.err


# Permissions, owners, attributes


@pytest.fixture
def read_only():
    """Makes a copy of a tree that may not be written to, in a folder that everybody may enter, unlike pytest's."""
    folders = []

    def make(site):
        folder = Path(tempfile.mkdtemp())
        folder.chmod(0o755)
        copy = shutil.copytree(site, folder / "site-packages")
        folders.append(folder)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        return copy

    yield make
    for folder in folders:
        for path in folder.rglob("*"):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
        shutil.rmtree(folder)


def as_nobody(site):
    """Runs the tool without root's licence to ignore mode bits. It loads itself before, where nobody may not look."""
    code = (
        "import sys, os, apply_all\n"
        "own = apply_all.own_patches()\n"
        "apply_all.own_patches = lambda: own\n"
        "apply_all.parse([])\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(apply_all.main(sys.argv[1:]))"
    )
    return subprocess.run([PYTHON, "-c", code, "--root", site], cwd=REPO, capture_output=True, text=True)


@pytest.mark.parametrize("patched, code", [(True, 0), (False, 3)])
def test_read_only(template, patched_template, read_only, patched, code):
    site = read_only(patched_template if patched else template)
    with unchanged(site):
        done = as_nobody(site)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if not patched:
        assert "not writable" in done.stderr


def test_new_files_can_be_read_by_those_who_read_vllm(tree):
    previous = os.umask(0o077)
    try:
        succeed(tree)
    finally:
        os.umask(previous)
    like = (tree / "vllm/__init__.py").stat()
    for path in (*OURS.files, RECORD):
        assert (tree / path).stat().st_mode == like.st_mode, path
        assert (tree / path).parent.stat().st_mode == (tree / "vllm").stat().st_mode, path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to someone else")
def test_others_owner_is_kept(tree):
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, 12345, 12345)
    succeed(tree)
    assert {path.stat().st_uid for path in tree.rglob("*")} == {12345}
    succeed(tree, "--revert")
    assert {path.stat().st_gid for path in tree.rglob("*")} == {12345}


# As setfacl -m u:57:r writes it: owner rw, user 57 r, group r, mask r, others r.
ACL = bytes.fromhex("02000000 01000600ffffffff 0200040039000000 04000400ffffffff 10000400ffffffff 20000400ffffffff")


@pytest.mark.parametrize("name, value", [("user.origin", b"a package"), ("system.posix_acl_access", ACL)])
def test_extended_attributes_and_access_lists_are_kept(tree, name, value):
    (wheel,) = tree.glob("vllm*.dist-info/RECORD")
    changed = [*(tree / path for path in targets()), wheel]
    try:
        for place in changed:
            os.setxattr(place, name, value)
    except OSError as error:
        pytest.skip(f"{tree} keeps no {name}: {error.strerror}")
    for arguments in ((), ("--revert",)):
        succeed(tree, *arguments)
        for place in changed:
            assert os.getxattr(place, name) == value, (arguments, place)


# Locale and line ends

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize("arguments, code", [((), 0), (("--check", "--json"), 1)])
def test_ascii_locale(tree, arguments, code):
    done = subprocess.run([*COMMAND, "--root", tree, *arguments], env=os.environ | ASCII, capture_output=True)
    assert done.returncode == code, done.stderr


def test_text_that_the_locale_cannot_print(tree):
    edit_file(tree, CAUSALITY, '.get("causal")', '.get("caus\u00e4l")')
    done = subprocess.run([*COMMAND, "--root", tree], env=os.environ | ASCII, capture_output=True)
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert b'.get("caus\\xe4l")' in done.stderr


def test_installed_files_have_crlf(tree, patched_template):
    for path in targets():
        crlf(tree / path)
    before = contents(tree)
    succeed(tree)
    for path in targets():
        data = (tree / path).read_bytes()
        assert data.replace(b"\r\n", b"\n") == (patched_template / path).read_bytes()
        assert data.count(b"\n") == data.count(b"\r\n")
    assert call(tree, "--check").code == 0
    succeed(tree, "--revert")
    assert contents(tree) == before


def test_our_own_checkout_has_crlf(tool, tree, patched_template):
    for path in tool.rglob("*.py"):
        crlf(path)
    done = subprocess.run([PYTHON, tool / "apply_all.py", "--root", tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(tree) == contents(patched_template)


# Bytecode


@pytest.mark.parametrize("mode", ["timestamp", "unchecked-hash"])
def test_stale_bytecode_is_gone(tree, mode):
    """Also if the compiled copy claims to be good whatever the source says."""
    command = [PYTHON, "-m", "compileall", "-q", "-f", "--invalidation-mode", mode, tree / "vllm"]
    for arguments in ((), ("--revert",)):
        subprocess.run(command, check=True)
        compiled = list((tree / CAUSALITY).parent.glob("__pycache__/qwen3_dflash.*.pyc"))
        assert compiled
        succeed(tree, *arguments)
        assert not any(path.exists() for path in compiled)


def test_bytecode_that_is_kept_elsewhere(small, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    compiled = Path(importlib.util.cache_from_source(str(small / "vllm/a.py")))
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"stale")
    succeed(small, patch_set=small_patch_set())
    assert not compiled.exists()


def test_bytecode_that_cannot_be_removed_stops_before_the_change(small, monkeypatch):
    """Another user's .pyc in a sticky folder: the change would not take effect, and nothing may stay half written."""
    cache = small / "vllm/deep/__pycache__"
    cache.mkdir()
    (cache / "b.cpython-311.pyc").write_bytes(b"")
    before = contents(small)
    real = os.unlink

    def unlink(path, **options):
        if str(path).endswith(".pyc"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    result = call(small, patch_set=small_patch_set())
    assert result.code == 3 and ".pyc: Operation not permitted. Everything was put back" in result.err
    assert contents(small) == before


def test_python_runs_the_new_code(small):
    """Same length, same time, warm bytecode."""
    place = small / "vllm/deep/b.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    code = "import sys; sys.path.insert(0, sys.argv[1]); from vllm.deep.b import LIMIT; print(LIMIT)"

    def running():
        os.utime(place, (1, 1))
        return subprocess.check_output([PYTHON, "-c", code, small], env=environment, text=True).strip()

    assert running() == "1" and list(small.glob("vllm/deep/__pycache__/b.*.pyc"))
    succeed(small, patch_set=small_patch_set())
    assert running() == "2"
    succeed(small, "--revert", patch_set=small_patch_set())
    assert running() == "1"


# RECORD and pip


def record_line(path, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}"


def test_record_is_true(patched_tree, template):
    """Every file that we changed or added is in RECORD with its hash and size, our own record included."""
    lines = (info(patched_tree) / "RECORD").read_text().splitlines()
    original = contents(template)
    ours = {path for path, data in contents(patched_tree).items() if data is not None and data != original.get(path)}
    ours -= {f"{info(patched_tree).name}/RECORD"}
    assert {RECORD, MODULE, CAUSALITY} <= ours
    for path in ours:
        assert [line for line in lines if line.startswith(f"{path},")] == [
            record_line(path, (patched_tree / path).read_bytes())
        ]
    before = set((info(template) / "RECORD").read_text().splitlines())
    assert {line.split(",")[0] for line in before ^ set(lines)} == ours, "and no other line was touched"


SPELLINGS = {
    "./": lambda root, path: f"./{path}",
    "absolute": lambda root, path: f"{root}/{path}",
    "backslashes": lambda root, path: path.replace("/", "\\"),
    "quoted": lambda root, path: f'"{path}"',
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_record_however_it_spells_its_paths(small, spell, end):
    """The lines of the files that we change stay true, those of the files that we add are found by an uninstall."""
    wheel = info(small) / "RECORD"
    paths = [line.split(",")[0] for line in wheel.read_text().splitlines() if not line.startswith("vllm-")]
    lines = [record_line(path, (small / path).read_bytes()).split(",", 1) for path in paths]
    wheel.write_bytes("".join(f"{spell(small, path)},{rest}{end}" for path, rest in lines).encode())
    before = contents(small)
    succeed(small, patch_set=small_patch_set())
    listed = {}
    for line in wheel.read_text().splitlines():
        path, rest = line.rsplit(",", 2)[0], line.split(",", 1)[1]
        path = path.strip('"').replace("\\", "/").removeprefix("./").removeprefix(f"{small}/")
        assert path not in listed, "one line per file"
        listed[path] = rest
    for path in ("vllm/a.py", "vllm/deep/b.py", *small_patch_set().files, RECORD):
        assert f"{path},{listed[path]}" == record_line(path, (small / path).read_bytes())
    succeed(small, "--revert", patch_set=small_patch_set())
    assert contents(small) == before


def test_others_keep_what_they_put_beside_ours(patched_tree):
    folder = (patched_tree / "vllm/model_executor/layers/dflash2/__init__.py").parent
    (folder / "theirs.txt").write_text("theirs")
    succeed(patched_tree, "--revert")
    assert [path.name for path in folder.iterdir()] == ["theirs.txt"]


def test_others_keep_their_lines_in_record(patched_tree, template):
    wheel = info(patched_tree) / "RECORD"
    wheel.write_bytes(wheel.read_bytes() + b"theirs.py,,\n")
    succeed(patched_tree, "--revert")
    assert wheel.read_bytes() == (info(template) / "RECORD").read_bytes() + b"theirs.py,,\n"


def test_a_tree_without_a_list_of_files(tree):
    """Conda, editable and distribution packages may have none."""
    folder = info(tree).rename(tree / "vllm-0.27.1.dist-info")
    (folder / "RECORD").unlink()
    before = contents(tree)
    succeed(tree)
    assert not (folder / "RECORD").exists()
    succeed(tree, "--revert")
    assert contents(tree) == before


def wheel_of(template, folder):
    """A wheel of the template, as the index has one of the whole."""
    name = info(template).name
    there = {path.relative_to(template).as_posix() for path in template.rglob("*") if path.is_file()}
    wheel = folder / f"{name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        installers = {f"{name}/{part}" for part in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
        for path in sorted(there - installers):
            archive.write(template / path, path)
        lines = (template / name / "RECORD").read_text().splitlines()
        wheels = [line for line in lines if line.split(",")[0] in archive.namelist()]
        archive.writestr(f"{name}/RECORD", "\n".join([*wheels, f"{name}/RECORD,,"]) + "\n")
    return wheel


def test_pip_uninstall_and_install(tmp_path, template):
    """Nothing of ours is left behind, no bytecode either, and what comes anew is pristine."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python, (site,) = tmp_path / "venv/bin/python", (tmp_path / "venv").glob("lib/python*/site-packages")

    def pip(*arguments):
        command = [PYTHON, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def sources():
        return {path: data for path, data in contents(site).items() if not path.endswith(".pyc")}

    wheel, empty = wheel_of(template, tmp_path), contents(site)
    pip("install", "--no-index", "--no-deps", wheel)
    pristine = sources()
    succeed(site)
    subprocess.run([python, "-m", "compileall", "-q", site / "vllm"], check=True)
    pip("uninstall", "--yes", info(template).name.split("-")[0])
    assert contents(site) == empty
    pip("install", "--no-index", "--no-deps", wheel)
    assert sources() == pristine
