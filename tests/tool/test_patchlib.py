"""The patch tool's pure core, as tables: text in, lines, states and text out."""

import textwrap

import pytest

import _patchlib
from _patchdata import python_parts
from _patchlib import Hunk, Patch, Sign
from _patchtext import (
    Problem,
    difference,
    edit,
    has_sign,
    hits,
    imports,
    missing_imports,
    outline,
    places,
    resolves,
)

TEXT = '''\
"""Doc."""
import os

LIMIT = 1
if os.name:
    LIMIT = 2


# about f
@decorated
def f(a, b=1):
    # first
    return a
    # last


class C(Base):
    """Doc."""

    size: int = 1

    def f(self):
        return a

        def g():
            return a

    # about h
    async def h(self): return a


try:
    def inner():
        pass
except ImportError:
    pass
'''


def test_outline():
    found = {name: [(span.start, span.body, span.end) for span in spans] for name, spans in outline(TEXT).items()}
    assert found == {
        "LIMIT": [(3, 4, 3), (5, 6, 5)],
        "f": [(6, 11, 14)],
        "C": [(14, 17, 29)],
        "C.size": [(19, 20, 19)],
        "C.f": [(20, 22, 26)],
        "C.f.g": [(23, 25, 26)],
        "C.h": [(26, 29, 29)],
        "inner": [(32, 33, 34)],
    }


@pytest.mark.parametrize(
    "text, names",
    [
        ("", set()),
        ("x = y = 1", {"x", "y"}),
        ("x: int", {"x"}),
        ("x.y = 1\nx[0] = 1\nx += 1", set()),
        ("def f(): x = 1", {"f", "f.x"}),
        ("\ufeffdef f(): pass\n", {"f"}),
        ("def f():\n\treturn 1\n\tx = 2", {"f", "f.x"}),
        ("def f():\n    '''\ndef g(): pass\n'''\n", {"f"}),
    ],
)
def test_outline_names(text, names):
    assert set(outline(text)) == names


def test_outline_of_what_is_not_python():
    with pytest.raises(Problem, match=r"not Python \(line 2\)") as refused:
        outline("x = 1\ndef f(:\n")
    assert refused.value.verdict == "DRIFT"


@pytest.mark.parametrize(
    "text, lines, found",
    [
        ("a\nb\na\n", "a\n", [0, 2]),
        ("a\nb\na", "a\n", [0, 2]),
        ("xa\nb\n", "a\n", []),
        ("    a\na\n", "a\n", [1]),
        ("a\na\na\n", "a\na\n", [0, 1]),
        ("", "a\n", []),
        ("a b\n", "a\n", []),
    ],
)
def test_hits_are_whole_lines(text, lines, found):
    assert hits(text, lines) == found


@pytest.mark.parametrize(
    "scope, lines, found",
    [
        ("f", "    return a\n", [12]),
        ("C", "        return a\n", [22]),
        ("C.f", "        return a\n", [22]),
        ("C.f.g", "            return a\n", [25]),
        ("C.f", "            return a\n", [25]),
        ("C.h", "        return a\n", []),
        ("C.h", "    async def h(self): return a\n", [28]),
        ("C.h", "    # about h\n", [27]),
        ("f", "    # last\n", [13]),
        ("f", "# about f\n", [8]),
        ("f", "    # last\n\n", []),
        ("", "    return a\n", []),
        ("", "import os\n", [1]),
        ("", "    LIMIT = 2\n", [5]),
        ("", "def f(a, b=1):\n", [10]),
        ("", "class C(Base):\n", [16]),
        ("", "    def f(self):\n", []),
    ],
)
def test_places_are_inside_the_scope(scope, lines, found):
    assert places(TEXT, scope, lines) == found


@pytest.mark.parametrize(
    "before, edits, after",
    [
        (b"a\nb\nc\n", [(1, "b\n", "x\ny\n")], b"a\nx\ny\nc\n"),
        (b"a\nb\nc", [(2, "c\n", "x\n")], b"a\nb\nx"),
        (b"a\r\nb\r\n", [(0, "a\n", "x\ny\n")], b"x\r\ny\r\nb\r\n"),
        (b"a\r\nb\nc\r\n", [(1, "b\n", "x\ny\n"), (0, "a\n", "z\n")], b"z\r\nx\ny\nc\r\n"),
        (b"a\nb\nc\nd\n", [(0, "a\n", "1\n2\n"), (2, "c\nd\n", "3\n")], b"1\n2\nb\n3\n"),
        (b"\xef\xbb\xbfa\nb\n", [(1, "b\n", "\u00e9\n")], b"\xef\xbb\xbfa\n\xc3\xa9\n"),
        (b"a\x0cb\nc\n", [(1, "c\n", "d\n")], b"a\x0cb\nd\n"),
    ],
)
def test_edit(before, edits, after):
    assert edit(before, edits) == after


SIGNS = '''\
from functools import cache, partial
import vllm.envs as envs

MODELS = {"A": ("a", "A"), "B": ("b", "B")}
SIZE: int = 3


def top(config, layer, *rest, flag=False, **more):
    """Doc."""
    if config is None:
        raise ValueError("no config")
    value = getattr(config, "is_causal", None)
    return helper(value, layer, flag=flag)[0].field


class C(Base, metaclass=M):
    cls: type = Layer

    def method(self, has_prefill):
        self.rows.fill_(-1)
        for row in self.rows:
            if row > 0 and not row.done:
                yield row

    if True:
        def hidden(self): ...
'''


@pytest.mark.parametrize(
    "scope, pattern, found",
    [
        ("top", 'getattr(config, "is_causal", _)', True),
        ("top", 'getattr(_, "is_causal", ...)', True),
        ("top", 'getattr(config, "is_causal")', False),
        ("top", 'getattr(config, "causal", _)', False),
        ("", 'getattr(config, "is_causal", _)', True),
        ("C", 'getattr(config, "is_causal", _)', False),
        ("nowhere", 'getattr(config, "is_causal", _)', False),
        ("top", "helper(...)", True),
        ("top", "helper(value, ...)", True),
        ("top", "helper(..., flag=_)", True),
        ("top", "helper(..., other=_)", False),
        ("top", "helper(value, layer)", False),
        ("top", "_.field", True),
        ("top", "helper", True),
        ("top", "value = _", True),
        ("top", "raise ValueError(...)", True),
        ("top", "flag", True),
        ("C.method", "has_prefill", True),
        ("top", "has_prefill", False),
        ("C.method", "self.rows.fill_(-1)", True),
        ("C.method", "self.rows.fill_(1)", False),
        ("C.method", "row > 0 and not row.done", True),
        ("C.method", "row > 0", True),
        ("C.method", "row < 0", False),
        ("C", "self.rows", True),
        ("", "def top(...): ...", True),
        ("", "def top(config, ...): ...", True),
        ("", "def top(flag, ...): ...", True),
        ("", "def top(other, ...): ...", False),
        ("", "def top(config): ...", False),
        ("", "def method(...): ...", False),
        ("C", "def method(...): ...", True),
        ("C", "def method(self, has_prefill): ...", True),
        ("C", "def hidden(...): ...", True),
        ("C", "def top(...): ...", False),
        ("", "class C: ...", True),
        ("", "class C(Base): ...", True),
        ("", "class C(Other): ...", False),
        ("", "class D: ...", False),
        ("C", "cls = _", True),
        ("C", "cls = Layer", True),
        ("C", "cls = Other", False),
        ("", "SIZE = 3", True),
        ("", '{"B": _, ...}', True),
        ("", '{"B": (_, "B"), ...}', True),
        ("", '{"B": _}', False),
        ("", '{"C": _, ...}', False),
        ("", "from functools import cache", True),
        ("", "from functools import lru_cache", False),
        ("top", "from functools import cache", False),
        ("", "import vllm.envs as envs", True),
    ],
)
def test_signs(scope, pattern, found):
    assert has_sign(SIGNS, scope, pattern) is found


@pytest.mark.parametrize(
    "text",
    [
        "# getattr(config, 'is_causal', None)\n",
        "x = \"getattr(config, 'is_causal', None)\"\n",
        "def f(:\n",
        "",
    ],
)
def test_text_that_is_no_syntax_is_no_sign(text):
    assert not has_sign(text, "", 'getattr(config, "is_causal", _)')


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


def hunk(old, new, scope="f"):
    return Hunk("vllm/a.py", scope, old, new)


BODY = "def f():\n    a()\n    b()\n    c()\n"
ADD = hunk("    b()\n", "    b()\n    added_by_us()\n")
WRAP = hunk("    b()\n", "    if long_condition:\n        b()\n")
DROP = hunk("    b()\n    c()\n", "    c()\n")


@pytest.mark.parametrize(
    "hunk, text, state",
    [
        (ADD, BODY, "APPLY"),
        (ADD, BODY.replace("b()\n", "b()\n    added_by_us()\n"), "NOOP"),
        (ADD, BODY.replace("b()\n", "b()\n    added_by_us()\n") + "    # more\n", "NOOP"),
        (ADD, BODY.replace("b()\n", "b()\n    other()\n    added_by_us()\n"), "PARTIAL"),
        (ADD, BODY.replace("b()", "x()"), "DRIFT"),
        (ADD, BODY.replace("b()\n", "b()\n    b()\n"), "DRIFT"),
        (ADD, BODY.replace("def f", "def g"), "DRIFT"),
        (ADD, BODY + BODY, "DRIFT"),
        (ADD, "def f():\n    pass\n\n\n" + BODY.replace("def f", "def g"), "DRIFT"),
        (ADD, "def f(:\n", "DRIFT"),
        (ADD, None, "DRIFT"),
        (WRAP, BODY, "APPLY"),
        (WRAP, BODY.replace("    b()\n", WRAP.new), "NOOP"),
        (WRAP, BODY.replace("    b()\n", WRAP.new.replace("long", "short")), "PARTIAL"),
        (DROP, BODY, "APPLY"),
        (DROP, BODY.replace("    b()\n", ""), "NOOP"),
        (hunk("    b()\n", "    x()\n"), BODY.replace("a()", "x()"), "PARTIAL"),
        (hunk("x = 1\n", "x = 2\n", ""), "x = 1\ndef f():\n    x = 1\n", "APPLY"),
        (hunk("    x = 1\n", "    x = 2\n", ""), "def f():\n    x = 1\n", "DRIFT"),
    ],
)
def test_judge(hunk, text, state):
    found, detail = _patchlib.judge(text, hunk)
    assert found == state, detail


def test_judge_shows_the_nearest_text():
    state, detail = _patchlib.judge(BODY.replace("b()", "bee()"), ADD)
    assert (state, detail.splitlines()[1:]) == (
        "DRIFT",
        ["--- expected", "+++ found at line 3", "@@ -1 +1 @@", "-    b()", "+    bee()"],
    )


@pytest.mark.parametrize("text", ["", "x", "\n\n\n"])
def test_there_is_always_a_nearest_text(text):
    assert difference(text, "f", "    b()\n    c()\n").startswith("\n--- expected")


@pytest.mark.parametrize(
    "states, verdict",
    [
        (["APPLY", "APPLY"], "APPLY"),
        (["APPLY", "SHIPPED"], "APPLY"),
        (["NOOP", "SHIPPED"], "NOOP"),
        (["NOOP", "NOOP"], "NOOP"),
        (["SHIPPED", "MISSING"], "SHIPPED"),
        (["APPLY", "NOOP"], "PARTIAL"),
        (["APPLY", "NOOP", "DRIFT"], "DRIFT"),
        (["APPLY", "NOOP", "OUTDATED"], "PARTIAL"),
        (["OUTDATED", "NOOP"], "OUTDATED"),
        (["OUTDATED", "APPLY"], "OUTDATED"),
        (["OUTDATED", "PARTIAL"], "PARTIAL"),
        (["DRIFT", "PARTIAL", "OUTDATED", "APPLY", "NOOP", "SHIPPED", "MISSING"], "DRIFT"),
        (["MISSING"], "SHIPPED"),
        ([], "SHIPPED"),
    ],
)
def test_overall(states, verdict):
    assert _patchlib.overall(states) == verdict


@pytest.mark.parametrize(
    "text, found",
    [
        ("from vllm.a import b, c as d\n", {("vllm.a", "b"), ("vllm.a", "c")}),
        ("import vllm.a.b\nimport os\n", {("vllm.a.b", None)}),
        ("from . import b\n", {("vllm.x", "b")}),
        ("from .y import b\nfrom ..z import c\n", {("vllm.x.y", "b"), ("vllm.z", "c")}),
        ("def f():\n    from vllm import g\n", {("vllm", "g")}),
        ("import vllmx\nfrom torch import vllm\n", set()),
    ],
)
def test_imports(text, found):
    assert imports(text, "vllm/x/m.py") == found


PACKAGE = {
    "vllm/__init__.py": "from vllm.a import one\n",
    "vllm/a.py": "import os\none = 1\nif one:\n    two, (three, *four) = f()\nwith f() as five:\n    pass\n"
    "for six in f():\n    class Seven:\n        eight = 1\n",
    "vllm/lazy.py": "def __getattr__(name):\n    return 1\n",
    "vllm/star.py": "from vllm.a import *\n",
    "vllm/b/__init__.py": "",
    "vllm/b/c.py": "def f():\n    inner = 1\n",
}


def package(path):
    return PACKAGE[path].encode() if path in PACKAGE else None


@pytest.mark.parametrize(
    "module, name, found",
    [
        *[("vllm.a", name, True) for name in ("one", "two", "three", "four", "five", "six", "Seven", "os")],
        *[("vllm.a", name, False) for name in ("eight", "nine")],
        ("vllm", "one", True),
        ("vllm", "b", True),
        ("vllm", "no", False),
        ("vllm.b", "c", True),
        ("vllm.b.c", "f", True),
        ("vllm.b.c", "inner", False),
        ("vllm.b.c", None, True),
        ("vllm.no", None, False),
        ("vllm.no", "one", False),
        ("vllm.lazy", "anything", True),
        ("vllm.star", "anything", True),
    ],
)
def test_resolves(module, name, found):
    assert resolves(package, module, name) is found


def test_only_our_own_imports_are_asked_for():
    before = "from vllm.gone import x\n"
    after = before + "from vllm.a import one, nine\n"
    assert missing_imports(package, "vllm/m.py", before, after) == ["from vllm.a import nine"]


def tree(files):
    return lambda path: files[path].encode() if path in files else None


def one_patch(*hunks, **more):
    return Patch("one", "why", "upstream", "0.28.0", "drop", hunks=hunks, **more)


SHIPS = ((Sign("vllm/a.py", "f", "added_upstream()"),),)


@pytest.mark.parametrize(
    "version, text, states, verdict",
    [
        ("0.27.1", BODY, {"one": "APPLY", "two": "APPLY"}, "APPLY"),
        ("0.27.0", BODY, {"one": "APPLY", "two": "APPLY"}, "APPLY"),
        ("0.27.1+rocm", BODY, {"one": "APPLY", "two": "APPLY"}, "APPLY"),
        ("0.26.0", BODY, {"one": "DRIFT", "two": "DRIFT"}, "DRIFT"),
        ("0.27.10", BODY, {"one": "DRIFT", "two": "DRIFT"}, "DRIFT"),
        ("0.27.1", BODY.replace("b()", "added_upstream()"), {"one": "SHIPPED", "two": "APPLY"}, "APPLY"),
        ("0.27.1", BODY.replace("c()", "x()"), {"one": "APPLY", "two": "DRIFT"}, "DRIFT"),
    ],
)
def test_survey(version, text, states, verdict):
    two = Patch("two", "", "", None, "", hunks=(hunk("    c()\n", "    c()\n    second()\n"),), core=False)
    one = one_patch(ADD, shipped=SHIPS)
    patch_set = _patchlib.load([one, two], {}, lambda path: None)
    report = _patchlib.survey(tree({"vllm/a.py": text}), version, patch_set)
    assert ({row.name: row.state for row in report.patches}, report.verdict) == (states, verdict)
    assert report.exit_code == _patchlib.EXIT_CODES[verdict]
    assert bool(report.changes) == (verdict == "APPLY")
    if version not in ("0.27.0", "0.27.1", "0.27.1+rocm"):
        assert f"vLLM {version} is not supported" in report.message


def test_survey_of_a_release_that_ships_it():
    """The port is there by syntax; what is not there is named and never applied, though its anchor is there too."""
    files = {"vllm/a.py": BODY.replace("b()", "added_upstream()"), "vllm/new.py": "theirs = 1\n"}
    two = Patch("two", "its reason", "", None, "", hunks=(hunk("    c()\n", "    c()\n    second()\n"),), core=False)
    patch_set = _patchlib.load([one_patch(ADD, shipped=SHIPS), two], {"d/new.py": "vllm/new.py"}, lambda path: b"")
    report = _patchlib.survey(tree(files), "0.28.0", patch_set)
    assert {row.name: row.state for row in report.patches} == {"one": "SHIPPED", "two": "MISSING", "d/": "SHIPPED"}
    assert (report.verdict, report.exit_code, report.changes) == ("SHIPPED", 0, {})
    assert "two" in report.message and "its reason" in report.patches[1].detail


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1+rocm"])
def test_no_0_27_ships_the_port(version):
    """All of it is there and we did not record it: somebody's patch, not upstream's."""
    files = {"vllm/a.py": BODY.replace("b()", "added_upstream()"), "vllm/new.py": "theirs = 1\n"}
    patch_set = _patchlib.load([one_patch(ADD, shipped=SHIPS)], {"d/new.py": "vllm/new.py"}, lambda path: b"")
    report = _patchlib.survey(tree(files), version, patch_set)
    assert {row.name: row.state for row in report.patches} == {"one": "PARTIAL", "d/": "PARTIAL"}
    assert (report.verdict, report.exit_code, report.changes) == ("PARTIAL", 2, {})
    assert f"vLLM {version} does not ship this" in report.patches[0].detail


def test_a_line_that_is_the_same_upstream_is_not_ours():
    """A registry entry can hardly be written in two ways."""
    entry = hunk("x = {\n", "x = {\n    1: 2,\n", "")
    sign = ((Sign("vllm/a.py", "", "{1: 2, ...}"),),)
    others = tuple(hunk(f"    old_{i}()\n", f"    new_{i}()\n") for i in range(3))
    patches = [
        one_patch(entry, shipped=sign),
        Patch("two", "", "", None, "", hunks=others, shipped=((Sign("vllm/a.py", "f", "theirs()"),),)),
    ]
    text = "x = {\n    1: 2,\n}\n\n\ndef f():\n    theirs()\n"
    patch_set = _patchlib.load(patches, {"d/new.py": "vllm/new.py"}, lambda path: b"")
    report = _patchlib.survey(tree({"vllm/a.py": text, "vllm/new.py": "theirs = 1\n"}), "0.28.0", patch_set)
    assert report.verdict == "SHIPPED"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"def f(:\n"])
def test_a_file_that_cannot_be_read_as_python(data):
    patch_set = _patchlib.load([one_patch(ADD)], {}, lambda path: None)
    report = _patchlib.survey(lambda path: data if path == "vllm/a.py" else None, "0.27.1", patch_set)
    assert report.verdict == "DRIFT"


def test_a_promised_definition_that_is_there_twice():
    add = hunk("def f():\n", "def g():\n    pass\n\n\ndef f():\n", "")
    patch_set = _patchlib.load([one_patch(add, defines=(("vllm/a.py", "g"),))], {}, lambda path: None)
    report = _patchlib.survey(tree({"vllm/a.py": BODY + "\n\ndef g():\n    pass\n"}), "0.27.1", patch_set)
    assert report.verdict == "DRIFT" and "g is defined 2 times" in report.patches[0].detail


def test_a_promised_definition_in_another_place():
    add = hunk("    a()\n", "    def g():\n        pass\n\n    a()\n")
    patch_set = _patchlib.load([one_patch(add, defines=(("vllm/a.py", "g"),))], {}, lambda path: None)
    report = _patchlib.survey(tree({"vllm/a.py": BODY}), "0.27.1", patch_set)
    assert report.verdict == "DRIFT" and "g is defined 0 times" in report.patches[0].detail


def test_a_patch_without_hunks_goes_with_the_files():
    patch_set = _patchlib.load([one_patch()], {"d/new.py": "vllm/new.py"}, lambda path: b"x = 1\n")
    for files, state in (({}, "APPLY"), ({"vllm/new.py": "x = 1\n"}, "NOOP"), ({"vllm/new.py": "y\n"}, "PARTIAL")):
        report = _patchlib.survey(tree(files), "0.27.1", patch_set)
        assert (report.patches[0].state, report.verdict) == (state, state)


def test_json_has_what_it_promises():
    patch_set = _patchlib.load([one_patch(ADD)], {}, lambda path: None)
    found = _patchlib.survey(tree({"vllm/a.py": BODY}), "0.27.1", patch_set).as_json()
    assert found["patches"] == [
        {"name": "one", "state": "APPLY", "files": ["vllm/a.py"], "detail": "why", "shipped_in": "0.28.0"}
    ]
    assert {key: found[key] for key in ("verdict", "exit_code", "version")} == {
        "verdict": "APPLY",
        "exit_code": 1,
        "version": "0.27.1",
    }


def test_dedent_is_not_needed_for_tabs():
    text = textwrap.dedent("def f():\n\ta()\n\tb()\n")
    assert _patchlib.judge(text, hunk("\tb()\n", "\tb()\n\tc()\n"))[0] == "APPLY"
