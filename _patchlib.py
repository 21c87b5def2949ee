"""The patch tool's core: what a patch is, what state a tree is in, and what would be written.

Text in, plan out. A tree is reached only through a function that maps a path to bytes, so a site-packages folder, a
wheel on an index, a checkout and a git tag are all judged alike, and nothing here can write.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from _source import (
    NotPython,
    Read,
    decode,
    definitions,
    find_in_scope,
    find_lines,
    has_marker,
    missing_imports,
    near_miss,
    nearest,
    replace_lines,
    same_code,
    scope_lines,
    sha256,
    syntax_error,
)

__version__ = "0.2.0"

# Our record, inside the tree so that it travels with it.
STATE_DIR = "vllm/_dflash2_patch"
STATE_FILE = f"{STATE_DIR}/record.json"

EDITED = "edited by someone else"
CONTEXT_LINES = 3


class State(StrEnum):
    """Of a patch, of the files from one folder, and of a tree. The worst comes first."""

    DRIFT = "DRIFT"
    PARTIAL = "PARTIAL"
    OUTDATED = "OUTDATED"
    APPLY = "APPLY"
    NOOP = "NOOP"
    SHIPPED = "SHIPPED"
    MISSING = "MISSING"


class Problem(Exception):
    """Something a user can cause: the message says what it is and what to do.

    state  of the tree (PARTIAL or DRIFT), None if the environment or our own data is at fault
    """

    def __init__(self, message: str, state: State | None = None):
        super().__init__(message)
        self.state = state


# What a patch is.


@dataclass(frozen=True)
class Hunk:
    """Replace `old` by `new`, once, inside one scope of one file. Both are whole lines.

    file   POSIX path below site-packages
    scope  dotted name of the class or function that holds the match; "" is the module's top level
    """

    file: str
    scope: str
    old: str
    new: str


@dataclass(frozen=True)
class Marker:
    """Syntax that shows a feature: a node in `scope` of `file` starts, as `ast.unparse` spells it, with `text`."""

    file: str
    scope: str
    text: str


@dataclass(frozen=True)
class Patch:
    """One seam.

    upstream    the change that it corresponds to
    shipped_in  the release that has it; from there on the patch can be dropped. None: no release yet
    hunks       their scopes exist once before and after
    defines     (file, dotted name) of further definitions that exist exactly once afterwards
    shipped     alternatives; each is a tuple of markers that must all be there
    core        part of the port itself; a release that ships the port without a further fix (False) is not patched
    """

    name: str
    why: str
    upstream: str
    shipped_in: str | None
    hunks: tuple[Hunk, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    shipped: tuple[tuple[Marker, ...], ...] = ()
    core: bool = False


@dataclass(frozen=True)
class PatchSet:
    """Everything one version of this tool puts into a tree.

    files         destination -> bytes of each installed file
    folders       row name (the source's folder) -> its destinations
    supported     the vLLM releases that the patches are written for
    shipped_from  the first release that ships the port
    digest        changes whenever a byte that would be written changes
    """

    patches: tuple[Patch, ...]
    files: dict[str, bytes]
    folders: dict[str, tuple[str, ...]]
    supported: tuple[str, ...]
    shipped_from: str
    digest: str

    def hunks(self, file: str | None = None) -> list[Hunk]:
        """All hunks, or those of one file."""
        return [hunk for patch in self.patches for hunk in patch.hunks if file in (None, hunk.file)]

    def supports(self, version: str) -> bool:
        return release(version) in map(release, self.supported)


def load(
    patches: Iterable[Patch],
    installed: Mapping[str, str],
    source: Read,
    supported: tuple[str, ...] = ("0.27.0", "0.27.1"),
    shipped_from: str = "0.28.0",
) -> PatchSet:
    """Gather what this copy of the tool writes; Problem names a patch or file with an impossible name or path.

    installed  source -> destination
    source     reads a path below this repo
    """
    patches = tuple(patches)
    for name, count in Counter(patch.name for patch in patches).items():
        if count > 1 or not re.fullmatch(r"[\w.-]+", name):
            raise Problem(f"patch {name}: {count} patches have this name, which must be one word and unique")
    for patch in patches:
        for hunk in patch.hunks:
            if fault := path_fault(hunk.file):
                raise Problem(f"patch {patch.name}: {fault}")
    files: dict[str, bytes] = {}
    folders: dict[str, tuple[str, ...]] = {}
    patched = {hunk.file for patch in patches for hunk in patch.hunks}
    for path, destination in installed.items():
        data = source(path)
        if data is None:
            raise Problem(f"{path}: INSTALLED names it, but this copy of the tool has no such file")
        if fault := path_fault(destination):
            raise Problem(f"{path}: {fault}")
        if destination in files or destination in patched:
            raise Problem(f"{path}: {destination} is written twice")
        # A checkout with CRLF line ends must install the same bytes as any other.
        files[destination] = _lf(data)
        row = path.rpartition("/")[0] + "/"
        folders[row] = (*folders.get(row, ()), destination)
    hunks = [(patch.name, hunk.file, hunk.scope, hunk.old, hunk.new) for patch in patches for hunk in patch.hunks]
    texts = sorted((path, sha256(data)) for path, data in files.items())
    return PatchSet(patches, files, folders, supported, shipped_from, sha256(json.dumps([hunks, texts]).encode()) or "")


def path_fault(path: str) -> str | None:
    """Why a path cannot be a file or folder of vLLM's that we touch, or None."""
    parts = path.split("/")
    if not path.isprintable():
        return f"{path!r} is not a path"
    if parts[0] != "vllm" or len(parts) < 2 or {"", ".", ".."} & set(parts) or path.startswith(STATE_DIR + "/"):
        return f"{path} is not a path below vllm/"
    return None


def release(version: str) -> tuple[tuple[int, ...], str]:
    """What two versions have in common that PEP 440 calls equal: (numbers, pre-, post- or development suffix).

    The local label is left out: 0.27.1+rocm is 0.27.1, and so are v0.27.1, 0.27.01 and 0.27.1.0. 0.27.1.post1 is not.
    """
    match = re.fullmatch(r"\s*v?(\d+(?:\.\d+)*)([^+]*)(?:\+.*)?", version, re.IGNORECASE)
    if not match:
        return (), version
    numbers = [int(number) for number in match[1].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers), match[2].strip(" .-_").lower()


def is_newer(record: "Record") -> bool:
    """Whether a newer version of this tool wrote a record."""
    return release(record.tool)[0] > release(__version__)[0]


def _lf(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n")


# What was done to a tree.


@dataclass(frozen=True)
class Change:
    """One file of a plan; None stands for no file."""

    path: str
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True)
class Written(Hunk):
    """A hunk as it was written, with the lines of the original above and below it."""

    above: str = ""
    below: str = ""


@dataclass(frozen=True)
class FileRecord:
    """A patched file: its hashes, None if they are not known, and what was written.

    original  its bytes before us, which the first format of the record kept instead of the hunks
    """

    before: str | None
    after: str | None
    hunks: tuple[Written, ...]
    original: bytes | None = None


@dataclass(frozen=True)
class Record:
    """What one version of this tool did to a tree.

    tool         its version; digest is that of its patch set
    version      of vLLM
    patches      names of the patches and folders that were applied
    files, added what was patched; path -> hash of what was added
    folders      that we made, the outer ones first
    wheel        path of the RECORD file that was brought up to date, or None
    wheel_lines  path -> the line of RECORD that was replaced
    """

    tool: str
    digest: str
    version: str
    patches: tuple[str, ...]
    files: dict[str, FileRecord]
    added: dict[str, str]
    folders: tuple[str, ...] = ()
    wheel: str | None = None
    wheel_lines: Mapping[str, str] = field(default_factory=dict)


# The verdict on a tree.


@dataclass(frozen=True)
class Finding:
    """A state, and why if that needs saying."""

    state: State
    detail: str = ""


@dataclass(frozen=True)
class PatchStatus:
    """The state of one patch, or of the installed files that come from one folder."""

    name: str
    state: State
    files: tuple[str, ...]
    detail: str
    shipped_in: str | None = None


@dataclass(frozen=True)
class Report:
    """What was found in a tree, and the plan if the verdict is APPLY or OUTDATED.

    back     takes an older version of this tool out, before anything else
    changes  what is then written; `before` is what `back` leaves
    record   of these changes, but for what only the disk knows: folders and wheel
    """

    verdict: State
    version: str
    patches: tuple[PatchStatus, ...]
    message: str
    back: tuple[Change, ...] = ()
    changes: tuple[Change, ...] = ()
    record: Record | None = None

    @property
    def applies(self) -> tuple[str, ...]:
        """Names of the rows whose text is in the tree once the plan is carried out."""
        return tuple(row.name for row in self.patches if row.state in (State.APPLY, State.OUTDATED, State.NOOP))


def survey(
    read: Read, version: str, patch_set: PatchSet, record: Record | None = None, before: Read | None = None
) -> Report:
    """Judge a tree and plan what applying would write. Pure: nothing is written.

    read     path below site-packages -> bytes, None if there is no such file; what it raises passes through
    version  of the vLLM in the tree, "0.27.1" or "0.27.1+rocm"
    record   of what this version of the tool did to the tree, if anything
    before   the tree without that
    Raises Problem if our patches overlap in the tree.
    """
    read = cached(read)
    rows, ships_port = _judge(read, before or read, patch_set, record)
    # A build that takes its version from git may have renamed the tree since.
    supported = patch_set.supports(record.version if record else version)
    if not supported and not ships_port:
        names = " or ".join(patch_set.supported)
        rows = [_changed(row, State.APPLY, State.DRIFT, f"not applied: vLLM {version} is not {names}") for row in rows]
    if supported and ships_port:
        # No supported release ships the port: without a record it is somebody's patch, or an old one of ours.
        detail = f"vLLM {version} does not ship this: someone patched it in"
        rows = [_changed(row, State.SHIPPED, State.PARTIAL, detail) for row in rows]
    report = Report(worst(row.state for row in rows), version, tuple(rows), "")
    if report.verdict == State.APPLY:
        report = _plan(read, report, patch_set)
    return replace(report, message=message(report, patch_set, record, supported or ships_port))


def _changed(row: PatchStatus, state: State, to: State, detail: str) -> PatchStatus:
    return replace(row, state=to, detail=detail) if row.state == state else row


def worst(states: Iterable[State]) -> State:
    """The worst state wins. MISSING changes nothing; APPLY beside NOOP means that part of it is there."""
    found = set(states) - {State.MISSING}
    if {State.APPLY, State.NOOP} <= found:
        found.add(State.PARTIAL)
    return min(found, key=[*State].index, default=State.SHIPPED)


def combine(findings: list[Finding]) -> Finding:
    """One finding for several: what is lost beside text of ours was ours, so it is PARTIAL and not DRIFT."""
    states = {finding.state for finding in findings}
    state = min(states, key=[*State].index)
    if len(states) > 1 and states & {State.NOOP, State.PARTIAL}:
        return Finding(State.PARTIAL, "\n".join(f.detail for f in findings if f.state != State.NOOP))
    if state in (State.APPLY, State.NOOP):
        return Finding(state)
    return Finding(state, "\n".join(finding.detail for finding in findings if finding.state == state))


def cached(read: Read) -> Read:
    """The tree as it was when each file was first asked for, so that one survey judges one state."""
    seen: dict[str, bytes | None] = {}

    def reading(path: str) -> bytes | None:
        if path not in seen:
            seen[path] = read(path)
        return seen[path]

    return reading


def overlay(read: Read, changes: Iterable[Change]) -> Read:
    """The tree as it would be after these changes."""
    after = {change.path: change.after for change in changes}
    return lambda path: after[path] if path in after else read(path)


def _text(read: Read, path: str) -> str | None:
    data = read(path)
    return None if data is None else decode(data)


def _judge(read: Read, before: Read, patch_set: PatchSet, record: Record | None) -> tuple[list[PatchStatus], bool]:
    """The rows, and whether this release ships the port itself."""
    applied = set(record.patches) if record else set()
    asked = (
        [] if not record and _mostly_ours(read, patch_set) else [p for p in patch_set.patches if p.name not in applied]
    )
    # Text that we inserted is no sign that upstream has a feature: only a text without ours is asked.
    shipped = {patch.name for patch in asked if ships(before, patch)}
    core = {patch.name for patch in patch_set.patches if patch.core}
    if not record and core and core <= shipped and any(read(path) is not None for path in patch_set.files):
        return _shipping_rows(read, patch_set, shipped), True
    folders = [_folder_row(read, patch_set, name, record) for name in patch_set.folders]
    installed = worst(row.state for row in folders) if folders else State.NOOP
    rows = []
    for patch in patch_set.patches:
        if patch.name in shipped and not _half_done(read, patch):
            rows.append(_shipped_row(patch))
        elif not patch.hunks:
            rows.append(_row(patch, Finding(installed)))
        else:
            rows.append(_row(patch, _patch_finding(read, patch_set, patch, record if patch.name in applied else None)))
    return rows + folders, False


def ships(read: Read, patch: Patch) -> bool:
    """Whether all markers of one of the patch's alternatives are in the tree."""
    return any(all(_has(read, marker) for marker in markers) for markers in patch.shipped)


def _has(read: Read, marker: Marker) -> bool:
    text = _text(read, marker.file)
    return text is not None and has_marker(text, marker.scope, marker.text)


def _has_new(read: Read, hunk: Hunk) -> bool:
    return bool(find_lines(_text(read, hunk.file) or "", hunk.new))


def _mostly_ours(read: Read, patch_set: PatchSet) -> bool:
    """Without a record: a line or two may be the same upstream, most of our text is not."""
    hunks = patch_set.hunks()
    return sum(_has_new(read, hunk) for hunk in hunks) * 2 > len(hunks)


def _half_done(read: Read, patch: Patch) -> bool:
    """Whether a part of our text was put there by hand: the markers may lie in that part, and the rest is missing."""
    return len({_has_new(read, hunk) for hunk in patch.hunks}) == 2


def _shipping_rows(read: Read, patch_set: PatchSet, shipped: set[str]) -> list[PatchStatus]:
    missing = [_row(p, Finding(State.MISSING, f"this release lacks it: {p.why}")) for p in patch_set.patches]
    rows = [_shipped_row(p) if p.name in shipped else row for p, row in zip(patch_set.patches, missing)]
    for name, files in patch_set.folders.items():
        if any(read(path) is not None for path in files):
            rows.append(PatchStatus(name, State.SHIPPED, files, "upstream's own modules"))
        else:
            rows.append(PatchStatus(name, State.MISSING, files, "this release has no such modules"))
    return rows


def _shipped_row(patch: Patch) -> PatchStatus:
    since = f"upstream has it since {patch.shipped_in}" if patch.shipped_in else "upstream has it"
    return _row(patch, Finding(State.SHIPPED, since))


def _row(patch: Patch, finding: Finding) -> PatchStatus:
    files = tuple(dict.fromkeys(hunk.file for hunk in patch.hunks))
    return PatchStatus(patch.name, finding.state, files, finding.detail or patch.why, patch.shipped_in)


def _folder_row(read: Read, patch_set: PatchSet, name: str, record: Record | None) -> PatchStatus:
    files = patch_set.folders[name]
    finding = combine([_file_finding(read(path), patch_set.files[path], path, record) for path in files])
    return PatchStatus(name, finding.state, files, finding.detail or f"{len(files)} files of our own")


def _file_finding(data: bytes | None, wanted: bytes, path: str, record: Record | None) -> Finding:
    if data is None:
        lost = Finding(State.PARTIAL, f"{path}: missing, removed by someone else")
        return lost if record else Finding(State.APPLY, f"{path}: missing")
    if _lf(data) == wanted:
        return Finding(State.NOOP)
    return Finding(State.PARTIAL, f"{path}: " + (EDITED if record else "a file that is not ours is in the way"))


def _patch_finding(read: Read, patch_set: PatchSet, patch: Patch, record: Record | None) -> Finding:
    """`record` says that the patch was applied, None that it was not or that nobody knows."""
    files = {hunk.file for hunk in patch.hunks}
    if record and all(path in record.files and sha256(read(path)) == record.files[path].after for path in files):
        return Finding(State.NOOP)
    findings = []
    for number, hunk in enumerate(patch.hunks, 1):
        finding = judge(_text(read, hunk.file), hunk, patch_set.hunks(hunk.file), record is not None)
        where = f"{hunk.file}: hunk {number} of {patch.name}, in {hunk.scope or 'the top level'}: "
        findings.append(replace(finding, detail=where + finding.detail))
    finding = combine(findings)
    if finding.state == State.NOOP and (fault := _definition_fault(read, patch)):
        return Finding(State.PARTIAL, fault)
    return finding


def judge(text: str | None, hunk: Hunk, beside: Iterable[Hunk] = (), applied: bool = False) -> Finding:
    """NOOP, APPLY, PARTIAL or DRIFT: one hunk in a file's text, which is None if there is no text.

    beside   the hunks of the same file; their new text may hold what this one looks for
    applied  a record says that the new text was put there
    """
    lost = State.PARTIAL if applied else State.DRIFT
    if text is None:
        return Finding(lost, "the file is missing or not UTF-8")
    try:
        count = len(definitions(text).get(hunk.scope, ())) if hunk.scope else 1
        if count != 1:
            found = f"{hunk.scope} is defined {count} times" if count else f"there is no {hunk.scope}"
            return Finding(lost, found + near_miss(text, hunk.scope, hunk.old))
        old, new = find_free(text, hunk, beside)
    except NotPython as error:
        return Finding(lost, str(error))
    if len(new) == 1 and not old:
        return Finding(State.NOOP, "the new text is there")
    if applied and len(old) == 1 and not new:
        return Finding(State.PARTIAL, "the original text is back")
    if applied:
        return Finding(State.PARTIAL, EDITED + near_miss(text, hunk.scope, hunk.new))
    if len(old) == 1 and not new:
        if traces(text, hunk):
            return Finding(State.PARTIAL, f"{EDITED}, or some of the new text is there already")
        return Finding(State.APPLY, "the old text is there")
    if old or new:
        counts = f"the old text is there {len(old)} times, the new text {len(new)} times"
        return Finding(State.PARTIAL if new else State.DRIFT, counts)
    if nearest(text, "", hunk.new)[0] > nearest(text, "", hunk.old)[0]:
        return Finding(State.PARTIAL, EDITED + near_miss(text, hunk.scope, hunk.new))
    detail = "the text to replace is not there" + _layout(text, hunk)
    return Finding(State.DRIFT, detail + near_miss(text, hunk.scope, hunk.old))


def _layout(text: str, hunk: Hunk) -> str:
    """What a reader of a drift report wants to know first: is it the code, or only its layout?"""
    try:
        line = same_code(text, hunk.scope, hunk.old)
    except NotPython:
        return ""
    except ImportError:
        return "; install libcst to see whether the code changed or only its layout"
    return f"; the same code, reformatted or recommented, is at line {line}" if line else "; the code changed"


def find_free(text: str, hunk: Hunk, beside: Iterable[Hunk], strict: bool = True) -> tuple[list[int], list[int]]:
    """Where the old and the new text are, each without the places where it is only a part of longer text of ours.

    Unless `strict`, a file without that scope, or one that is not Python, is searched as a whole.
    """

    def places(lines: str) -> list[tuple[int, str]]:
        try:
            found = find_in_scope(text, hunk.scope, lines)
        except (ValueError, KeyError):
            if strict:
                raise
            found = find_lines(text, lines)
        return [(at, lines) for at in found]

    longer = {other.new for other in beside if find_lines(other.new, hunk.old) or find_lines(other.new, hunk.new)}
    covers = [(at, lines) for lines in longer | {hunk.old, hunk.new} for at in find_lines(text, lines)]

    def free(found: list[tuple[int, str]]) -> list[int]:
        return [at for at, lines in found if not any(_within((at, lines), cover) for cover in covers)]

    return free(places(hunk.old)), free(places(hunk.new))


def _within(inner: tuple[int, str], outer: tuple[int, str]) -> bool:
    (at, lines), (start, around) = inner, outer
    size, room = lines.count("\n"), around.count("\n")
    return size < room and start <= at and at + size <= start + room


def traces(text: str, hunk: Hunk) -> bool:
    """Whether most lines that the hunk adds are in its scope, though the new text as a whole is not."""
    old, there = set(hunk.old.splitlines()), set(scope_lines(text, hunk.scope)[1])
    added = [line for line in hunk.new.splitlines() if len(line.strip()) > 8 and line not in old]
    return sum(line in there for line in added) * 2 > len(added)


# The plan.


def _plan(read: Read, report: Report, patch_set: PatchSet) -> Report:
    """The report with its plan and record, or with DRIFT if a result would not be as promised."""
    names = report.applies
    located: dict[str, list[tuple[int, Hunk, Patch]]] = {}
    for patch in patch_set.patches:
        for hunk in patch.hunks if patch.name in names else ():
            (at,) = find_in_scope(_text(read, hunk.file) or "", hunk.scope, hunk.old)
            located.setdefault(hunk.file, []).append((at, hunk, patch))
    changes, files = [], {}
    for path, found in located.items():
        _refuse_overlaps(path, found)
        data = read(path) or b""
        _refuse_mixed_ends(path, data, found)
        change = Change(path, data, replace_lines(data, [(at, hunk.old, hunk.new) for at, hunk, _ in found]))
        changes.append(change)
        # Not splitlines: a form feed or a lone carriage return does not end a line here.
        lines = [line + "\n" for line in (decode(data) or "").removesuffix("\n").split("\n")]
        written = tuple(_written(lines, at, hunk) for at, hunk, _ in found)
        files[path] = FileRecord(sha256(data), sha256(change.after), written)
    added = {path: patch_set.files[path] for name in names for path in patch_set.folders.get(name, ())}
    changes += [Change(path, read(path), data) for path, data in added.items()]
    hashes = {path: sha256(data) or "" for path, data in added.items()}
    faults = verify(overlay(read, changes), read, patch_set, names)
    if faults:
        rows = tuple(
            _changed(row, row.state, State.DRIFT, faults[row.name]) if row.name in faults else row
            for row in report.patches
        )
        return replace(report, verdict=worst(row.state for row in rows), patches=rows)
    record = Record(__version__, patch_set.digest, report.version, names, files, hashes)
    return replace(report, changes=tuple(changes), record=record)


def _written(lines: list[str], at: int, hunk: Hunk) -> Written:
    end = at + hunk.old.count("\n")
    above, below = lines[max(0, at - CONTEXT_LINES) : at], lines[end : end + CONTEXT_LINES]
    return Written(hunk.file, hunk.scope, hunk.old, hunk.new, "".join(above), "".join(below))


def _refuse_overlaps(path: str, located: list[tuple[int, Hunk, Patch]]) -> None:
    located.sort(key=lambda entry: entry[0])
    for (at, hunk, patch), (after, _, other) in pairwise(located):
        if at + hunk.old.count("\n") > after:
            raise Problem(f"patch {other.name}: a hunk overlaps one of patch {patch.name} at {path}:{after + 1}")


def _refuse_mixed_ends(path: str, data: bytes, located: list[tuple[int, Hunk, Patch]]) -> None:
    """Lines that end in different ways could not be put back as they were."""
    lines = data.split(b"\n")
    for at, hunk, patch in located:
        if len({line.endswith(b"\r") for line in lines[at : at + hunk.old.count("\n")]}) > 1:
            raise Problem(f"patch {patch.name}: {path}:{at + 1} has mixed line ends", State.DRIFT)


def verify(read: Read, before: Read, patch_set: PatchSet, names: Iterable[str]) -> dict[str, str]:
    """Row name -> what is wrong in a patched tree; empty when every promise of the named rows is kept.

    Every result parses, every hunk is recognised again, every promised definition is there once, every
    vLLM import of ours resolves, every installed file is ours.
    """
    names = set(names)
    faults = {patch.name: _patch_fault(read, before, patch_set, patch) for patch in patch_set.patches}
    faults |= {name: _folder_fault(read, patch_set, paths) for name, paths in patch_set.folders.items()}
    return {name: fault for name, fault in faults.items() if name in names and fault}


def _patch_fault(read: Read, before: Read, patch_set: PatchSet, patch: Patch) -> str | None:
    for path in dict.fromkeys(hunk.file for hunk in patch.hunks):
        text = _text(read, path)
        if text is None:
            return f"{path}: missing or not UTF-8"
        if error := syntax_error(text):
            return f"{path}: the result is not Python ({error})"
        ours = "".join(hunk.new for hunk in patch.hunks if hunk.file == path)
        lacking = missing_imports(read, path, _text(before, path), text)
        if lacking := [line for line in lacking if line.split()[-1].split(".")[-1] in ours]:
            return f"{path}: this vLLM has no: {', '.join(lacking)}"
    for number, hunk in enumerate(patch.hunks, 1):
        finding = judge(_text(read, hunk.file), hunk, patch_set.hunks(hunk.file))
        if finding.state != State.NOOP:
            return f"{hunk.file}: hunk {number} of {patch.name} is not recognised once applied: {finding.detail}"
    return _definition_fault(read, patch)


def _definition_fault(read: Read, patch: Patch) -> str | None:
    scopes = [(hunk.file, hunk.scope) for hunk in patch.hunks if hunk.scope]
    for path, name in (*scopes, *patch.defines):
        text = _text(read, path)
        count = len(definitions(text).get(name, ())) if text is not None else 0
        if count != 1:
            return f"{path}: {name} is defined {count} times, not once"
    return None


def _folder_fault(read: Read, patch_set: PatchSet, paths: Iterable[str]) -> str | None:
    for path in paths:
        text = _text(read, path)
        if text is None or text.encode() != patch_set.files[path]:
            return f"{path}: not the bytes that were installed"
        if not path.endswith(".py"):
            continue
        if error := syntax_error(text):
            return f"{path}: not Python ({error})"
        if lacking := missing_imports(read, path, None, text):
            return f"{path}: this vLLM has no: {', '.join(lacking)}"
    return None


def message(report: Report, patch_set: PatchSet, record: Record | None, known: bool = True) -> str:
    """One sentence or two on what was found and what to do."""
    version = report.version

    def named(state: State) -> str:
        return ", ".join(row.name for row in report.patches if row.state == state)

    if not known and report.verdict == State.DRIFT:
        return (
            f"vLLM {version} is not supported: the patches fit {' and '.join(patch_set.supported)}, and releases from "
            f"{patch_set.shipped_from} on ship DFlash2 themselves. Nothing is written."
        )
    if report.verdict == State.PARTIAL:
        return _partial_message(version, record)
    lacks = named(State.MISSING)
    return {
        State.DRIFT: f"vLLM {version} differs from what these expect: {named(State.DRIFT)}. Nothing is written.",
        State.OUTDATED: f"An older version of this tool patched this vLLM {version}; applying takes that out and "
        "applies this version.",
        State.APPLY: f"vLLM {version} can be patched.",
        State.NOOP: f"vLLM {version} is patched; there is nothing to do.",
        State.SHIPPED: f"vLLM {version} ships DFlash2 itself; there is nothing to apply."
        + (f" It lacks these further fixes: {lacks}." if lacks else ""),
    }[report.verdict]


def _partial_message(version: str, record: Record | None) -> str:
    if record is None:
        return (
            f"Part of our text is in this vLLM {version} without our record. Run apply_all.py --revert, which takes "
            "out what it recognises, or reinstall vLLM; then apply again."
        )
    if is_newer(record):
        return (
            f"A newer version of this tool ({record.tool}) patched this vLLM {version}; this is {__version__}. Use the "
            "newer one, or run apply_all.py --revert, then apply again."
        )
    moved = ""
    if release(record.version) != release(version):
        moved = f"This tree was vLLM {record.version} when it was patched and is {version} now. "
    return (
        f"{moved}Part of this tree is not as this tool left it; applying never repairs that. Run apply_all.py --revert "
        "(with --force to discard what others edited), then apply again."
    )
