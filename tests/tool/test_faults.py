"""All or nothing: whatever fails or happens at any moment, each byte is as it was, or the next run sees to it."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.tool.disk import changes, failing, killed, meanwhile
from tests.tool.patching import (
    CAUSALITY,
    HOME,
    OURS,
    PYTHON,
    RECORD,
    REPO,
    call,
    contents,
    edit_file,
    format_1,
    info,
    make_small_tree,
    small_patch_set,
    succeed,
    targets,
)

NOW, BEFORE = small_patch_set(), small_patch_set(version=0)
FULL = OSError(errno.ENOSPC, "No space left on device", "file.py")


class Case:
    """Something that the command does to a small tree, again and again from the same start."""

    def __init__(self, folder, prepare, *arguments):
        self.arguments, self.copies = arguments, 0
        self.pristine = make_small_tree(folder / "pristine")
        self.start = make_small_tree(folder / "start")
        prepare(self.start)
        self.root = folder / "tree"
        self.before = contents(self.start)
        self.fresh()
        self.changes = changes(self.root, self.run)
        self.after = contents(self.root)

    def fresh(self):
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.start, self.root)

    def run(self, *arguments):
        return call(self.root, *(arguments or self.arguments), patch_set=NOW)

    def steps(self, *events):
        return [step for step, (event, _) in enumerate(self.changes) if event in events or not events]


def edited(tree):
    succeed(tree, patch_set=NOW)
    edit_file(tree, "vllm/a.py", "added_by_us", "edited")


ACTIONS = {
    "apply": (lambda tree: None,),
    "upgrade": (lambda tree: succeed(tree, patch_set=BEFORE),),
    "upgrade of format 1": (lambda tree: format_1(tree, BEFORE),),
    "revert": (lambda tree: succeed(tree, patch_set=NOW), "--revert"),
    "revert of format 1": (lambda tree: format_1(tree, BEFORE), "--revert"),
    "forced revert": (edited, "--revert", "--force"),
}


@pytest.fixture(params=ACTIONS)
def case(request, tmp_path):
    return Case(tmp_path, *ACTIONS[request.param])


def test_the_cases_do_what_they_say(case):
    assert case.before != case.after
    if "--revert" in case.arguments:
        assert case.after == contents(case.pristine)
    else:
        assert call(case.root, "--check", patch_set=NOW).code == 0
    assert len(case.steps("os.rename")) > 2


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["disk full", "interrupt"])
def test_a_failure_at_any_change_is_rolled_back(case, error):
    code = 3 if error is FULL else 130
    failed = 0
    for step in case.steps():
        case.fresh()
        with failing(case.root, step, error):
            result = case.run()
        if result.code == 0:  # an owner that cannot be kept is no failure
            assert contents(case.root) == case.after, case.changes[step]
            assert case.changes[step][0] in ("os.chown", "os.setxattr", "os.remove"), case.changes[step]
            continue
        failed += 1
        assert result.code == code, (case.changes[step], result.err)
        if error is FULL:
            assert "No space left on device" in result.err and "put back" in result.err
        assert contents(case.root) == case.before, case.changes[step]
    assert failed > len(case.steps("os.rename", "open"))


def test_if_nothing_can_be_put_back_it_says_what_to_do(case):
    for step in case.steps("os.rename"):
        case.fresh()
        with failing(case.root, step, FULL, lasting=True):
            result = case.run()
        assert result.code == 3
        if contents(case.root) != case.before:
            assert "--revert" in result.err
        succeed(case.root, "--revert", "--force", patch_set=NOW)
        assert contents(case.root) == contents(case.pristine), case.changes[step]


KILLED_BEFORE = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def test_killed_at_any_change_the_way_back_is_open(case):
    for step in case.steps(*KILLED_BEFORE):
        case.fresh()
        killed(case.root, step, case.run)
        assert case.run("--check").code in (0, 1, 2)
        result = case.run("--revert", *(["--force"] if "--force" in case.arguments else []))
        assert result.code == 0, (case.changes[step], result.err)
        assert contents(case.root) == contents(case.pristine), case.changes[step]


def test_killed_at_any_change_the_next_run_completes_or_says_how(case):
    patched = Case(case.pristine.parent / "patched", *ACTIONS["apply"]).after
    for step in case.steps(*KILLED_BEFORE):
        case.fresh()
        killed(case.root, step, case.run)
        result = case.run("--json", *case.arguments)
        if result.code:
            assert result.code == 2 and "--revert" in result.json()["message"], (case.changes[step], result.out)
            succeed(case.root, "--revert", *(["--force"] if "--force" in case.arguments else []), patch_set=NOW)
            assert contents(case.root) == contents(case.pristine), case.changes[step]
        elif not case.arguments:
            assert contents(case.root) == patched, case.changes[step]
        else:
            assert contents(case.root) == contents(case.pristine), case.changes[step]


def test_record_lists_our_files_before_they_come(case):
    """Killed at any moment, what is there of ours is listed, so that pip uninstall takes it along."""
    for step in case.steps("os.rename", "os.remove"):
        case.fresh()
        killed(case.root, step, case.run)
        listed = {line.split(",")[0] for line in (info(case.root) / "RECORD").read_text().splitlines()}
        there = {path for path in {**BEFORE.files, **NOW.files} if (case.root / path).exists()}
        assert there <= listed, case.changes[step]


# A file that goes, or turns into something else, at any moment


def missing(place):
    with contextlib.suppress(FileNotFoundError):
        place.unlink()


def unreadable(place):
    """To root, too: a link to itself."""
    missing(place)
    with contextlib.suppress(FileNotFoundError):
        place.symlink_to(place.name)


def not_utf8(place):
    missing(place)
    with contextlib.suppress(FileNotFoundError):
        place.write_bytes(b"\xff\xfe")


def a_folder(place):
    missing(place)
    with contextlib.suppress(FileNotFoundError):
        place.mkdir()


FAULTS = (missing, unreadable, not_utf8, a_folder)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@each_fault
def test_a_file_turns_into_something_else_at_any_moment(case, fault):
    """Each file of ours and of vLLM's, before the first reading, between writes, and before the outcome is checked."""
    paths = sorted({path for path, data in {**case.before, **case.after}.items() if data is not None})
    renames = case.steps("os.rename")
    checked = len(case.changes)
    if "--revert" in case.arguments:  # RECORD comes last, then litter goes
        checked = 1 + case.changes.index(("os.rename", "vllm-0.27.1.dist-info/RECORD"))
    refused = 0
    for step in (0, renames[0], renames[len(renames) // 2], checked):
        # Without a record nobody knows what another version wrote.
        for path in (path for path in paths if step or path != RECORD):
            case.fresh()
            with meanwhile(case.root, step, fault, case.root / path):
                result = case.run()
            found, where = contents(case.root), (step, path, result.err)
            around = {path, RECORD, *(parent.as_posix() for parent in Path(path).parents)}
            if result.code == 0:
                # What it claims is so: the file did not matter, or it is there again.
                files = [name for name in case.after if name.startswith("vllm/") and name not in around]
                assert {name: found.get(name, "-") for name in files} == {name: case.after[name] for name in files}, (
                    where
                )
                if found.get(path, "-") != case.after.get(path, "-") and not (
                    step == 0 and "--force" in case.arguments
                ):
                    assert path not in ("vllm/a.py", "vllm/deep/b.py", *NOW.files, RECORD), where
                continue
            refused += 1
            assert result.code in (2, 3), where
            assert step == 0 or path in result.out + result.err or f"{HOME}:" in result.err, where
            wanted = case.after if "Reverted" in result.err else case.before
            for name in found.keys() | wanted.keys() - around:
                assert name in around or found.get(name, "-") == wanted.get(name, "-"), where
    assert refused


REAL = [*targets(), *OURS.files, RECORD, "vllm/logger.py"]


@pytest.mark.parametrize("path", REAL)
def test_a_file_of_the_real_tree_turns_into_something_else_before_the_check(tree, template, real_changes, path):
    fault = FAULTS[REAL.index(path) % len(FAULTS)]
    with meanwhile(tree, real_changes, fault, tree / path):
        result = call(tree)
    assert result.code == (2 if fault in (missing, not_utf8) else 3), result.err
    assert (path in result.err or "vllm.logger" in result.err) and "ut back" in result.err
    found, wanted = contents(tree), contents(template)
    for either in (found, wanted):
        either.pop(path, None)
    assert found == wanted


@pytest.fixture(scope="session")
def real_changes(template, tmp_path_factory):
    """How many changes an application to the template makes."""
    site = shutil.copytree(template, tmp_path_factory.mktemp("rehearsal") / "site-packages")
    return len(changes(site, succeed, site))


def test_a_file_changes_between_reading_and_writing(small):
    """What another process has written since is not overwritten."""
    others = (small / "vllm/a.py").read_bytes() + b"# theirs\n"
    with meanwhile(small, 1, (small / "vllm/a.py").write_bytes, others):
        result = call(small, patch_set=NOW)
    assert result.code == 3 and "vllm/a.py" in result.err and "changed while this tool was running" in result.err
    assert (small / "vllm/a.py").read_bytes() == others
    assert not (small / HOME).exists()


def test_a_module_that_we_import_goes_away_before_the_check(small):
    steps = len(
        changes(shutil.copytree(small, small.parent / "rehearsal"), succeed, small.parent / "rehearsal", patch_set=NOW)
    )
    before = contents(small)
    with meanwhile(small, steps, (small / "vllm/deep/b.py").rename, small.parent / "b.py"):
        result = call(small, patch_set=NOW)
    assert result.code == 2 and "vllm/deep/b.py" in result.err
    assert {path: data for path, data in contents(small).items() if path != "vllm/deep/b.py"} == {
        path: data for path, data in before.items() if path != "vllm/deep/b.py"
    }


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
        result = call(tree)
    assert not lies, "it renames by os.replace"
    assert result.code == 2 and "gumbel.py" in result.err and "put back" in result.err
    assert contents(tree) == before


def test_a_link_is_a_link_again_after_a_failure(tree, tmp_path, real_changes):
    outside = tmp_path / "outside.py"
    shutil.move(tree / CAUSALITY, outside)
    (tree / CAUSALITY).symlink_to(outside)
    before = contents(tree)
    with failing(tree, real_changes - 1, FULL):
        assert call(tree).code == 3
    assert (tree / CAUSALITY).readlink() == outside and contents(tree) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_from_outside_it_rolls_back(tree, number):
    """Once while writing, and again while everything is put back."""
    before = contents(tree)
    code = (
        "import os, runpy, signal, sys\n"
        "from tests.tool.disk import watched\n"
        "root, number, renames, told = sys.argv[2], int(sys.argv.pop()), [], []\n"
        # Whatever the tests run under: nohup would have it ignored.
        "signal.signal(number, signal.SIG_DFL)\n"
        "def act(step, event, path):\n"
        "    renames.append(step) if event == 'os.rename' else None\n"
        "    if len(renames) in (20, 30) and len(renames) not in told:\n"
        "        told.append(len(renames))\n"
        "        os.kill(os.getpid(), number)\n"
        "sys.argv[0] = 'apply_all.py'\n"
        "try:\n"
        "    with watched(root, act): runpy.run_path('apply_all.py', run_name='__main__')\n"
        "finally: print(len(told))\n"
    )
    command = [PYTHON, "-c", code, "--root", tree, str(int(number))]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.endswith("2\n"), "it was told twice"
    assert contents(tree) == before
