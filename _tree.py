"""The half of the patch tool that touches a disk: find vLLM, read it, write to it, put it back.

Every file is written beside its place and renamed over it, so that no other link to it changes. What
was there is remembered until the outcome has been checked; any failure before that puts it back.
"""

import ast
import base64
import contextlib
import csv
import fcntl
import hashlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from _patchdata import HOME
from _patchlib import (
    RECORD,
    PatchSet,
    Problem,
    Read,
    Record,
    Report,
    edited,
    kept,
    original,
    outcome_fault,
    read_record,
)
from _patchtext import sha256


@dataclass(frozen=True)
class Site:
    """A folder that holds vllm/, what version that is, and its wheel's RECORD (a path below root), if any."""

    root: Path
    version: str
    wheel: str | None


def locate(root: str | None = None) -> Site:
    """The vLLM in `root`, or the one that this Python would import, found without importing it."""
    if root == "":
        raise Problem("--root is empty: name the site-packages folder that holds vllm/, or leave --root out")
    folder = Path(root) if root else _importable()
    if not (folder / "vllm" / "__init__.py").is_file():
        raise Problem(f"no vLLM in {folder}: --root takes the site-packages folder that holds vllm/")
    folder = folder.resolve()
    try:
        version, wheel = _version_and_wheel(folder)
    except OSError as error:
        raise Problem(f"{error.filename} cannot be read: {error.strerror}") from None
    return Site(folder, version, wheel)


def _importable() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin or not spec.submodule_search_locations:
        raise Problem(f"{sys.executable} has no vLLM: run the Python of the venv that has it, or pass --root")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _version_and_wheel(root: Path) -> tuple[str, str | None]:
    folders = sorted(root.glob("*.dist-info"))
    named = [folder for folder in folders if folder.name.lower().startswith("vllm")]
    owners = [*filter(_owns_vllm, named)] or [*filter(_owns_vllm, folders)]
    versions = {_metadata_version(folder / "METADATA"): folder for folder in owners}
    versions.pop(None, None)
    own = _version_file(root / "vllm" / "_version.py")
    if len(versions) > 1:
        # A half-finished uninstall leaves the folder of another version behind; the package knows better.
        versions = {version: folder for version, folder in versions.items() if version == own}
    if len(versions) == 1:
        ((version, folder),) = versions.items()
        wheel = f"{folder.name}/RECORD"
        return version, wheel if (root / wheel).is_file() else None
    if len(owners) > 1:
        names = ", ".join(folder.name for folder in owners)
        raise Problem(f"{root} has several installations of vLLM ({names}): remove all but the one in use")
    version = own or _metadata_version(root / "vllm.egg-info" / "PKG-INFO")
    if not version:
        raise Problem(f"{root} does not say which version of vLLM it holds: no dist-info and no vllm/_version.py")
    return version, None


def _owns_vllm(folder: Path) -> bool:
    """Whether this distribution, whatever its name, brought vllm/; a plug-in's name may start like it."""
    if not (folder / "METADATA").is_file():
        return False
    if (folder / "RECORD").is_file():
        lines = (folder / "RECORD").read_bytes().splitlines()
        return any(_wheel_path(line) == "vllm/__init__.py" for line in lines if b"vllm/__init__.py" in line)
    return folder.name.split("-")[0].lower() == "vllm"


def _metadata_version(path: Path) -> str | None:
    if not path.is_file():
        return None
    for line in path.read_text("utf-8", "replace").splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return None


def _version_file(path: Path) -> str | None:
    try:
        body = ast.parse(path.read_bytes()).body
    except (FileNotFoundError, SyntaxError, ValueError):
        return None
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            if any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets):
                return str(node.value.value)
    return None


def reader(root: Path) -> Read:
    def read(path: str) -> bytes | None:
        try:
            return (root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Problem(f"{root / path} cannot be read: {error.strerror}") from None

    return read


@contextlib.contextmanager
def locked(root: Path, exclusive: bool) -> Iterator[None]:
    """One writer at a time. The lock is on the folder itself, so that there is no file to leave behind."""
    folder = os.open(root / "vllm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems have no such lock; the check of the outcome still holds there.
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


# Writing.


@dataclass
class Journal:
    """Writes below one folder that can all be taken back."""

    root: Path
    undo: list = field(default_factory=list)

    def write(self, path: str, data: bytes) -> None:
        """Replace or create a file. Mode bits and, where allowed, the owner stay as they were."""
        place = self.root / path
        self._make_folders(place.parent)
        before = _state(place)
        like = place if place.exists() else self.root / "vllm" / "__init__.py"
        # First, so that bytecode which cannot be removed leaves its source as it was; again for what came since.
        drop_bytecode(place)
        self.undo.append(lambda: _restore(place, before))
        _replace(place, data, like)
        drop_bytecode(place)

    def remove(self, path: str) -> None:
        place = self.root / path
        before = _state(place)
        if before is None:
            return
        drop_bytecode(place)
        self.undo.append(lambda: _restore(place, before))
        place.unlink()
        drop_bytecode(place)

    def remove_folder(self, path: str) -> None:
        """Remove a folder of ours, unless someone put something into it."""
        place = self.root / path
        if place.is_dir():
            self.undo.append(lambda: self._make_folders(place))
            _remove_folder(place)

    def _make_folders(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folders(folder.parent)
        folder.mkdir()
        self.undo.append(lambda: _remove_folder(folder))
        _take_after(folder, (self.root / "vllm").stat())

    def roll_back(self) -> None:
        """Take everything back, the last thing first.

        Stops at a failure: what is left is then what a killed process leaves, which the record can undo.
        """
        with _undisturbed():
            while self.undo:
                self.undo[-1]()
                self.undo.pop()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever stops us, twice perhaps, waits until everything is back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove_folder(place: Path) -> None:
    for folder in (place / "__pycache__", place):
        with contextlib.suppress(FileNotFoundError):
            if not any(folder.iterdir()):
                folder.rmdir()


@dataclass(frozen=True)
class _File:
    data: bytes
    link: str | None
    stat: os.stat_result


def _state(place: Path) -> _File | None:
    try:
        return _File(place.read_bytes(), os.readlink(place) if place.is_symlink() else None, place.stat())
    except FileNotFoundError:
        return None


def _restore(place: Path, before: _File | None) -> None:
    if before is None:
        place.unlink(missing_ok=True)
    elif before.link is not None:
        beside = _beside(place)
        beside.unlink(missing_ok=True)
        os.symlink(before.link, beside)
        os.replace(beside, place)
    elif not place.exists() or place.read_bytes() != before.data:
        _replace(place, before.data, before.stat)
    drop_bytecode(place)


def _replace(place: Path, data: bytes, like: Path | os.stat_result) -> None:
    # Renaming breaks hard links and replaces a symlink by a private file: nothing outside the tree changes.
    like = like.stat() if isinstance(like, Path) else like
    beside = _beside(place)
    beside.unlink(missing_ok=True)
    try:
        with open(beside, "xb") as file:
            file.write(data)
        _take_after(beside, like)
        os.replace(beside, place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError):
            # Write errors name no file, and nobody knows the temporary one.
            raise OSError(error.errno, error.strerror, str(place)) from None
        raise


def _beside(place: Path) -> Path:
    """Where a file is written before it is renamed. Always the same, so that what a killed process left is found."""
    return place.with_name(f".{place.name}.dflash2")


def _take_after(place: str | Path, like: os.stat_result) -> None:
    here = os.stat(place)
    if (here.st_uid, here.st_gid) != (like.st_uid, like.st_gid):
        # Not the owner, or an owner that this user namespace does not know.
        with contextlib.suppress(OSError):
            os.chown(place, like.st_uid, like.st_gid)
    os.chmod(place, like.st_mode & 0o7777)


def drop_bytecode(place: Path) -> None:
    """Remove compiled copies of a source file; one that is not checked against its source would still run."""
    if place.suffix != ".py":
        return
    folders = {place.parent / "__pycache__", Path(importlib.util.cache_from_source(str(place))).parent}
    for folder in folders:
        for compiled in folder.glob(f"{place.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def check_writable(root: Path, paths: Iterable[str]) -> None:
    """Problem, before the first write, where a path leads out of the tree or may not be replaced."""
    for path in paths:
        folder = root
        for part in path.split("/")[:-1]:
            if (folder / part).is_symlink():
                target = (folder / part).resolve()
                raise Problem(f"{folder / part} is a symlink to {target}, which is not followed: pass --root")
            if not (folder / part).exists():
                break
            folder = folder / part
        for needed in (folder, folder / "__pycache__"):
            if needed.exists() and not (needed.is_dir() and os.access(needed, os.W_OK | os.X_OK)):
                raise Problem(f"{needed} is not writable: run as its owner. Nothing is written")
        if (root / path).is_dir():
            raise Problem(f"{root / path} is a folder, not a file. Nothing is written")


# RECORD, the wheel's list of its files.


def _wheel_path(line: bytes) -> str:
    try:
        return next(csv.reader([line.decode("utf-8", "surrogateescape")]), [""])[0]
    except csv.Error:
        return ""


def _wheel_line(path: str, data: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    quoted = '"' + path.replace('"', '""') + '"' if set(path) & set('",\r\n') else path
    return f"{quoted},sha256={digest},{len(data)}".encode("utf-8", "surrogateescape")


def wheel_with(wheel: bytes, files: Mapping[str, bytes]) -> bytes:
    """A RECORD with these files' hashes and sizes; all other lines keep their bytes."""
    left = dict(files)
    lines = wheel.splitlines(keepends=True)
    end = _line_end(lines[0]) if lines else b"\n"
    if lines and not _line_end(lines[-1]):
        lines[-1] += end
    for number, line in enumerate(lines):
        path = _wheel_path(line)
        if path in left:
            lines[number] = _wheel_line(path, left.pop(path)) + _line_end(line)
    return b"".join(lines) + b"".join(_wheel_line(path, data) + end for path, data in sorted(left.items()))


def wheel_without(wheel: bytes, before: bytes, paths: Iterable[str]) -> bytes:
    """A RECORD in which the lines of these paths are as they were before, and all others as they are now."""
    lines = {_wheel_path(line): line for line in before.splitlines(keepends=True)}
    ours = set(paths)
    restored = b""
    for line in wheel.splitlines(keepends=True):
        path = _wheel_path(line)
        restored += line if path not in ours else lines.get(path, b"")
    # The last line may have had no end before we added others.
    return before if restored.rstrip() == before.rstrip() else restored


def _line_end(line: bytes) -> bytes:
    return line[len(line.rstrip(b"\r\n")) :]


# What a user asks for.


def apply(site: Site, report: Report, patch_set: PatchSet) -> Report:
    """Write what a report plans, check what is then on the disk, and return the report on that.

    Problem, with everything put back, if a write fails (exit 3) or the outcome is not as promised (exit 2).
    """
    read = reader(site.root)
    older = read_record(read)
    with _all_or_nothing(site.root) as journal:
        touched = [*report.changes, RECORD, *map(kept, report.changes), *([site.wheel] if site.wheel else [])]
        check_writable(site.root, [*touched, *(_touched(older) if older else ())])
        if older:
            _put_back(journal, read, older)
        _clear_home(journal)
        _write_all(journal, site, report, patch_set)
        after, fault = outcome_fault(reader(site.root), report, patch_set)
        if fault:
            raise Problem(fault, "DRIFT")
    return after


def _write_all(journal: Journal, site: Site, report: Report, patch_set: PatchSet) -> None:
    read = reader(site.root)
    before = {path: read(path) for path in report.changes}
    ours = {kept(path): data for path, data in before.items() if data is not None}
    if site.wheel:
        ours[kept(site.wheel)] = read(site.wheel)
    hashes = {path: (sha256(data), sha256(report.changes[path])) for path, data in before.items()}
    record = Record(
        digest=patch_set.digest,
        version=site.version,
        patches=report.applies,
        files=hashes,
        folders=_new_folders(site.root, [*before, *ours]),
        wheel=site.wheel,
    )
    # Originals and record first: whatever happens to this process, --revert can then put the tree back.
    ours[RECORD] = record.dump()
    for path, data in ours.items():
        journal.write(path, data)
    # A list with files that never came is harmless to pip; a file that is not listed outlives an uninstall.
    if site.wheel:
        journal.write(site.wheel, wheel_with(read(site.wheel), {**ours, **report.changes}))
    for path, data in report.changes.items():
        journal.write(path, data)


def _new_folders(root: Path, paths: Iterable[str]) -> tuple[str, ...]:
    """Folders that we make, and ours that a killed process may have left: the outer ones first."""
    parents = {parent.as_posix() for path in paths for parent in Path(path).parents if parent.parts}
    return tuple(sorted(p for p in parents if (p + "/").startswith(HOME + "/") or not (root / p).exists()))


def revert(site: Site, force: bool) -> int:
    """Put the originals back and forget the record; returns how many files that concerned.

    Problem, with nothing changed, if others edited what we wrote (unless `force`) or an original is lost.
    """
    read = reader(site.root)
    record = read_record(read)
    if record is None:
        with _all_or_nothing(site.root) as journal:
            _clear_home(journal)
        return 0
    lost = edited(read, record)
    if lost and not force:
        names = ", ".join(lost)
        raise Problem(f"edited by someone else: {names}. --revert --force discards that. Nothing is written", "PARTIAL")
    with _all_or_nothing(site.root) as journal:
        check_writable(site.root, _touched(record))
        _put_back(journal, read, record)
        now = reader(site.root)
        wrong = [path for path, (before, _) in record.files.items() if sha256(now(path)) != before]
        if wrong:
            raise Problem(f"not restored: {', '.join(wrong)}", "PARTIAL")
    return len(record.files)


def _ours(record: Record) -> list[str]:
    changed = [path for path, (before, _) in record.files.items() if before is not None]
    return [RECORD, *map(kept, changed), *([kept(record.wheel)] if record.wheel else [])]


def _touched(record: Record) -> list[str]:
    return [*record.files, *_ours(record), *([record.wheel] if record.wheel else [])]


def _put_back(journal: Journal, read: Read, record: Record) -> None:
    originals = {path: original(read, record, path) for path in record.files}
    wheel = read(record.wheel) if record.wheel else None
    before = read(kept(record.wheel)) if record.wheel else None
    for path, data in originals.items():
        if data is None:
            journal.remove(path)
        elif read(path) != data:
            journal.write(path, data)
    if wheel is not None and before is not None:
        journal.write(record.wheel, wheel_without(wheel, before, [*record.files, *_ours(record)]))
    for path in _touched(record):
        _beside(journal.root / path).unlink(missing_ok=True)
    for folder in reversed(record.folders):
        journal.remove_folder(folder)
    # The record goes before the originals: without it they are litter, without them it is a broken promise.
    for path in _ours(record):
        journal.remove(path)
    _clear_home(journal)


def _clear_home(journal: Journal) -> None:
    """Remove what a killed process has left in our own folder once the record is gone, or before there is one.

    Not if one of the originals differs from its file: it may be the only copy, so nothing there is litter.
    """
    home, read = journal.root / HOME, reader(journal.root)
    if home.is_symlink():
        return
    own = [place for place in sorted(home.rglob("*"), reverse=True) if not place.is_symlink()]
    inside = [place.relative_to(journal.root).as_posix() for place in own]
    left = [path for path in inside if path.endswith((".orig", ".dflash2")) and (journal.root / path).is_file()]
    if any(_is_needed(read, path) for path in left):
        return
    check_writable(journal.root, left)
    for path in left:
        journal.remove(path)
    for path in (*inside, HOME):
        journal.remove_folder(path)


def _is_needed(read: Read, path: str) -> bool:
    target = path.removeprefix(kept("").removesuffix(".orig")).removesuffix(".orig")
    return path == kept(target) and not target.endswith(".dist-info/RECORD") and read(target) != read(path)


@contextlib.contextmanager
def _all_or_nothing(root: Path) -> Iterator[Journal]:
    journal = Journal(root)
    try:
        yield journal
    except BaseException as error:
        try:
            journal.roll_back()
        except OSError as second:
            raise Problem(f"{error}. Putting everything back failed too ({second}): run --revert") from error
        if isinstance(error, OSError):
            raise Problem(f"{error.filename}: {error.strerror}. Everything was put back") from error
        if isinstance(error, Problem) and error.verdict:
            raise Problem(f"{error}. Everything was put back", error.verdict) from error
        raise
