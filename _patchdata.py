"""What a patch is, and what makes one unfit before it has met a tree."""

import ast
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from _patchtext import Problem, Read, hits, parsed_pattern, sha256, syntax_error

# Our record and the originals it keeps, inside the tree so that they travel with it.
HOME = "vllm/_dflash2_patch"


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
class Sign:
    """Syntax that shows a feature: `pattern` occurs in `scope` of `file`.

    `pattern` is Python. `_` stands for any expression, `...` for any further arguments or body.
    A pattern that is a definition (`def f(...): ...`, `class C: ...`) means one directly in that scope.
    Anything else may be anywhere below it. `{"key": _, ...}` is a dict with that entry, and a bare
    name is also found as a parameter.
    """

    file: str
    scope: str
    pattern: str


@dataclass(frozen=True)
class Patch:
    """One seam. `shipped` holds alternatives; each is a tuple of signs that must all be there.

    core     part of the port itself; a further fix (False) is MISSING where a release ships the
             port without it, and is then never applied
    defines  (file, dotted name) of every definition that exists exactly once afterwards
    """

    name: str
    why: str
    upstream: str
    shipped_in: str | None
    drop: str
    hunks: tuple[Hunk, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    shipped: tuple[tuple[Sign, ...], ...] = ()
    core: bool = True


@dataclass(frozen=True)
class PatchSet:
    """Everything one version of this tool puts into a tree, checked for faults by `load`.

    files    destination -> bytes of each installed file
    folders  row name (the source's folder) -> its destinations
    digest   changes whenever a byte that would be written changes
    """

    patches: tuple[Patch, ...]
    files: dict[str, bytes]
    folders: dict[str, tuple[str, ...]]
    digest: str

    def hunks(self, file: str | None = None) -> list[Hunk]:
        """All hunks, or those of one file."""
        return [hunk for patch in self.patches for hunk in patch.hunks if file in (None, hunk.file)]


def load(patches: Iterable[Patch], installed: Mapping[str, str], source: Read) -> PatchSet:
    """Check our own data before it meets a tree; Problem names the patch or file at fault.

    installed  source -> destination
    source     reads a path below this repo
    """
    patches = tuple(patches)
    for name, count in Counter(patch.name for patch in patches).items():
        if count > 1:
            raise Problem(f"patch {name}: {count} patches have this name")
    for patch in patches:
        if fault := patch_fault(patch):
            raise Problem(f"patch {patch.name}: {fault}")
    if fault := _overlap_fault(patches):
        raise Problem(fault)
    files = _installed_files(patches, installed, source)
    folders: dict[str, tuple[str, ...]] = {}
    for path, destination in installed.items():
        row = path.rpartition("/")[0] + "/"
        folders[row] = (*folders.get(row, ()), destination)
    return PatchSet(patches, files, folders, _digest(patches, files))


def _digest(patches: tuple[Patch, ...], files: dict[str, bytes]) -> str:
    hunks = [(patch.name, hunk.file, hunk.scope, hunk.old, hunk.new) for patch in patches for hunk in patch.hunks]
    texts = sorted((path, sha256(data)) for path, data in files.items())
    return sha256(json.dumps([hunks, texts]).encode())


def _installed_files(patches, installed: Mapping[str, str], source: Read) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    patched = {hunk.file for patch in patches for hunk in patch.hunks}
    for path, destination in installed.items():
        data = source(path)
        if data is None:
            raise Problem(f"{path}: INSTALLED names it, but this copy of the tool has no such file")
        if fault := path_fault(destination):
            raise Problem(f"{path}: {fault}")
        if destination in files or destination in patched:
            raise Problem(f"{path}: {destination} is written twice")
        if destination.endswith(".py"):
            # A checkout with CRLF endings must install the same bytes as any other.
            data = data.replace(b"\r\n", b"\n")
            if error := syntax_error(data.decode("utf-8", "replace")):
                raise Problem(f"{path}: not Python ({error})")
        files[destination] = data
    return files


def path_fault(path: str) -> str | None:
    """Why a path cannot be a file or folder of vLLM's that we touch, or None."""
    parts = path.split("/")
    if not path.isprintable():
        return f"{path!r} is not a path"
    if parts[0] != "vllm" or len(parts) < 2 or {"", ".", ".."} & set(parts) or path.startswith(HOME + "/"):
        return f"{path} is not a path below vllm/"
    return None


def patch_fault(patch: Patch) -> str | None:
    """What is wrong with a patch whatever the tree, or None."""
    if not re.fullmatch(r"[\w.-]+", patch.name):
        return "its name must be one word"
    for number, hunk in enumerate(patch.hunks, 1):
        if fault := _hunk_fault(hunk):
            return f"hunk {number} of {hunk.file}: {fault}"
    for file, name in patch.defines:
        if fault := path_fault(file) or _scope_fault(name, allow_empty=False):
            return f"defines: {fault}"
    for sign in (sign for signs in patch.shipped for sign in signs):
        if fault := path_fault(sign.file) or _scope_fault(sign.scope) or _pattern_fault(sign.pattern):
            return f"sign {sign.pattern!r}: {fault}"
    if () in patch.shipped:
        return "shipped holds an empty alternative, which is always true"
    return None


def _hunk_fault(hunk: Hunk) -> str | None:
    if fault := path_fault(hunk.file) or _scope_fault(hunk.scope):
        return fault
    if not hunk.old.strip():
        return "old text is empty"
    if not hunk.new.strip():
        return "new text is empty; to delete lines, keep a neighbouring one in both texts"
    if hunk.old == hunk.new:
        return "old and new text are equal"
    if not hunk.old.endswith("\n") or not hunk.new.endswith("\n"):
        return "old and new text must be whole lines, the last one ended too"
    kinds = python_parts(hunk.old)
    if kinds and not kinds & python_parts(hunk.new):
        return "the result is not Python"
    return None


def _scope_fault(scope: str, allow_empty: bool = True) -> str | None:
    if (scope or not allow_empty) and not all(part.isidentifier() for part in scope.split(".")):
        return f"{scope!r} is not a dotted name"
    return None


def _pattern_fault(pattern: str) -> str | None:
    try:
        parsed_pattern(pattern)
    except (SyntaxError, ValueError) as error:
        return f"the pattern is not one statement or expression of Python ({error})"
    return None


def _overlap_fault(patches: tuple[Patch, ...]) -> str | None:
    hunks = [(patch, number, hunk) for patch in patches for number, hunk in enumerate(patch.hunks, 1)]
    for (first, i, one), (second, j, other) in combinations(hunks, 2):
        if one.file == other.file and one.scope == other.scope and _overlap(one.old, other.old):
            return f"patch {second.name}: hunk {j} overlaps hunk {i} of patch {first.name} in {one.file}"
    return None


def _overlap(one: str, other: str) -> bool:
    """Two texts that each occur once in a scope cannot both be replaced if one holds or continues the other."""
    if hits(one, other) or hits(other, one):
        return True
    for first, second in ((one, other), (other, one)):
        lines = first.splitlines(keepends=True)
        tails = ("".join(lines[i:]) for i in range(1, len(lines)))
        if any(re.search(r"\w", tail) and second.startswith(tail) for tail in tails):
            return True
    return False


# What a hunk's text may be cut from, by whether it leaves a bracket open: statements, a header or the rest of a
# block, arguments, a literal.
_SURROUNDINGS = {
    "balanced": (
        ("", ""),
        ("", "pass"),
        ("if _:\n pass\n", ""),
        ("if _:\n pass\n", "pass"),
        ("try:\n pass\n", ""),
        ("try:\n pass\n", "pass"),
        ("(\n", "\n)"),
        ("_(\n", "\n)"),
        ("[\n", "\n]"),
        ("{\n", "\n}"),
        ("from _ import (\n", "\n)"),
        ("def _(\n", "\n): pass"),
        ("", "\ndef _(): pass"),
    ),
    "opens": (("", ")"), ("", "]"), ("", "}"), ("", "): pass")),
    "closes": (("(", ""), ("_(", ""), ("[", ""), ("{", ""), ("def _(", ""), ("def _(", "pass")),
}


def python_parts(text: str) -> set[str]:
    """As what kinds of a part of Python these whole lines, cut from a file, can be read; may be none."""
    text = textwrap.dedent(text)
    indents = [len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()]
    opened = "".join(" " * indent + "if _:\n" for indent in sorted({i for i in indents if i < indents[0]}))
    inner = " " * (indents[-1] + 1)

    def parses(before: str, after: str) -> bool:
        after = inner + after if after == "pass" else after
        return any(syntax_error(before + block + text + after, ast.parse) is None for block in {opened, ""})

    return {kind for kind, around in _SURROUNDINGS.items() if any(parses(*pair) for pair in around)}
