"""The patch tool's core: what state a tree is in, and what would be written.

Text in, verdict out. A tree is reached only through a function that maps a path to bytes, so a
site-packages folder, a wheel on an index, a checkout and a git tag are all judged alike, and nothing
here can write. `_tree.py` holds the half that touches a disk.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from _patchdata import HOME, Hunk, Patch, PatchSet, Sign, load, path_fault
from _patchtext import (
    EXIT_CODES,
    Problem,
    Read,
    decode,
    difference,
    edit,
    has_sign,
    hits,
    missing_imports,
    nearest,
    outline,
    places,
    scope_lines,
    sha256,
    syntax_error,
)

__all__ = ["Hunk", "Patch", "PatchSet", "Problem", "Read", "Report", "Row", "Sign", "load", "survey"]

SUPPORTED = ("0.27.0", "0.27.1")
STATES = ("DRIFT", "PARTIAL", "OUTDATED", "APPLY", "NOOP", "SHIPPED", "MISSING")  # the worst first
RECORD = f"{HOME}/record.json"

EDITED = "edited by someone else"


@dataclass(frozen=True)
class Row:
    """The state of one patch, or of the installed files that come from one folder."""

    name: str
    state: str
    files: tuple[str, ...]
    detail: str
    shipped_in: str | None


@dataclass(frozen=True)
class Report:
    """What was found in a tree. `exit_code` is what `--check` exits with.

    changes  path -> bytes that it would hold, None for a file that would go; empty unless the
             verdict is APPLY, or OUTDATED, where they are relative to the kept originals
    """

    verdict: str
    exit_code: int
    version: str
    patches: tuple[Row, ...]
    message: str
    changes: dict[str, bytes | None] = field(default_factory=dict)

    @property
    def applies(self) -> tuple[str, ...]:
        """Names of the rows whose text is in the tree once the report's changes are made."""
        return tuple(row.name for row in self.patches if row.state in ("APPLY", "OUTDATED", "NOOP"))

    def as_json(self) -> dict:
        """The object that `--json` prints for one tree."""
        rows = [{**vars(row), "files": list(row.files)} for row in self.patches]
        return tree_object(self.verdict, self.exit_code, self.version, self.message, rows)


def tree_object(
    verdict: str | None, exit_code: int, version: str | None, message: str, rows: Iterable[dict] = ()
) -> dict:
    """What `--json` prints for one tree, also for one that could not be judged."""
    found = {"verdict": verdict, "exit_code": exit_code, "version": version, "message": message}
    return {**found, "patches": list(rows)}


# The record that a patched tree carries.


@dataclass(frozen=True)
class Record:
    """What was done to a tree.

    digest   of the patch set that did it
    patches  names of the patches that were applied
    files    path -> (sha256 before, sha256 after); before is None for a file that we added
    folders  that we made, the outer ones first
    wheel    path of the RECORD file that was brought up to date, or None
    """

    digest: str
    version: str
    patches: tuple[str, ...]
    files: dict[str, tuple[str | None, str]]
    folders: tuple[str, ...] = ()
    wheel: str | None = None

    def dump(self) -> bytes:
        return json.dumps({"format": 1, **vars(self)}, indent=1).encode()


def read_record(read: Read) -> Record | None:
    """The record in a tree, None where there is none; Problem where it is not one of ours."""
    data = read(RECORD)
    if data is None:
        return None
    try:
        given = json.loads(data)
        if given.pop("format") != 1:
            raise ValueError("of another format")
        files = {path: (before, after) for path, (before, after) in given.pop("files").items()}
        record = Record(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}, files=files)
        if fault := _record_fault(record):
            raise ValueError(fault)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Problem(f"{RECORD} is damaged ({error}): reinstall vLLM, then apply again", "PARTIAL") from None
    return record


def _record_fault(record: Record) -> str | None:
    """What cannot be ours in a record: revert writes and removes what it names."""
    hashes = [entry for pair in record.files.values() for entry in pair if entry is not None]
    if not all(isinstance(text, str) for text in (record.digest, record.version, *record.patches, *hashes)):
        return "a value is not text"
    for path in (*record.files, *(folder for folder in record.folders if not _is_home(folder))):
        if fault := path_fault(path):
            return fault
    if not record.files:
        return "it names no file"
    wheel = record.wheel or "_.dist-info/RECORD"
    if not re.fullmatch(r"[^/\0]+\.dist-info/RECORD", wheel):
        return f"{wheel} is not the RECORD of a wheel"
    return None


def _is_home(folder: str) -> bool:
    return (folder + "/").startswith(HOME + "/") and ".." not in folder.split("/")


def kept(path: str) -> str:
    """Where the original of a changed file is kept. The suffix keeps it from being imported or compiled."""
    return f"{HOME}/originals/{path}.orig"


def original(read: Read, record: Record, path: str) -> bytes | None:
    """The bytes that a recorded file had before us, None where there was none; Problem if they are lost."""
    before, _ = record.files[path]
    if before is None:
        return None
    data = read(kept(path))
    if data is None or sha256(data) != before:
        raise Problem(f"{kept(path)} is missing or damaged, so {path} cannot be restored: reinstall vLLM", "PARTIAL")
    return data


def edited(read: Read, record: Record) -> list[str]:
    """Recorded files that hold neither what they held before us nor what we wrote."""
    found = {path: read(path) for path in record.files}
    return [path for path, data in found.items() if sha256(data) not in record.files[path]]


# The verdict on a tree.


def survey(read: Read, version: str, patch_set: PatchSet) -> Report:
    """Judge a tree and plan what applying would write. Pure: nothing is written.

    read     path below site-packages -> bytes, None where there is no such file; what it raises passes through
    version  of the vLLM in the tree, "0.27.1" or "0.27.1+rocm"
    Raises Problem if the tree's record is damaged or of another vLLM, or if our patches overlap in the tree.
    """
    read = _once(read)
    record = read_record(read)
    if record and record.version.split("+")[0] != version.split("+")[0]:
        raise Problem(
            f"this tree was vLLM {record.version} when it was patched and is {version} now, without having been "
            "uninstalled in between: remove it whole and install it again",
            "PARTIAL",
        )
    if record and record.digest != patch_set.digest:
        return _survey_outdated(read, version, patch_set, record)
    rows, ships = _judge(read, patch_set, record)
    supported = version.split("+")[0] in SUPPORTED
    if not supported and not ships:
        rows = [_unsupported(row, version) for row in rows]
    if supported and ships:
        rows = [_foreign(row, version) for row in rows]
    verdict = overall(row.state for row in rows)
    changes = {}
    if verdict == "APPLY":
        changes, faults = _plan(read, patch_set, [row.name for row in rows if row.state == "APPLY"])
        rows = [_drifted(row, faults[row.name]) if row.name in faults else row for row in rows]
        verdict = overall(row.state for row in rows)
    message = _message(verdict, version, rows, supported or ships, record is not None)
    return Report(verdict, EXIT_CODES[verdict], version, tuple(rows), message, {} if verdict == "DRIFT" else changes)


def overall(states: Iterable[str]) -> str:
    """The worst state wins. MISSING changes nothing; APPLY beside NOOP means that part of it is there."""
    found = set(states) - {"MISSING"}
    if {"APPLY", "NOOP"} <= found:
        found.add("PARTIAL")
    return min(found, key=STATES.index, default="SHIPPED")


def _once(read: Read) -> Read:
    """The tree as it was when each file was first asked for, so that one survey judges one state."""
    seen: dict[str, bytes | None] = {}

    def reading(path: str) -> bytes | None:
        if path not in seen:
            seen[path] = read(path)
        return seen[path]

    return reading


def _text(read: Read, path: str) -> str | None:
    data = read(path)
    return None if data is None else decode(data)


def _drifted(row: Row, detail: str) -> Row:
    return replace(row, state="DRIFT", detail=detail)


def _unsupported(row: Row, version: str) -> Row:
    if row.state != "APPLY":
        return row
    return _drifted(row, f"not applied: vLLM {version} is not {' or '.join(SUPPORTED)}")


def _foreign(row: Row, version: str) -> Row:
    """No 0.27 release ships the port: without a record it is somebody's patch, or an old one of ours."""
    if row.state != "SHIPPED":
        return row
    return replace(row, state="PARTIAL", detail=f"vLLM {version} does not ship this: someone patched it in")


def _judge(read: Read, patch_set: PatchSet, record: Record | None) -> tuple[list[Row], bool]:
    """The rows, and whether this release ships the port itself."""
    applied = set(record.patches) if record else set()
    # Text that we inserted is no sign that upstream has a feature: only a text without ours is asked.
    before = _before_us(read, record) if record else read
    ours = not record and _mostly_ours(read, patch_set)
    shipped = {p.name for p in patch_set.patches if not ours and p.name not in applied and ships(before, p)}
    core = {p.name for p in patch_set.patches if p.core}
    if not record and core and core <= shipped and any(read(path) is not None for path in patch_set.files):
        return _shipping_rows(read, patch_set, shipped), True
    folders = [_folder_row(read, patch_set, name, record) for name in patch_set.folders]
    installed = overall(row.state for row in folders) if folders else "NOOP"
    rows = []
    for patch in patch_set.patches:
        if patch.name in shipped and not _half_done(read, patch):
            rows.append(_row(patch, "SHIPPED", _upstream(patch)))
        elif not patch.hunks:
            rows.append(_row(patch, installed, patch.why))
        else:
            rows.append(_patch_row(read, patch_set, patch, record if patch.name in applied else None))
    return rows + folders, False


def ships(read: Read, patch: Patch) -> bool:
    """Whether all signs of one of the patch's alternatives are in the tree."""
    return any(all(_has(read, sign) for sign in signs) for signs in patch.shipped)


def _has(read: Read, sign: Sign) -> bool:
    text = _text(read, sign.file)
    return text is not None and has_sign(text, sign.scope, sign.pattern)


def _mostly_ours(read: Read, patch_set: PatchSet) -> bool:
    """Without a record: a line or two may be the same upstream, most of our text is not."""
    hunks = patch_set.hunks()
    found = [hunk for hunk in hunks if hits(_text(read, hunk.file) or "", hunk.new)]
    return len(found) * 2 > len(hunks)


def _half_done(read: Read, patch: Patch) -> bool:
    """Whether a part of our text was put there by hand: the signs may lie in that part, and the rest is missing."""
    found = [bool(hits(_text(read, hunk.file) or "", hunk.new)) for hunk in patch.hunks]
    return any(found) and not all(found)


def _before_us(read: Read, record: Record) -> Read:
    """The tree as it was before us."""
    return _once(lambda path: original(read, record, path) if path in record.files else read(path))


def _shipping_rows(read: Read, patch_set: PatchSet, shipped: set[str]) -> list[Row]:
    rows = []
    for patch in patch_set.patches:
        if patch.name in shipped:
            rows.append(_row(patch, "SHIPPED", _upstream(patch)))
        else:
            rows.append(_row(patch, "MISSING", f"this release lacks it: {patch.why}"))
    for name, files in patch_set.folders.items():
        if any(read(path) is not None for path in files):
            rows.append(Row(name, "SHIPPED", files, "upstream's own modules", None))
        else:
            rows.append(Row(name, "MISSING", files, "this release has no such modules", None))
    return rows


def _upstream(patch: Patch) -> str:
    return f"upstream has it since {patch.shipped_in}" if patch.shipped_in else "upstream has it"


def _row(patch: Patch, state: str, detail: str) -> Row:
    files = tuple(dict.fromkeys(hunk.file for hunk in patch.hunks))
    return Row(patch.name, state, files, detail, patch.shipped_in)


def _folder_row(read: Read, patch_set: PatchSet, name: str, record: Record | None) -> Row:
    files = patch_set.folders[name]
    findings = [_file_finding(read(path), patch_set.files[path], path, record) for path in files]
    state, detail = _together(findings)
    return Row(name, state, files, detail or f"{len(files)} files of our own", None)


def _file_finding(data: bytes | None, wanted: bytes, path: str, record: Record | None) -> tuple[str, str]:
    if data == wanted:
        return "NOOP", ""
    if data is None:
        return ("PARTIAL", f"{path}: missing, removed by someone else") if record else ("APPLY", "")
    return "PARTIAL", f"{path}: {EDITED}" if record else f"{path}: a file that is not ours is in the way"


def _patch_row(read: Read, patch_set: PatchSet, patch: Patch, record: Record | None) -> Row:
    """`record` says that the patch was applied, None that it was not or that nobody knows."""
    files = {hunk.file for hunk in patch.hunks}
    if record and all(sha256(read(path)) == record.files.get(path, (None, ""))[1] for path in files):
        return _row(patch, "NOOP", patch.why)
    findings = []
    for number, hunk in enumerate(patch.hunks, 1):
        text, beside = _text(read, hunk.file), patch_set.hunks(hunk.file)
        state, detail = judge(text, hunk, beside, record is not None)
        where = f"{hunk.file}: hunk {number} of {patch.name}, in {hunk.scope or 'the top level'}: "
        findings.append((state, where + detail))
    state, detail = _together(findings)
    if state == "NOOP" and (fault := _definition_fault(read, patch)):
        state, detail = "PARTIAL", fault
    return _row(patch, state, detail or patch.why)


def _together(findings: list[tuple[str, str]]) -> tuple[str, str]:
    """One state for several: what is lost beside text of ours was ours, so it is PARTIAL and not DRIFT."""
    states = {state for state, _ in findings}
    worst = min(states, key=STATES.index)
    if len(states) > 1 and ({"NOOP", "PARTIAL"} & states):
        details = [detail for state, detail in findings if state != "NOOP"]
        return "PARTIAL", "\n".join(details)
    details = [detail for state, detail in findings if state == worst]
    return worst, "" if worst in ("APPLY", "NOOP") else "\n".join(details)


def judge(text: str | None, hunk: Hunk, beside: Iterable[Hunk] = (), applied: bool = False) -> tuple[str, str]:
    """(NOOP, APPLY, PARTIAL or DRIFT, why) of one hunk in a file's text, which is None where there is no text.

    beside   the hunks of the same file; their new text may hold what this one looks for
    applied  the record says that the new text was put there
    """
    lost = "PARTIAL" if applied else "DRIFT"
    if text is None:
        return lost, "the file is missing or not UTF-8"
    try:
        if hunk.scope and len(outline(text).get(hunk.scope, ())) != 1:
            return lost, _scope_count(text, hunk.scope) + difference(text, hunk.scope, hunk.old)
        old, new = _old_and_new(text, hunk, beside)
    except Problem as error:
        if error.verdict is None:
            raise
        return lost, str(error)
    if len(new) == 1 and not old:
        return "NOOP", "the new text is there"
    if applied and len(old) == 1 and not new:
        return "PARTIAL", "the original text is back"
    if applied:
        return "PARTIAL", EDITED + difference(text, hunk.scope, hunk.new)
    if len(old) == 1 and not new:
        if _traces(text, hunk):
            return "PARTIAL", f"{EDITED}, or some of the new text is there already"
        return "APPLY", "the old text is there"
    if old or new:
        return "PARTIAL" if new else "DRIFT", f"the old text is there {len(old)} times, the new text {len(new)} times"
    if nearest(text, "", hunk.new)[0] > nearest(text, "", hunk.old)[0]:
        return "PARTIAL", EDITED + difference(text, hunk.scope, hunk.new)
    return "DRIFT", "the text to replace is not there" + difference(text, hunk.scope, hunk.old)


def _old_and_new(text: str, hunk: Hunk, beside: Iterable[Hunk]) -> tuple[list[int], list[int]]:
    """Where the old and the new text are, each without the places where it is only a part of longer text of ours."""
    old = [(at, hunk.old) for at in places(text, hunk.scope, hunk.old)]
    new = [(at, hunk.new) for at in places(text, hunk.scope, hunk.new)]
    longer = {other.new for other in beside if hits(other.new, hunk.old) or hits(other.new, hunk.new)}
    longer |= {hunk.old, hunk.new}
    covers = [(at, lines) for lines in longer for at in hits(text, lines)]

    def free(found: list[tuple[int, str]]) -> list[int]:
        return [at for at, lines in found if not any(_within((at, lines), cover) for cover in covers)]

    return free(old), free(new)


def _within(inner: tuple[int, str], outer: tuple[int, str]) -> bool:
    (at, lines), (start, around) = inner, outer
    size, room = lines.count("\n"), around.count("\n")
    return size < room and start <= at and at + size <= start + room


def _scope_count(text: str, scope: str) -> str:
    count = len(outline(text).get(scope, ()))
    return f"{scope} is defined {count} times" if count else f"there is no {scope}"


def _traces(text: str, hunk: Hunk) -> bool:
    """Whether most lines that the hunk adds are in its scope, though the new text as a whole is not."""
    old, there = set(hunk.old.splitlines()), set(scope_lines(text, hunk.scope)[1])
    added = [line for line in hunk.new.splitlines() if len(line.strip()) > 8 and line not in old]
    return bool(added) and sum(line in there for line in added) * 2 > len(added)


# The plan.


def _plan(read: Read, patch_set: PatchSet, names: list[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """(path -> bytes to write, row name -> what would be wrong with the result)."""
    patches = [patch for patch in patch_set.patches if patch.name in names]
    edits: dict[str, list[tuple[int, Hunk, Patch]]] = {}
    for patch in patches:
        for hunk in patch.hunks:
            (at,) = places(_text(read, hunk.file), hunk.scope, hunk.old)
            edits.setdefault(hunk.file, []).append((at, hunk, patch))
    changes = {}
    for path, located in edits.items():
        _refuse_overlaps(path, located)
        changes[path] = edit(read(path), [(at, hunk.old, hunk.new) for at, hunk, _ in located])
    for folder in names:
        changes |= {path: patch_set.files[path] for path in patch_set.folders.get(folder, ())}
    result = _over(read, changes)
    return changes, broken_promises(result, read, patch_set, names)


def _refuse_overlaps(path: str, located: list[tuple[int, Hunk, Patch]]) -> None:
    located.sort(key=lambda entry: entry[0])
    for (at, hunk, patch), (after, _, other) in zip(located, located[1:]):
        if at + hunk.old.count("\n") > after:
            raise Problem(f"patch {other.name}: a hunk overlaps one of patch {patch.name} at {path}:{after + 1}")


def _over(read: Read, changes: Mapping[str, bytes | None]) -> Read:
    return lambda path: changes[path] if path in changes else read(path)


def broken_promises(read: Read, before: Read, patch_set: PatchSet, names: Iterable[str]) -> dict[str, str]:
    """Row name -> what is wrong in a patched tree; empty when every promise of the named rows is kept.

    Every result parses, every hunk is recognised again, every promised definition is there once, every
    vLLM import of ours resolves, every installed file is ours.
    """
    names = set(names)
    faults = {}
    for patch in patch_set.patches:
        if patch.name in names and (fault := _patch_promise(read, before, patch_set, patch)):
            faults[patch.name] = fault
    for folder, paths in patch_set.folders.items():
        if folder in names and (fault := _folder_promise(read, patch_set, paths)):
            faults[folder] = fault
    return faults


def _patch_promise(read: Read, before: Read, patch_set: PatchSet, patch: Patch) -> str | None:
    for path in dict.fromkeys(hunk.file for hunk in patch.hunks):
        text = _text(read, path)
        if text is None or (error := syntax_error(text)):
            return f"{path}: the result is not Python ({error})"
        lacking = missing_imports(read, path, _text(before, path), text)
        ours = "".join(hunk.new for hunk in patch.hunks if hunk.file == path)
        lacking = [line for line in lacking if line.split()[-1].split(".")[-1] in ours]
        if lacking:
            return f"{path}: this vLLM has no: {', '.join(lacking)}"
    for number, hunk in enumerate(patch.hunks, 1):
        state, detail = judge(_text(read, hunk.file), hunk, patch_set.hunks(hunk.file))
        if state != "NOOP":
            return f"{hunk.file}: hunk {number} of {patch.name} is not recognised once applied: {detail}"
    return _definition_fault(read, patch)


def _definition_fault(read: Read, patch: Patch) -> str | None:
    for path, name in patch.defines:
        text = _text(read, path)
        count = len(outline(text).get(name, ())) if text is not None else 0
        if count != 1:
            return f"{path}: {name} is defined {count} times, not once"
    return None


def _folder_promise(read: Read, patch_set: PatchSet, paths: Iterable[str]) -> str | None:
    for path in paths:
        if read(path) != patch_set.files[path]:
            return f"{path}: not the bytes that were installed"
        if path.endswith(".py") and (lacking := missing_imports(read, path, None, _text(read, path) or "")):
            return f"{path}: this vLLM has no: {', '.join(lacking)}"
    return None


def outcome_fault(read: Read, planned: Report, patch_set: PatchSet) -> tuple[Report, str | None]:
    """(report on the tree after writing, what is not as it was promised or None)."""
    read = _once(read)
    wrong = [path for path, data in planned.changes.items() if read(path) != data]
    report = survey(read, planned.version, patch_set)
    if wrong:
        return report, f"after writing, these do not hold what was written: {', '.join(wrong)}"
    record = read_record(read)
    before = _before_us(read, record) if record else read
    faults = broken_promises(read, before, patch_set, planned.applies)
    if faults or report.verdict not in ("NOOP", "SHIPPED"):
        return report, "after writing: " + ("; ".join(faults.values()) or report.message)
    return report, None


# A tree that an older version of this tool has patched.


def _survey_outdated(read: Read, version: str, patch_set: PatchSet, record: Record) -> Report:
    lost = edited(read, record)
    originals = {path: original(read, record, path) for path in record.files}
    base = _over(read, {**originals, RECORD: None})
    report = survey(base, version, patch_set)
    wanted = {**originals, **report.changes}
    same = all(read(path) == data for path, data in wanted.items())
    rows = [_outdated_row(read, row, wanted, lost, record) for row in report.patches]
    verdict = overall(row.state for row in rows)
    if verdict in ("OUTDATED", "APPLY", "NOOP", "SHIPPED"):
        verdict = "PARTIAL" if lost else "NOOP" if same else "OUTDATED"
    message = _message(verdict, version, rows, True, True)
    if lost:
        message = f"{', '.join(lost)}: {EDITED} since an older version of this tool was applied. " + message
    changes = report.changes if verdict == "OUTDATED" else {}
    return Report(verdict, EXIT_CODES[verdict], version, tuple(rows), message, changes)


def _outdated_row(read: Read, row: Row, wanted: Mapping, lost: list[str], record: Record) -> Row:
    if row.state not in ("APPLY", "NOOP"):
        return row
    if hit := [path for path in row.files if path in lost]:
        return replace(row, state="PARTIAL", detail=f"{', '.join(hit)}: {EDITED}")
    if all(read(path) == wanted[path] for path in row.files if path in wanted):
        return replace(row, state="NOOP")
    return replace(row, state="OUTDATED", detail="an older version of this tool was applied")


def _message(verdict: str, version: str, rows: list[Row], known: bool, recorded: bool) -> str:
    def named(*states: str) -> str:
        return ", ".join(row.name for row in rows if row.state in states)

    if not known and verdict == "DRIFT":
        return (
            f"vLLM {version} is not supported: the patches fit {' and '.join(SUPPORTED)}, and releases from 0.28.0 on "
            "ship DFlash2 themselves. Nothing is written."
        )
    if verdict == "PARTIAL" and recorded:
        return (
            "Part of this tree is not as this tool left it; applying never repairs that. Run apply_all.py --revert "
            "(with --force to discard what others edited), then apply again."
        )
    lacks = named("MISSING")
    return {
        "DRIFT": f"vLLM {version} differs from what these expect: {named('DRIFT')}. Nothing is written.",
        "PARTIAL": f"Part of our text is in this vLLM {version} without our record, so there is nothing that --revert "
        "could restore: reinstall vLLM, then apply again.",
        "OUTDATED": f"An older version of this tool patched this vLLM {version}; applying restores the originals and "
        "applies this version.",
        "APPLY": f"vLLM {version} can be patched.",
        "NOOP": f"vLLM {version} is patched; there is nothing to do.",
        "SHIPPED": f"vLLM {version} ships DFlash2 itself; there is nothing to apply."
        + (f" It lacks these further fixes: {lacks}." if lacks else ""),
    }[verdict]
