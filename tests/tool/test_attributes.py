"""No function of ours may need what only another function of ours provides.

vLLM's tests call methods on objects of their own, and a plugin's subclass may have its own `__init__` or `propose`:
an attribute that one patched method introduces is there for another one only if the class itself has it, or if it is
read with a default; and a parameter that a patched function gains needs a default.
"""

import ast
from collections import defaultdict

import pytest

from patches import PATCHES
from tests.tool.patching import OURS

PATCHED_FILES = sorted({hunk.file for patch in PATCHES for hunk in patch.hunks})


def functions(tree):
    """(name of the function around it, node) of every node of `tree`; the name is None outside functions."""

    def walk(node, around):
        for child in ast.iter_child_nodes(node):
            yield around, child
            is_outermost = around is None and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, child.name if is_outermost else around)

    return walk(tree, None)


def uses(source, context):
    """{attribute: {functions that use it}} for one kind of use: ast.Store or ast.Load."""
    found = defaultdict(set)
    for function, node in functions(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context):
            found[node.attr].add(function)
    return found


def at_class_level(source):
    """The names that every object of some class has: methods, and class attributes with a value."""
    names = set()
    for scope in ast.walk(ast.parse(source)):
        for node in scope.body if isinstance(scope, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                names.add(node.target.id)
    return names


def borrowed(before, after):
    """(function, attribute) for what a function of `after` reads and only another function has set.

    before, after: {file: source}; a file that is only in `after` is new, and its constructors are ours.
    """
    known = {name for source in before.values() for name in uses(source, ast.Store)}
    known |= {name for source in after.values() for name in at_class_level(source)}
    introduced = defaultdict(set)
    for file, source in after.items():
        for name, setters in uses(source, ast.Store).items():
            if file not in before and "__init__" in setters:
                known.add(name)
            introduced[name] |= setters
    return [
        (reader, name)
        for source in after.values()
        for name, readers in uses(source, ast.Load).items()
        if name in introduced and name not in known
        for reader in sorted(readers - introduced[name], key=str)
    ]


def required(source):
    """{qualified name of a function: names of the parameters without a default}."""
    found = {}

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}.{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                positional = child.args.posonlyargs + child.args.args
                keyword = [a for a, default in zip(child.args.kwonlyargs, child.args.kw_defaults) if default is None]
                without = positional[: len(positional) - len(child.args.defaults)] + keyword
                found[name] = {argument.arg for argument in without}
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                walk(child, name)

    walk(ast.parse(source), "")
    return found


def demanded(before, after):
    """(function, parameter) for what callers of a function of `before` must give in `after` only; {file: source}."""
    return [
        (function, name)
        for file in before
        for function, names in required(before[file]).items()
        for name in sorted(required(after[file]).get(function, names) - names)
    ]


# Not patched, but ours sets attributes of its objects that every one of them has.
USED_FILES = ["vllm/v1/worker/gpu/block_table.py"]


@pytest.fixture(scope="module")
def before(pristine):
    return {file: (pristine / file).read_text() for file in (*PATCHED_FILES, *USED_FILES)}


@pytest.fixture(scope="module")
def after(patched):
    return {file: (patched / file).read_text() for file in (*PATCHED_FILES, *USED_FILES, *OURS.files)}


def test_no_attribute_of_the_patched_tree_is_borrowed(before, after):
    assert borrowed(before, after) == []


def test_no_call_that_vllm_takes_is_refused_once_patched(before, after):
    assert demanded(before, after) == []


BEFORE = "class A:\n    def __init__(self):\n        self.a = 1\n    def f(self):\n        return self.a\n"
SETS = BEFORE.replace("self.a = 1", "self.a = self.b = 1")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, []),
        (SETS, []),
        (SETS.replace("return self.a", "return self.b"), [("f", "b")]),
        (SETS.replace("return self.a", "return getattr(self, 'b', self.a)"), []),
        (SETS.replace("return self.a", "return self.b").replace("class A:\n", "class A:\n    b: int = 1\n"), []),
        (SETS.replace("return self.a", "return self.b").replace("class A:\n", "class A:\n    b: int\n"), [("f", "b")]),
        (SETS + "    def g(self):\n        return [lambda: self.b]\n", [("g", "b")]),
        (BEFORE.replace("return self.a", "self.b = 1\n        return self.b"), []),
    ],
)
def test_attributes_of_small_classes(after, expected):
    assert borrowed({"file": BEFORE}, {"file": after}) == expected


def test_constructors_of_new_classes_are_ours():
    source = "class B:\n    def __init__(self):\n        self.c = 1\n    def load(self):\n        self.d = 1\n"
    source += "    def f(self):\n        return self.c, self.d\n"
    assert borrowed({"file": BEFORE}, {"file": BEFORE, "new": source}) == [("f", "d")]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("def f(a, b=1, *, c): ...", []),
        ("def f(a, b=1, d=2, *, c, e=3): ...", []),
        ("def f(a, d, b=1, *, c): ...", [(".f", "d")]),
        ("def f(a, b, *, c, e): ...", [(".f", "b"), (".f", "e")]),
        ("def g(a, b): ...", []),
    ],
)
def test_parameters_of_small_functions(after, expected):
    assert demanded({"file": "def f(a, b=1, *, c): ..."}, {"file": after}) == expected
