"""Steps in between two accesses of this process to a folder: fail one, end the process, do what another might do.

Python announces to audit hooks every file that is opened and every change of the disk, whichever function makes it,
so that what is tested may be written in any way.
"""

import contextlib
import os
import sys

CHANGES = {
    "os.chmod",
    "os.chown",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.removexattr",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.symlink",
    "os.truncate",
    "os.utime",
}
READ = "read"
_watching = []


def _hook(event, arguments):
    if _watching and (event in CHANGES or event == "open"):
        opens = event == "open"
        paths = [path for path in map(_path, arguments[: 1 if opens else 2]) if path]
        _watching[-1](READ if opens and not _writes(*arguments[1:]) else event, paths[-1] if paths else "")


def _writes(mode, flags):
    return bool(set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _path(argument):
    if isinstance(argument, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{argument}")
    return os.fsdecode(argument) if isinstance(argument, str | bytes | os.PathLike) else ""


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched(root, act):
    """Calls act(step, event, path) before each access to what lies below `root`; what it raises, the access raises.

    step   how many changes came before
    event  READ, or the audit event of a change: "open" for writing, "os.rename", …
    """
    step = 0

    def below(event, path):
        nonlocal step
        if path.startswith(f"{root}/"):
            _watching.remove(below)  # what `act` itself does goes unwatched
            try:
                act(step, event, path)
            finally:
                _watching.append(below)
                step += event != READ

    _watching.append(below)
    try:
        yield
    finally:
        _watching.remove(below)


def changes(root, run, *arguments, **options):
    """[(event, path below root)] of every change that run(*arguments, **options) makes."""
    seen = []

    def note(step, event, path):
        if event != READ:
            seen.append((event, os.path.relpath(path, root)))

    with watched(root, note):
        run(*arguments, **options)
    return seen


@contextlib.contextmanager
def meanwhile(root, at, do, *arguments):
    """Calls do(*arguments) once: after `at` changes, before the next access."""
    done = False

    def act(step, event, path):
        nonlocal done
        if step == at and not done:
            done = True
            do(*arguments)

    with watched(root, act):
        yield


@contextlib.contextmanager
def failing(root, at, error, lasting=False):
    """Change number `at` raises `error`; with `lasting`, so does every later one."""

    def act(step, event, path):
        if event != READ and (step == at or (lasting and step > at)):
            raise error

    with watched(root, act):
        yield


def killed(root, at, run, *arguments, **options):
    """Runs it in a process of its own that ends outright before change number `at`."""
    child = os.fork()
    if child == 0:
        try:
            with watched(root, lambda step, event, path: os._exit(9) if step == at and event != READ else None):
                run(*arguments, **options)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, f"there is no change {at}"
