"""The disk: find vLLM, write to it and take it back, keep our record and the wheel's RECORD.

Every file is written beside its place and renamed over it, so that no other link to it changes. What was there is
remembered until the outcome has been checked; any failure before that puts it back.
"""

import ast
import base64
import contextlib
import csv
import difflib
import fcntl
import hashlib
import importlib.util
import json
import os
import posixpath
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import _patchlib
from _patchlib import (
    EDITED,
    STATE_DIR,
    STATE_FILE,
    Change,
    FileRecord,
    PatchSet,
    PatchStatus,
    Problem,
    Record,
    Report,
    State,
    Written,
    cached,
    find_free,
    is_newer,
    overlay,
    path_fault,
    traces,
    verify,
    worst,
)
from _source import Read, decode, find_in_scope, find_lines, near_miss, replace_lines, sha256, syntax_error


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
    own = _version_file(root / "vllm" / "_version.py")
    versions = {version: folder for folder in owners if (version := _metadata_version(folder / "METADATA") or own)}
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
    version = own or _metadata_version(root / "vllm.egg-info" / "PKG-INFO") or ""
    if not version:
        raise Problem(f"{root} does not say which version of vLLM it holds: no dist-info and no vllm/_version.py")
    return version, None


def _owns_vllm(folder: Path) -> bool:
    """Whether this distribution, whatever its name, brought vllm/; a plug-in's name may start like it."""
    if (folder / "RECORD").is_file():
        lines = (folder / "RECORD").read_bytes().splitlines()
        return any(
            listed_path(line, folder.parent)[1] == "vllm/__init__.py" for line in lines if b"__init__.py" in line
        )
    return folder.name.split("-")[0].lower() == "vllm" and (folder / "METADATA").is_file()


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
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets)
        ):
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


def list_installed(root: Path, installed: Mapping[str, str]) -> dict[str, str]:
    """Source -> destination of each file; entries that end with a slash stand for the modules of a folder."""
    found = {path: to for path, to in installed.items() if not path.endswith("/")}
    for folder, to in installed.items():
        if folder.endswith("/"):
            modules = sorted((root / folder).rglob("*.py"))
            if not modules:
                raise Problem(f"{folder}: INSTALLED names it, but this copy of the tool has no modules there")
            inside = [module.relative_to(root / folder).as_posix() for module in modules]
            found |= {folder + path: to + path for path in inside}
    return found


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


# Our record.


def read_record(read: Read, patch_set: PatchSet) -> Record | None:
    """The record in a tree, None if there is none; Problem if it is not one of ours."""
    data = read(STATE_FILE)
    if data is None:
        return None
    try:
        given = json.loads(data)
        if (number := given.pop("format")) not in (1, 2):
            raise ValueError("of another format")
        record = _first_format(given, read, patch_set) if number == 1 else _second_format(given)
        if fault := _record_fault(record):
            raise ValueError(fault)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"{STATE_FILE} is damaged ({error}): run apply_all.py --revert, which takes out what it recognises"
        raise Problem(f"{message}, then apply again", State.PARTIAL) from None
    return record


def _second_format(given: dict[str, Any]) -> Record:
    files = {}
    for path, entry in given.pop("files").items():
        hunks = tuple(Written(path, **hunk) for hunk in entry.pop("hunks"))
        files[path] = FileRecord(hunks=hunks, **entry)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Record(files=files, **fields)


def _first_format(given: dict[str, Any], read: Read, patch_set: PatchSet) -> Record:
    """As version 0.1.0 wrote it, which kept the originals beside its record."""
    files, added = {}, {}
    for path, (before, after) in given.pop("files").items():
        if before is None:
            added[path] = after
            continue
        kept = read(f"{STATE_DIR}/originals/{path}.orig")
        kept = kept if is_same(kept, before) else None
        lost = () if kept else [patch for patch in patch_set.patches if patch.name in given["patches"]]
        hunks = tuple(Written(**vars(hunk)) for patch in lost for hunk in patch.hunks if hunk.file == path)
        files[path] = FileRecord(before, after, hunks, kept)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    record = Record("0.1.0", files=files, added=added, **fields)
    wheel = read(f"{STATE_DIR}/originals/{record.wheel}.orig")
    return replace(record, wheel_lines=_wheel_lines(wheel, Path(), files)) if wheel else record


def recognised(read: Read, patch_set: PatchSet) -> Record:
    """What a tree without a usable record has of this version's text."""
    files = {}
    for path in {hunk.file for hunk in patch_set.hunks()}:
        text, beside = decode(read(path) or b"") or "", patch_set.hunks(path)
        hunks = [Written(**vars(hunk)) for hunk in beside if find_free(text, hunk, beside, strict=False)[1]]
        if hunks:
            files[path] = FileRecord(None, None, tuple(hunks))
    added = {path: sha256(data) or "" for path, data in patch_set.files.items() if is_same(read(path), sha256(data))}
    folders = sorted({parent.as_posix() for path in patch_set.files for parent in Path(path).parents if parent.parts})
    return Record("", "", "", (), files, added, tuple(folders))


def _record_fault(record: Record) -> str | None:
    """What cannot be ours in a record: revert writes and removes what it names."""
    hashes = [digest for entry in record.files.values() for digest in (entry.before, entry.after)]
    hunks = [text for entry in record.files.values() for hunk in entry.hunks for text in vars(hunk).values()]
    lines = [*record.wheel_lines, *record.wheel_lines.values()]
    texts = (
        record.tool,
        record.digest,
        record.version,
        *record.patches,
        *record.added.values(),
        *hashes,
        *hunks,
        *lines,
    )
    if not all(isinstance(text, str) for text in texts):
        return "a value is not text"
    if not all(hunk.old and hunk.new for entry in record.files.values() for hunk in entry.hunks):
        return "a hunk is empty"
    for path in (*record.files, *record.added, *(folder for folder in record.folders if not _is_state(folder))):
        if fault := path_fault(path):
            return fault
    if not record.files and not record.added:
        return "it names no file"
    wheel = record.wheel or "_.dist-info/RECORD"
    if not re.fullmatch(r"[^/\0]+\.dist-info/RECORD", wheel):
        return f"{wheel} is not the RECORD of a wheel"
    return None


def _is_state(folder: str) -> bool:
    return (folder + "/").startswith(STATE_DIR + "/") and ".." not in folder.split("/")


def dump(record: Record) -> bytes:
    given = asdict(record)
    for entry in given["files"].values():
        del entry["original"]
        for hunk in entry["hunks"]:
            del hunk["file"]
    return json.dumps({"format": 2, **given}, indent=1).encode()


# Taking a version of this tool out again.


@dataclass(frozen=True)
class Undo:
    """What takes a version of this tool out of a tree.

    exact    paths that then hold what they held before it
    others   paths that then hold others' edits as well
    missing  patched files that are not there, which nothing here can bring back
    faults   path -> why it must stay as it is
    """

    changes: tuple[Change, ...]
    exact: tuple[str, ...]
    others: tuple[str, ...]
    missing: tuple[str, ...]
    faults: dict[str, str]


def undo(read: Read, record: Record, force: bool = False) -> Undo:
    """Plan to take out what a record names. `force` also discards what others wrote into our lines and files."""
    changes: list[Change] = []
    exact: list[str] = []
    others: list[str] = []
    missing: list[str] = []
    faults: dict[str, str] = {}
    for path, entry in record.files.items():
        data = read(path)
        if data is None and force:
            missing.append(path)
            continue
        try:
            after = _before_us(data, entry, force)
        except Problem as problem:
            faults[path] = str(problem)
            continue
        (exact if entry.before is None or is_same(after, entry.before) else others).append(path)
        changes.append(Change(path, data, after))
    for path, digest in record.added.items():
        data = read(path)
        if data is None or force or is_same(data, digest):
            exact.append(path)
            changes.append(Change(path, data, None))
        else:
            faults[path] = EDITED
    changes = [change for change in changes if change.before != change.after]
    return Undo(tuple(changes), tuple(exact), tuple(others), tuple(missing), faults)


def is_same(data: bytes | None, digest: str | None) -> bool:
    """Whether bytes have a hash, as they are or as they were before something converted their line ends."""
    if data is None or digest is None:
        return False
    unix = data.replace(b"\r\n", b"\n")
    return digest in (sha256(data), sha256(unix), sha256(unix.replace(b"\n", b"\r\n")))


def _before_us(data: bytes | None, entry: FileRecord, force: bool = False) -> bytes:
    """The bytes of a patched file without our text; Problem if that cannot be told, or needs `force`."""
    if data is None:
        raise Problem("missing, removed by someone else", State.PARTIAL)
    if is_same(data, entry.before):
        return data
    if entry.original is None:
        before = take_back(data, entry.hunks, force)
        if entry.before and is_same(data, entry.after) and not is_same(before, entry.before):
            raise Problem("the record does not say what was there before: reinstall vLLM", State.PARTIAL)
        return before
    if not force and not is_same(data, entry.after):
        raise Problem(EDITED, State.PARTIAL)
    return entry.original


def take_back(data: bytes, hunks: tuple[Written, ...], force: bool = False) -> bytes:
    """A file without our hunks: each new text, found once in its scope, gives way to the old one.

    Problem if others edited our lines, or, with `force`, if it is not clear any more where our lines end.
    """
    text = decode(data)
    if text is None:
        raise Problem("not UTF-8", State.PARTIAL)
    found = {hunk: find_free(text, hunk, hunks, strict=False)[1] for hunk in hunks}
    whole = {
        hunk: at[0]
        for hunk, at in found.items()
        if len(at) == 1 and not _has_a_double(text, at[0], hunk) and _is_at_home(text, at[0], hunk)
    }
    data = replace_lines(data, [(at, hunk.new, hunk.old) for hunk, at in whole.items()])
    left = decode(data) or ""
    edited = [hunk for hunk, at in found.items() if hunk not in whole and (at or not _is_back(left, hunk))]
    if edited and not force:
        raise Problem(EDITED + near_miss(text, edited[0].scope, edited[0].new), State.PARTIAL)
    for hunk in edited:
        data = _discard_edit(data, hunk)
    return data


def _likeness(lines: list[str], text: str) -> float:
    return difflib.SequenceMatcher(None, lines, text.splitlines(keepends=True), autojunk=False).ratio()


def _has_a_double(text: str, at: int, hunk: Written) -> bool:
    """Whether the line above or below our text is another copy of our first or last line."""
    # A last line may have no end: then nothing is below it.
    lines, ours = [*text.split("\n"), ""], hunk.new.split("\n")
    above, below = lines[at - 1] if at else "", lines[at + len(ours) - 1]
    if ours[0].strip() and above == ours[0] and not hunk.above.endswith(above + "\n"):
        return True
    return bool(ours[-2].strip()) and below == ours[-2] and not hunk.below.startswith(below + "\n")


def _is_at_home(text: str, at: int, hunk: Written) -> bool:
    """Whether our text is in its scope, or, in a file that is not Python any more, below a line that begins it."""
    with contextlib.suppress(ValueError, KeyError):
        return at in find_in_scope(text, hunk.scope, hunk.new)
    if not hunk.scope or re.match(r"\s*(@|(async\s+)?def\b|class\b)", hunk.new):
        return True
    name = hunk.scope.rpartition(".")[2]
    headers = (re.match(r"(\s*)(?:async\s+)?(?:def|class)\s+(\w+)", line) for line in text.split("\n")[:at])
    heads = [found for found in headers if found]
    named = [number for number, head in enumerate(heads) if head[2] == name]
    return bool(named) and all(len(head[1]) > len(heads[named[-1]][1]) for head in heads[named[-1] + 1 :])


def _is_back(text: str, hunk: Written) -> bool:
    """Whether the old text stands between its old neighbours: most new texts hold the old one, even if edited."""
    if traces(text, hunk) or (not hunk.above + hunk.below and find_lines(hunk.new, hunk.old)):
        return False
    return len(find_lines(text, hunk.above + hunk.old + hunk.below)) == 1


def _discard_edit(data: bytes, hunk: Written) -> bytes:
    """Put the old text where ours stood, which others have edited since, by the lines that stood around it."""
    text = decode(data) or ""
    for size in (3, 2, 1):
        above = "".join(hunk.above.splitlines(keepends=True)[-size:])
        below = "".join(hunk.below.splitlines(keepends=True)[:size])
        if not re.search(r"\w", above) or not re.search(r"\w", below):
            continue
        starts = [at + above.count("\n") for at in find_lines(text, above)]
        ends = find_lines(text, below)
        room = 2 * hunk.new.count("\n") + 10
        spans = [(start, end) for start in starts for end in ends if start <= end <= start + room]
        if not find_lines(hunk.new, below):
            # What stood below ours is no part of ours: the first one ends it.
            spans = [(start, end) for start, end in spans if not any(start <= other < end for other in ends)]
        if not spans:
            continue
        lines = [line + "\n" for line in text.split("\n")]
        likeness = {span: _likeness(lines[slice(*span)], hunk.new) for span in spans}
        best = max(spans, key=likeness.__getitem__)
        if len(spans) == 1 or likeness[best] > 0.6:
            result = replace_lines(data, [(best[0], "".join(lines[slice(*best)]), hunk.old)])
            if syntax_error(text) or not syntax_error(decode(result) or ""):
                return result
    raise Problem(f"{EDITED}, and it is not clear where our lines end: reinstall vLLM", State.PARTIAL)


# The verdict on a tree with a record.


def survey(read: Read, version: str, patch_set: PatchSet) -> Report:
    """Judge a tree, with what its record says, and plan what applying would write; nothing is written."""
    read = cached(read)
    record = read_record(read, patch_set)
    if record is None or record.digest == patch_set.digest:
        before = _without_ours(read, record) if record else read
        return _patchlib.survey(read, version, patch_set, record, before)
    return _survey_other(read, version, patch_set, record)


def _without_ours(read: Read, record: Record) -> Read:
    def reading(path: str) -> bytes | None:
        data = read(path)
        if path in record.added:
            return None
        with contextlib.suppress(Problem):
            return _before_us(data, record.files[path]) if path in record.files else data
        return data

    return cached(reading)


def _survey_other(read: Read, version: str, patch_set: PatchSet, record: Record) -> Report:
    """A tree that another version of this tool has patched: what if that were taken out and this one applied?"""
    taken = undo(read, record)
    base = overlay(read, taken.changes)
    report = _patchlib.survey(base, record.version, patch_set)
    after = overlay(base, report.changes)
    rows = tuple(_other_row(row, read, after, taken.faults, record) for row in report.patches)
    touched = {*record.files, *record.added, *(change.path for change in report.changes)}
    fine = {path for path in touched if read(path) == after(path)}
    verdict = worst(row.state for row in rows)
    if taken.faults:
        verdict = worst([verdict, State.PARTIAL])
    elif verdict in (State.OUTDATED, State.APPLY, State.NOOP, State.SHIPPED):
        verdict = (
            State.NOOP if fine == touched and record.digest else State.PARTIAL if is_newer(record) else State.OUTDATED
        )
    back = [change for change in taken.changes if change.path not in fine]
    changes = [change for change in report.changes if change.path not in fine]
    report = replace(report, verdict=verdict, version=version, patches=rows, back=tuple(back), changes=tuple(changes))
    if verdict != State.OUTDATED:
        report = replace(report, back=(), changes=(), record=None)
    lost = f"{', '.join(taken.faults)}: {EDITED} since another version of this tool was applied. "
    message = _patchlib.message(report, patch_set, record)
    return replace(report, message=(lost if taken.faults else "") + message)


def _other_row(row: PatchStatus, read: Read, after: Read, faults: Mapping[str, str], record: Record) -> PatchStatus:
    if hit := [path for path in row.files if path in faults]:
        return replace(row, state=State.PARTIAL, detail="\n".join(f"{path}: {faults[path]}" for path in hit))
    if row.state not in (State.APPLY, State.NOOP):
        return row
    if all(read(path) == after(path) for path in row.files):
        return replace(row, state=State.NOOP)
    if is_newer(record):
        return replace(row, state=State.PARTIAL, detail=f"version {record.tool} of this tool, a newer one, was applied")
    return replace(row, state=State.OUTDATED, detail="an older version of this tool was applied")


# Writing.


@dataclass
class Journal:
    """Writes below one folder that can all be taken back."""

    root: Path
    undo: list[Callable[[], None]] = field(default_factory=list)
    wanted: dict[str, bytes | None] = field(default_factory=dict)

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Write and remove files, in this order, unless one is not any more as it was when that was planned."""
        read = reader(self.root)
        for change in changes:
            if change.before == change.after:
                continue
            if read(change.path) != change.before:
                raise Problem(f"{self.root / change.path}: changed while this tool was running")
            self.wanted[change.path] = change.after
            if change.after is not None:
                self.write(change.path, change.after)
            else:
                self.remove(change.path)

    def write(self, path: str, data: bytes) -> None:
        """Replace or create a file. Mode, attributes and, if allowed, the owner stay as they were."""
        place = self.root / path
        self._make_folders(place.parent)
        before = _state(place)
        # First, so that bytecode which cannot be removed leaves its source as it was; again for what came since.
        drop_bytecode(place)
        self.undo.append(lambda: _restore(place, before))
        _replace(place, data, before.like if before else _plain(Attributes.of(self.root / "vllm" / "__init__.py")))
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
        if place.is_dir() and not place.is_symlink():
            self.undo.append(lambda: self._make_folders(place))
            _remove_folder(place)

    def _make_folders(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folders(folder.parent)
        folder.mkdir()
        self.undo.append(lambda: _remove_folder(folder))
        _plain(Attributes.of(self.root / "vllm")).put_on(folder)

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
class Attributes:
    """Owner, mode, ACLs and extended attributes."""

    stat: os.stat_result
    extended: Mapping[str, bytes]

    @classmethod
    def of(cls, place: Path) -> "Attributes":
        extended = {}
        with contextlib.suppress(OSError, AttributeError):  # a file system, or a system, without them
            extended = {name: os.getxattr(place, name) for name in os.listxattr(place)}
        return cls(place.stat(), extended)

    def put_on(self, place: Path) -> None:
        here = Attributes.of(place)
        if (here.stat.st_uid, here.stat.st_gid) != (self.stat.st_uid, self.stat.st_gid):
            # Not the owner, or an owner that this user namespace does not know.
            with contextlib.suppress(OSError):
                os.chown(place, self.stat.st_uid, self.stat.st_gid)
        os.chmod(place, self.stat.st_mode & 0o7777)
        # A folder's default ACL is on the new file already. Attributes of the security modules may be refused.
        for name in here.extended.keys() - self.extended.keys():
            with contextlib.suppress(OSError):
                os.removexattr(place, name)
        for name, value in self.extended.items():
            if here.extended.get(name) != value:
                with contextlib.suppress(OSError):
                    os.setxattr(place, name, value)


def _plain(like: Attributes) -> Attributes:
    """What a new file takes from its neighbour: owner and mode."""
    return Attributes(like.stat, {})


@dataclass(frozen=True)
class _File:
    data: bytes
    link: str | None
    like: Attributes


def _state(place: Path) -> _File | None:
    try:
        link = os.readlink(place) if place.is_symlink() else None
        return _File(place.read_bytes(), link, Attributes.of(place))
    except FileNotFoundError:
        return None


def _restore(place: Path, before: _File | None) -> None:
    temp_path(place).unlink(missing_ok=True)
    if place.is_dir() and not place.is_symlink():
        place.rmdir()
    if before is None:
        place.unlink(missing_ok=True)
    elif before.link is not None:
        os.symlink(before.link, temp_path(place))
        os.replace(temp_path(place), place)
    elif _bytes(place) != before.data:
        _replace(place, before.data, before.like)
    drop_bytecode(place)


def _bytes(place: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return place.read_bytes()
    return None


def _replace(place: Path, data: bytes, like: Attributes) -> None:
    # Renaming breaks hard links and replaces a symlink by a private file: nothing outside the tree changes.
    temp = temp_path(place)
    temp.unlink(missing_ok=True)
    try:
        with open(temp, "xb") as file:
            file.write(data)
        like.put_on(temp)
        os.replace(temp, place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        if isinstance(error, OSError):
            # Write errors name no file, and nobody knows the temporary one.
            raise OSError(error.errno, error.strerror, str(place)) from None
        raise


def temp_path(place: Path) -> Path:
    """Where a file is written before it is renamed. Always the same, so that what a killed process left is found."""
    return place.with_name(f".{place.name}.dflash2")


def drop_bytecode(place: Path) -> None:
    """Remove compiled copies of a source file; one that is not checked against its source would still run."""
    if place.suffix != ".py":
        return
    folders = {place.parent / "__pycache__", Path(importlib.util.cache_from_source(str(place))).parent}
    for folder in folders:
        for compiled in folder.glob(f"{place.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def check_writable(root: Path, paths: Iterable[str]) -> None:
    """Problem, before the first write, if a path leads out of the tree or may not be replaced."""
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


def listed_path(line: bytes, root: Path) -> tuple[str, str]:
    """(path as a line of RECORD spells it, the same below site-packages); installers write ./, \\ or absolute ones."""
    try:
        spelled = (next(csv.reader([line.decode("utf-8", "surrogateescape")]), None) or [""])[0]
    except csv.Error:
        return "", ""
    path = spelled.replace("\\", "/")
    if path.startswith("/"):
        folder, name = posixpath.split(path)
        path = posixpath.relpath(posixpath.join(os.path.realpath(folder), name), root)
    return spelled, posixpath.normpath(path)


def _wheel_line(spelled: str, data: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    quoted = '"' + spelled.replace('"', '""') + '"' if set(spelled) & set('",\r\n') else spelled
    return f"{quoted},sha256={digest},{len(data)}".encode("utf-8", "surrogateescape")


def wheel_with(wheel: bytes, root: Path, files: Mapping[str, bytes | str | None]) -> bytes:
    """A RECORD with these files' hashes and sizes, or with that line, or without them; other lines keep their bytes."""
    left = dict(files)
    lines = wheel.splitlines(keepends=True)
    result = []
    for line in lines:
        spelled, path = listed_path(line, root)
        if path not in files:
            result.append(line)
        elif wanted := left.pop(path, None):
            text = (
                wanted.encode("utf-8", "surrogateescape") if isinstance(wanted, str) else _wheel_line(spelled, wanted)
            )
            result.append(text + _line_end(line))
    end = _line_end(lines[0]) if lines and _line_end(lines[0]) else b"\n"
    added = [_wheel_line(path, data) + end for path, data in sorted(left.items(), key=str) if isinstance(data, bytes)]
    # A last line without an end stays the last one.
    at = len(result) - 1 if result and not _line_end(result[-1]) else len(result)
    return b"".join([*result[:at], *added, *result[at:]])


def _wheel_lines(wheel: bytes, root: Path, paths: Iterable[str]) -> dict[str, str]:
    """The lines of these paths without their ends, "" if there is none."""
    found = dict.fromkeys(paths, "")
    for line in wheel.splitlines():
        if (path := listed_path(line, root)[1]) in found:
            found[path] = line.decode("utf-8", "surrogateescape")
    return found


def _without_state(wheel: bytes, root: Path) -> bytes:
    """A RECORD without the lines of what lies in our own folder."""
    listed = (
        listed_path(line, root)[1] for line in wheel.splitlines() if STATE_DIR.encode() in line.replace(b"\\", b"/")
    )
    return wheel_with(wheel, root, {path: None for path in listed if _is_state(path)})


def _line_end(line: bytes) -> bytes:
    return line[len(line.rstrip(b"\r\n")) :]


# What a user asks for.


def apply(site: Site, report: Report, patch_set: PatchSet) -> Report:
    """Carry out a report's plan, check what is then on the disk, and return the report on that.

    Problem, with everything put back, if a write fails (exit 3) or the outcome is not as promised (exit 2).
    """
    read = reader(site.root)
    older = read_record(read, patch_set)
    final = _new_record(site, read, report, older)
    wheel, listed = final.wheel, (read(final.wheel) or b"") if final.wheel else b""
    files = [change.path for change in (*report.back, *report.changes)]
    with _all_or_nothing(site.root) as journal:
        check_writable(site.root, [*files, STATE_FILE, *([site.wheel] if site.wheel else [])])
        journal.carry_out(report.back)
        # The record first: whatever happens to this process, --revert can then put the tree back. And a list with
        # files that never came is harmless to pip; a file that is not listed outlives an uninstall.
        first = _with_older(final, older) if older else final
        if wheel and not older:
            journal.carry_out(
                [Change(wheel, listed, listed := wheel_with(listed, site.root, {STATE_FILE: dump(first)}))]
            )
        journal.carry_out([Change(STATE_FILE, read(STATE_FILE), dump(first))])
        _clear(journal, older, files)
        if wheel:
            journal.carry_out([Change(wheel, listed, _wheel_there(site, read, report, final, older))])
        journal.carry_out(report.changes)
        if first != final:
            journal.carry_out([Change(STATE_FILE, dump(first), dump(final))])
        after, fault = _outcome(site, report, journal.wanted, patch_set)
        if fault:
            raise Problem(f"after writing: {fault}", State.DRIFT)
    return after


def _new_record(site: Site, read: Read, report: Report, older: Record | None) -> Record:
    assert report.record
    folders = _folders(site.root, report.record, older)
    record = replace(report.record, version=site.version, wheel=site.wheel, folders=folders)
    wheel = read(site.wheel) if site.wheel else None
    if wheel is None:
        return replace(record, wheel=None)
    known = older.wheel_lines if older else {}
    lines = _wheel_lines(wheel, site.root, record.files) | {p: known[p] for p in known if p in record.files}
    return replace(record, wheel_lines=lines)


def _with_older(record: Record, older: Record) -> Record:
    """A record that also leads back from half a move; without a digest, so that the next run completes the move."""
    lines = {**dict.fromkeys(older.added, ""), **older.wheel_lines, **record.wheel_lines}
    folders = tuple(sorted({*record.folders, *older.folders}))
    return replace(record, digest="", folders=folders, wheel_lines=lines)


def _wheel_there(site: Site, read: Read, report: Report, record: Record, older: Record | None) -> bytes:
    """RECORD with what is then there."""
    now = overlay(read, (*report.back, *report.changes))
    # Lines of our own go to the end in any case, so that it does not matter what was there before.
    wheel = wheel_with(
        _without_state(read(record.wheel or "") or b"", site.root), site.root, dict.fromkeys(record.added)
    )
    gone = {**dict.fromkeys(older.added), **older.wheel_lines} if older else {}
    files = {**gone, **{path: now(path) for path in (*record.files, *record.added)}, STATE_FILE: dump(record)}
    return wheel_with(wheel, site.root, files)


def _folders(root: Path, record: Record, older: Record | None) -> tuple[str, ...]:
    """Folders that we make, or an older version of this tool made: the outer ones first."""
    parents = {
        parent.as_posix() for path in (STATE_FILE, *record.added) for parent in Path(path).parents if parent.parts
    }
    made = older.folders if older else ()
    return tuple(sorted(p for p in parents if _is_state(p) or p in made or not (root / p).exists()))


def _outcome(
    site: Site, planned: Report, wanted: Mapping[str, bytes | None], patch_set: PatchSet
) -> tuple[Report, str | None]:
    """(report on the tree after writing, what is not as it was promised or None)."""
    read = cached(reader(site.root))
    for path, data in wanted.items():
        if read(path) != data:
            wrong = "missing" if read(path) is None else "not what was written"
            return planned, f"{path} is {wrong}"
    report = survey(read, site.version, patch_set)
    record = read_record(read, patch_set)
    faults = verify(read, _without_ours(read, record) if record else read, patch_set, planned.applies)
    if faults or report.verdict not in (State.NOOP, State.SHIPPED):
        return report, "; ".join(faults.values()) or report.message
    return report, None


@dataclass(frozen=True)
class Reverted:
    """What --revert did. `recorded` says whether a record told what was there before; `undone` is the plan."""

    undone: Undo
    recorded: bool


def revert(site: Site, patch_set: PatchSet, force: bool) -> Reverted:
    """Take out what a version of this tool wrote, and its record.

    Problem, with nothing changed, if others edited what we wrote (unless `force`).
    """
    read = cached(reader(site.root))
    try:
        record = read_record(read, patch_set)
    except Problem as problem:
        if not problem.state:
            raise
        record = None
    known = record or recognised(read, patch_set)
    undone = undo(read, known, force)
    if record and undone.faults:
        raise Problem(_refusal(undone.faults, force), State.PARTIAL)
    wheel = site.wheel or known.wheel
    listed = read(wheel) if wheel else None
    back = _wheel_back(site.root, listed or b"", read, known, undone)
    changes = [*undone.changes, *([Change(wheel, listed, back)] if wheel and listed is not None else [])]
    with _all_or_nothing(site.root) as journal:
        check_writable(site.root, [STATE_FILE, *(change.path for change in changes if change.before != change.after)])
        journal.carry_out(changes)
        # The record goes when there is nothing left that only it knows, and RECORD forgets it last.
        _clear(journal, known, [STATE_FILE, *(change.path for change in changes)])
        journal.carry_out([Change(STATE_FILE, read(STATE_FILE), None)])
        journal.remove_folder(STATE_DIR)
        if wheel and listed is not None:
            journal.carry_out([Change(wheel, back, _without_state(back, site.root))])
        now = reader(site.root)
        if wrong := [path for path, data in journal.wanted.items() if now(path) != data]:
            raise Problem(f"not restored: {', '.join(wrong)}", State.PARTIAL)
    return Reverted(undone, record is not None)


def _refusal(faults: Mapping[str, str], force: bool) -> str:
    if force:
        return "; ".join(f"{path}: {fault}" for path, fault in faults.items()) + ". Nothing is written"
    if set(faults.values()) == {EDITED}:
        return f"{EDITED}: {', '.join(faults)}. --revert --force discards that. Nothing is written"
    reasons = "; ".join(f"{path}: {fault.splitlines()[0]}" for path, fault in faults.items())
    return f"{reasons}. --revert --force discards that. Nothing is written"


def _wheel_back(root: Path, wheel: bytes, read: Read, record: Record, undone: Undo) -> bytes:
    """RECORD with the original lines, or with the truth if others edited a file or its line is not known."""
    now = overlay(read, undone.changes)
    there = _wheel_lines(wheel, root, record.files)
    files: dict[str, bytes | str | None] = {**record.wheel_lines, **dict.fromkeys(record.added)}
    for path, entry in record.files.items():
        line = record.wheel_lines.get(path, there[path] if ",sha256=" not in there[path] else None)
        same = line is not None and (not line or now(path) is None or sha256(now(path)) == entry.before)
        files[path] = line if same else now(path)
    return wheel_with(wheel, root, files)


def _clear(journal: Journal, record: Record | None, paths: Iterable[str]) -> None:
    """Remove what only a record needs: temporary files of a killed process, kept originals, folders if empty.

    An original that differs from its file and that no record names may be the only copy: it stays.
    """
    read = reader(journal.root)
    named = {*record.files, record.wheel} if record and record.tool else set()
    for path in {*paths, *(record.files if record else ()), *(record.added if record else ())}:
        temp_path(journal.root / path).unlink(missing_ok=True)
    home = journal.root / STATE_DIR
    inside = [] if home.is_symlink() else sorted(home.rglob("*"), reverse=True)
    own = [place.relative_to(journal.root).as_posix() for place in inside if not place.is_symlink()]
    for path in own:
        original = path.removeprefix(f"{STATE_DIR}/originals/").removesuffix(".orig")
        kept = path.endswith(".orig") and (original in named or read(path) == read(original))
        if (kept or path.endswith(".dflash2")) and (journal.root / path).is_file():
            journal.remove(path)
    for path in (*own, *reversed(record.folders if record else ()), STATE_DIR):
        journal.remove_folder(path)


@contextlib.contextmanager
def _all_or_nothing(root: Path) -> Iterator[Journal]:
    journal = Journal(root)
    try:
        yield journal
    except BaseException as error:
        written = bool(journal.undo)
        try:
            journal.roll_back()
        except OSError as second:
            raise Problem(f"{error}. Putting everything back failed too ({second}): run --revert") from error
        if isinstance(error, OSError):
            raise Problem(f"{error.filename}: {error.strerror}. Everything was put back") from error
        if isinstance(error, Problem) and written:
            raise Problem(f"{error}. Everything was put back", error.state) from error
        raise
