"""The patches themselves, which are data: what no run of the tool needs to ask again."""

import ast
import itertools
import re
import textwrap
from dataclasses import replace

import libcst
import pytest

from _patchlib import Hunk, Marker, Patch
from _source import find_lines, has_marker
from patches import PATCHES
from tests.tool.patching import OURS, targets

# What a hunk's text may be cut from: statements, the rest of a block, a header, arguments, a literal.
BALANCED = [
    ("", ""),
    ("", "pass"),
    ("if _:\n pass\n", ""),
    ("if _:\n pass\n", "pass"),
    ("try:\n pass\n", ""),
    ("try:\n pass\n", "pass"),
    ("(\n", "\n)"),
    ("_(\n", "\n)"),
    ("{\n", "\n}"),
    ("from _ import (\n", "\n)"),
    ("def _(\n", "\n): pass"),
    ("", "\ndef _(): pass"),
]
OPENS = [("", ")"), ("", "]"), ("", "}"), ("", "): pass")]
CLOSES = [("(", ""), ("_(", ""), ("[", ""), ("{", ""), ("def _(", ""), ("def _(", "pass")]
SURROUNDINGS = {"balanced": BALANCED, "opens": OPENS, "closes": CLOSES}


def parses(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def python_parts(text):
    """As what kinds of a part of Python these whole lines, cut from a file, can be read; may be none."""
    text = textwrap.dedent(text)
    indents = [len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()]
    opened = "".join(" " * indent + "if _:\n" for indent in sorted({i for i in indents if i < indents[0]}))
    inner = " " * (indents[-1] + 1)

    def fits(before, after):
        after = inner + after if after == "pass" else after
        return any(parses(before + block + text + after) for block in {opened, ""})

    return {kind for kind, around in SURROUNDINGS.items() if any(fits(*pair) for pair in around)}


@pytest.mark.parametrize(
    "text, kinds",
    [
        ("x = 1\n", {"balanced"}),
        ("        x = 1\n    y = 2\n", {"balanced"}),
        ("    def f(self):\n", {"balanced"}),
        ("    elif x:\n", {"balanced"}),
        ("    except ValueError:\n        pass\n", {"balanced"}),
        ("    x,\n    y=1,\n", {"balanced"}),
        ('    "a": 1,\n', {"balanced"}),
        ("    @decorated\n", {"balanced"}),
        ("    a as b,\n", {"balanced"}),
        ("    x = f(\n", {"opens"}),
        ("    x=1,\n)\n", {"closes"}),
        ("    def f(:\n", set()),
        ("    x = = 1\n", set()),
        ("    x y\n", set()),
    ],
)
def test_parts_of_python(text, kinds):
    assert python_parts(text) == kinds


def overlap(one, other):
    """Two texts that each occur once in a scope cannot both be replaced if one holds or continues the other."""
    if find_lines(one, other) or find_lines(other, one):
        return True
    for first, second in ((one, other), (other, one)):
        lines = first.splitlines(keepends=True)
        tails = ("".join(lines[i:]) for i in range(1, len(lines)))
        if any(re.search(r"\w", tail) and second.startswith(tail) for tail in tails):
            return True
    return False


def dotted(name):
    return all(part.isidentifier() for part in name.split("."))


def faults(patches):
    """What is wrong with patches whatever the tree."""
    for patch in patches:
        if not patch.why or "\n" in patch.why:
            yield f"{patch.name}: why is one line"
        if () in patch.shipped:
            yield f"{patch.name}: an empty alternative is always true"
        for marker in (marker for markers in patch.shipped for marker in markers):
            if (marker.scope and not dotted(marker.scope)) or not marker.text.strip():
                yield f"{patch.name}: {marker} is no marker"
        for file, name in patch.defines:
            if not dotted(name) or file not in {hunk.file for hunk in patch.hunks}:
                yield f"{patch.name}: {file} does not get {name}"
        for number, hunk in enumerate(patch.hunks, 1):
            for fault in hunk_faults(hunk):
                yield f"{patch.name}: hunk {number}: {fault}"
    hunks = [(patch.name, number, hunk) for patch in patches for number, hunk in enumerate(patch.hunks, 1)]
    for (first, i, one), (second, j, other) in itertools.combinations(hunks, 2):
        if (one.file, one.scope) == (other.file, other.scope) and overlap(one.old, other.old):
            yield f"{second}: hunk {j} overlaps hunk {i} of {first}"


def hunk_faults(hunk):
    if hunk.scope and not dotted(hunk.scope):
        yield "the scope is not a dotted name"
    if not hunk.old.strip() or not hunk.new.strip():
        yield "a text is empty"
    elif hunk.old == hunk.new:
        yield "old and new text are equal"
    elif not (hunk.old.endswith("\n") and hunk.new.endswith("\n")):
        yield "not whole lines"
    elif (kinds := python_parts(hunk.old)) and not kinds & python_parts(hunk.new):
        yield "not Python"


def test_the_patches_have_no_fault():
    assert list(faults(PATCHES)) == []


GOOD = Hunk("vllm/a.py", "f", "    return 1\n", "    return 2\n")


def patch(*hunks, name="mine", **more):
    return Patch(name, "why", "upstream", None, hunks=hunks, **more)


@pytest.mark.parametrize(
    "patches, wanted",
    [
        ([patch(replace(GOOD, old=""))], "mine: hunk 1: a text is empty"),
        ([patch(replace(GOOD, old="  \n"))], "a text is empty"),
        ([patch(replace(GOOD, new=""))], "a text is empty"),
        ([patch(replace(GOOD, new=GOOD.old))], "old and new text are equal"),
        ([patch(replace(GOOD, old="return 1"))], "whole lines"),
        ([patch(replace(GOOD, new="    return (\n"))], "not Python"),
        ([patch(replace(GOOD, new="    def f(:\n        pass\n"))], "not Python"),
        ([patch(GOOD, GOOD)], "mine: hunk 2 overlaps hunk 1 of mine"),
        ([patch(GOOD), patch(GOOD, name="other")], "other: hunk 1 overlaps hunk 1 of mine"),
        ([patch(GOOD, replace(GOOD, old="    x = 1\n    return 1\n"))], "overlaps"),
        ([patch(replace(GOOD, old="    a()\n    b()\n"), replace(GOOD, old="    b()\n    c()\n"))], "overlaps"),
        ([patch(replace(GOOD, scope="f g"))], "not a dotted name"),
        ([patch(shipped=((),))], "always true"),
        ([patch(shipped=((Marker("vllm/a.py", "", " "),),))], "no marker"),
        ([patch(GOOD, defines=(("vllm/a.py", ""),))], "does not get"),
        ([patch(GOOD, defines=(("vllm/b.py", "f"),))], "does not get"),
    ],
)
def test_faults_are_found(patches, wanted):
    assert any(wanted in fault for fault in faults(patches)), list(faults(patches))


def test_what_is_installed_is_python():
    for path, data in OURS.files.items():
        ast.parse(data, path)
        assert b"\r" not in data


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch.shipped], ids=lambda patch: patch.name)
def test_no_marker_is_in_a_vllm_that_lacks_the_feature(template, patch):
    for markers in patch.shipped:
        assert not all(
            has_marker((template / marker.file).read_text(), marker.scope, marker.text)
            for marker in markers
            if (template / marker.file).exists()
        ), markers


# The edits are lossless: only what the hunks name differs


class Own(libcst.CSTTransformer):
    """`code`: dotted name of each class and function -> its text, in which inner ones are left out; "" is the rest."""

    def __init__(self):
        self.path, self.code = [], {}

    def visit_FunctionDef(self, node):
        self.path.append(node.name.value)

    def leave_FunctionDef(self, original, updated):
        self.code.setdefault(".".join(self.path), []).append(libcst.Module([updated]).code)
        self.path.pop()
        return libcst.RemoveFromParent()

    visit_ClassDef, leave_ClassDef = visit_FunctionDef, leave_FunctionDef

    def leave_Module(self, original, updated):
        self.code[""] = [updated.code]
        return updated


def own_code(path):
    text, found = path.read_text(), Own()
    module = libcst.parse_module(text)
    assert module.code == text
    module.visit(found)
    return found.code


@pytest.mark.parametrize("path", targets())
def test_nothing_but_the_hunks_scopes_differs(template, patched_template, path):
    before, after = own_code(template / path), own_code(patched_template / path)
    scopes = {hunk.scope for hunk in OURS.hunks(path)}
    differ = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not before.keys() - after.keys(), "no definition is lost"

    def named(name):
        """Inside a scope that a hunk names, or a new definition directly in one."""
        inside = any(name == scope or (scope and name.startswith(f"{scope}.")) for scope in scopes)
        return inside or (name not in before and name.rpartition(".")[0] in scopes)

    assert differ and [name for name in differ if not named(name)] == []
