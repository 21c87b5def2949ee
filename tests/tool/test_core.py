"""The pure halves of the patch tool, as tables: text in; lines, states and text out."""

from dataclasses import replace

import pytest

import _site
from _patchlib import Hunk, Marker, Patch, Problem, State, Written, judge, load, release, survey, worst
from _site import take_back
from _source import (
    NotPython,
    decode,
    definitions,
    find_in_scope,
    find_lines,
    has_marker,
    imports,
    missing_imports,
    near_miss,
    replace_lines,
    resolves,
    same_code,
)
from tests.tool.patching import OURS

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


def test_definitions():
    found = {name: [span.start < span.end for span in spans] for name, spans in definitions(TEXT).items()}
    assert found == {
        "LIMIT": [True, True],
        **{name: [True] for name in ("f", "C", "C.size", "C.f", "C.f.g", "C.h", "inner")},
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
def test_names_of_definitions(text, names):
    assert set(definitions(text)) == names


def test_definitions_of_what_is_not_python():
    with pytest.raises(NotPython, match="line 2"):
        definitions("x = 1\ndef f(:\n")


@pytest.mark.parametrize(
    "data, text",
    [(b"a\nb", "a\nb"), (b"a\r\nb\r\n", "a\nb\n"), (b"\xc3\xa9", "é"), (b"\xff\xfe", None), (b"", "")],
)
def test_decode(data, text):
    assert decode(data) == text


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
def test_whole_lines_are_found(text, lines, found):
    assert find_lines(text, lines) == found


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
def test_text_is_found_inside_its_scope(scope, lines, found):
    assert find_in_scope(TEXT, scope, lines) == found


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
def test_lines_are_replaced_and_all_others_keep_their_bytes(before, edits, after):
    assert replace_lines(before, edits) == after


# Syntax that shows a feature

MARKED = '''\
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
    "scope, marker, found",
    [
        ("top", "getattr(config, 'is_causal'", True),
        ("top", "getattr(config, 'causal'", False),
        ("top", "config, 'is_causal'", False),
        ("", "getattr(config, 'is_causal'", True),
        ("C", "getattr(config, 'is_causal'", False),
        ("nowhere", "getattr(config, 'is_causal'", False),
        ("top", "helper(", True),
        ("top", "helper(value, ", True),
        ("top", "helper(value, layer, flag=flag)", True),
        ("top", "helper(layer", False),
        ("top", "value = ", True),
        ("top", "raise ValueError(", True),
        ("top", "flag", True),
        ("C.method", "has_prefill", True),
        ("top", "has_prefill", False),
        ("C.method", "self.rows.fill_(-1)", True),
        ("C.method", "self.rows.fill_(1)", False),
        ("C.method", "row > 0 and (not row.done)", True),
        ("C.method", "row > 0", True),
        ("C.method", "row < 0", False),
        ("C", "self.rows", True),
        ("", "def top(", True),
        ("", "def top(config", True),
        ("", "def top(flag", False),
        ("C", "def method(self, has_prefill)", True),
        ("C", "def hidden(", True),
        ("C", "def top(", False),
        ("", "class C", True),
        ("", "class C(Base", True),
        ("", "class C(Other", False),
        ("", "class D", False),
        ("C", "cls: type = Layer", True),
        ("C", "cls: type = Other", False),
        ("", "SIZE: int = 3", True),
        ("", "('b', 'B')", True),
        ("", "('c', 'C')", False),
        ("", "from functools import cache", True),
        ("", "from functools import lru_cache", False),
        ("top", "from functools import cache", False),
        ("", "import vllm.envs as envs", True),
    ],
)
def test_markers(scope, marker, found):
    assert has_marker(MARKED, scope, marker) is found


@pytest.mark.parametrize(
    "text", ["# getattr(config, 'is_causal', None)\n", "x = \"getattr(config, 'is_causal', None)\"\n", "def f(:\n", ""]
)
def test_text_that_is_no_syntax_is_no_marker(text):
    assert not has_marker(text, "", "getattr(config, 'is_causal'")


# Imports

PACKAGE = {
    "vllm/__init__.py": "from vllm.a import one\n",
    "vllm/a.py": "import os\none = 1\nif one:\n    two, (three, *four) = f()\nwith f() as five:\n    pass\n"
    "for six in f():\n    class Seven:\n        eight = 1\n",
    "vllm/lazy.py": "def __getattr__(name):\n    return 1\n",
    "vllm/star.py": "from vllm.a import *\n",
    "vllm/b/__init__.py": "",
    "vllm/b/c.py": "def f():\n    inner = 1\n",
}


def tree_of(files):
    return lambda path: files[path].encode() if path in files else None


package = tree_of(PACKAGE)


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
def test_imports_resolve(module, name, found):
    assert resolves(package, module, name) is found


def test_only_our_own_imports_are_asked_for():
    before = "from vllm.gone import x\n"
    after = before + "from vllm.a import one, nine\n"
    assert missing_imports(package, "vllm/m.py", before, after) == ["from vllm.a import nine"]


# One hunk in a text


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
        (hunk("\tb()\n", "\tb()\n\tc()\n"), "def f():\n\ta()\n\tb()\n", "APPLY"),
    ],
)
def test_judge(hunk, text, state):
    found = judge(text, hunk)
    assert found.state == state, found.detail


def test_a_near_miss_is_shown_as_a_diff():
    found = judge(BODY.replace("b()", "bee()"), ADD)
    assert found.state == "DRIFT"
    wanted = ["--- expected", "+++ found at line 3", "@@ -1 +1 @@", "-    b()", "+    bee()"]
    assert found.detail.splitlines()[1:6] == wanted


@pytest.mark.parametrize("text", ["", "x", "\n\n\n"])
def test_there_is_always_a_nearest_text(text):
    assert "--- expected" in near_miss(text, "f", "    b()\n    c()\n")


@pytest.mark.parametrize(
    "text, line",
    [
        (BODY.replace("b()", "b( )"), 3),
        (BODY.replace("b()", "b()  # why"), 3),
        (BODY.replace("    b()\n", "    # why\n    b( )\n"), 4),
        (BODY.replace("b()", "b(1)"), None),
        (BODY.replace("    b()\n", ""), None),
        ("def g():\n    b( )\n", None),
    ],
)
def test_the_same_code_reformatted(text, line):
    assert same_code(text, "f", "    b()\n") == line


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
def test_the_worst_state_wins(states, verdict):
    assert worst(map(State, states)) == verdict


@pytest.mark.parametrize(
    "version, same",
    [
        *[
            (version, True)
            for version in ("0.27.1", "v0.27.1", "0.27.1.0", "0.27.01", "0.27.1+rocm", "V0.27.1+cu129.2")
        ],
        *[(version, False) for version in ("0.27.10", "0.27", "0.27.1.post1", "0.27.1rc1", "0.27.1.dev3", "1!0.27.1")],
        ("nonsense", False),
    ],
)
def test_versions_are_compared_as_pep_440_has_them(version, same):
    assert (release(version) == release("0.27.1")) is same


# Taking back


BOTH = (
    Written("vllm/a.py", "f", ADD.old, ADD.new, above="def f():\n    a()\n", below="    c()\n"),
    Written("vllm/a.py", "f", "    c()\n", "    c2()\n    c3()\n", above="    a()\n    b()\n"),
)
APPLIED = b"def f():\n    a()\n    b()\n    added_by_us()\n    c2()\n    c3()\n"


@pytest.mark.parametrize(
    "data, taken",
    [
        (APPLIED, BODY.encode()),
        (APPLIED.replace(b"\n", b"\r\n"), BODY.replace("\n", "\r\n").encode()),
        (APPLIED[:-1], BODY.encode()[:-1]),
        (APPLIED.replace(b"    added_by_us()\n", b""), BODY.encode()),
        (b"# theirs\n" + APPLIED, b"# theirs\n" + BODY.encode()),
        (APPLIED.replace(b"    a()\n", b"    theirs()\n"), BODY.encode().replace(b"    a()\n", b"    theirs()\n")),
        (APPLIED + b"    theirs()\n", BODY.encode() + b"    theirs()\n"),
        (
            APPLIED.replace(b"    c2()\n", b"    theirs()\n    c2()\n"),
            BODY.replace("    c", "    theirs()\n    c").encode(),
        ),
    ],
)
def test_our_text_gives_way_to_what_was_there(data, taken):
    assert take_back(data, BOTH) == taken


@pytest.mark.parametrize(
    "data",
    [
        APPLIED.replace(b"added_by_us", b"edited"),
        APPLIED.replace(b"    c2()\n    c3()\n", b"    c2()\n    theirs()\n    c3()\n"),
        APPLIED + b"    c2()\n    c3()\n",
        b"def f():\n    b()\n",
        b"\xff",
    ],
)
def test_our_text_is_not_taken_out_if_it_is_not_what_we_wrote(data):
    with pytest.raises(Problem, match=r"edited by someone else|not UTF-8|not Python") as refused:
        take_back(data, BOTH)
    assert refused.value.state == "PARTIAL"


# The verdict on a tree


def one_patch(*hunks, name="one", core=True, **more):
    return Patch(name, "its reason", "upstream", "0.28.0", hunks=hunks, core=core, **more)


def nothing(path):
    return None


SHIPS = ((Marker("vllm/a.py", "f", "added_upstream("),),)
SECOND = hunk("    c()\n", "    c()\n    second()\n")


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
    patches = [one_patch(ADD, shipped=SHIPS), one_patch(SECOND, name="two", core=False)]
    report = survey(tree_of({"vllm/a.py": text}), version, load(patches, {}, nothing))
    assert ({row.name: row.state for row in report.patches}, report.verdict) == (states, verdict)
    assert bool(report.changes) == (verdict == "APPLY")
    if verdict == "DRIFT" and text == BODY:
        assert f"vLLM {version} is not supported" in report.message


def test_survey_of_a_release_that_ships_it():
    """The port is there by syntax; what is not there is named and never applied, though its anchor is there too."""
    files = {"vllm/a.py": BODY.replace("b()", "added_upstream()"), "vllm/new.py": "theirs = 1\n"}
    patches = [one_patch(ADD, shipped=SHIPS), one_patch(SECOND, name="two", core=False)]
    report = survey(tree_of(files), "0.28.0", load(patches, {"d/new.py": "vllm/new.py"}, lambda path: b""))
    assert {row.name: row.state for row in report.patches} == {"one": "SHIPPED", "two": "MISSING", "d/": "SHIPPED"}
    assert (report.verdict, report.changes) == ("SHIPPED", ())
    assert "two" in report.message and "its reason" in report.patches[1].detail


def test_a_patch_is_a_further_fix_unless_it_says_that_it_is_of_the_port():
    assert Patch("mine", "", "", None).core is False


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1+rocm"])
def test_no_0_27_ships_the_port(version):
    """All of it is there and we did not record it: somebody's patch, not upstream's."""
    files = {"vllm/a.py": BODY.replace("b()", "added_upstream()"), "vllm/new.py": "theirs = 1\n"}
    patch_set = load([one_patch(ADD, shipped=SHIPS)], {"d/new.py": "vllm/new.py"}, lambda path: b"")
    report = survey(tree_of(files), version, patch_set)
    assert {row.name: row.state for row in report.patches} == {"one": "PARTIAL", "d/": "PARTIAL"}
    assert (report.verdict, report.changes) == ("PARTIAL", ())
    assert f"vLLM {version} does not ship this" in report.patches[0].detail


def test_a_line_that_is_the_same_upstream_is_not_ours():
    """A registry entry can hardly be written in two ways."""
    entry = hunk("x = {\n", "x = {\n    1: 2,\n", "")
    others = tuple(hunk(f"    old_{i}()\n", f"    new_{i}()\n") for i in range(3))
    patches = [
        one_patch(entry, shipped=((Marker("vllm/a.py", "", "{1: 2"),),)),
        one_patch(*others, name="two", shipped=((Marker("vllm/a.py", "f", "theirs("),),)),
    ]
    files = {"vllm/a.py": "x = {\n    1: 2,\n}\n\n\ndef f():\n    theirs()\n", "vllm/new.py": "theirs = 1\n"}
    report = survey(tree_of(files), "0.28.0", load(patches, {"d/new.py": "vllm/new.py"}, lambda path: b""))
    assert report.verdict == "SHIPPED"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"def f(:\n"])
def test_a_file_that_cannot_be_read_as_python(data):
    report = survey({"vllm/a.py": data}.get, "0.27.1", load([one_patch(ADD)], {}, nothing))
    assert report.verdict == "DRIFT"


@pytest.mark.parametrize(
    "old, new, scope, more, count",
    [
        ("def f():\n", "def g():\n    pass\n\n\ndef f():\n", "", "\n\ndef g():\n    pass\n", 2),
        ("    a()\n", "    def g():\n        pass\n\n    a()\n", "f", "", 0),
    ],
    ids=["twice", "in another place"],
)
def test_a_promised_definition_is_there_once(old, new, scope, more, count):
    patch_set = load([one_patch(hunk(old, new, scope), defines=(("vllm/a.py", "g"),))], {}, nothing)
    report = survey(tree_of({"vllm/a.py": BODY + more}), "0.27.1", patch_set)
    assert report.verdict == "DRIFT" and f"g is defined {count} times" in report.patches[0].detail


@pytest.mark.parametrize(
    "files, state", [({}, "APPLY"), ({"vllm/new.py": "x = 1\n"}, "NOOP"), ({"vllm/new.py": "y\n"}, "PARTIAL")]
)
def test_a_patch_without_hunks_goes_with_the_files(files, state):
    patch_set = load([one_patch()], {"d/new.py": "vllm/new.py"}, lambda path: b"x = 1\n")
    report = survey(tree_of(files), "0.27.1", patch_set)
    assert (report.patches[0].state, report.verdict) == (state, state)


def test_the_plan_is_pure(template):
    """One survey reads each file once and writes none; its result depends on nothing else."""
    asked = []
    read = _site.reader(template)

    def spy(path):
        asked.append(path)
        return read(path)

    first = survey(spy, "0.27.1", OURS)
    assert len(asked) == len(set(asked))
    assert survey(read, "0.27.1", OURS) == first
    assert first.changes and first.back == ()
    for change in first.changes:
        assert change.before == read(change.path) and change.after not in (None, change.before)


# Faulty data of ours


GOOD = Hunk("vllm/a.py", "f", "    return 1\n", "    return 2\n")


@pytest.mark.parametrize(
    "patches, installed, wanted",
    [
        ([one_patch(GOOD), one_patch()], {}, "patch one: 2 patches have this name"),
        ([one_patch(replace(GOOD, file="../a.py"))], {}, "patch one: .*not a path below vllm/"),
        ([one_patch(replace(GOOD, file="vllm/../a.py"))], {}, "patch one: .*not a path below vllm/"),
        ([one_patch(name="two words")], {}, "two words: .*one word"),
        ([one_patch(GOOD)], {"d/no.py": "vllm/no.py"}, "d/no.py: INSTALLED names it"),
        ([one_patch(GOOD)], {"d/a.py": "../b.py"}, "d/a.py: .*not a path below vllm/"),
        ([one_patch(GOOD)], {"d/a.py": "vllm/a.py"}, "vllm/a.py is written twice"),
        ([one_patch(GOOD)], {"d/a.py": "vllm/b.py", "d/b.py": "vllm/b.py"}, "vllm/b.py is written twice"),
    ],
)
def test_names_and_paths_of_our_own_are_checked_by_name(patches, installed, wanted):
    with pytest.raises(Problem, match=wanted) as refused:
        load(patches, installed, {"d/a.py": b"", "d/b.py": b""}.get)
    assert refused.value.state is None


def test_our_text_in_another_function_is_not_ours():
    """The scope is gone, and the one line that we wrote stands once elsewhere: that is not the one to take out."""
    mine = Written("vllm/a.py", "f", "    a()\n", "    b()\n", above="def f():\n", below="    c()\n")
    text = b"def renamed():\n    edited()\n    c()\n\n\ndef g():\n    b()\n"
    with pytest.raises(Problem, match="edited by someone else"):
        take_back(text, (mine,))
