"""Text and syntax: where lines are in a file, which scope holds them, and what a file defines and imports.

Scopes and definitions are read with libcst, which keeps every comment and blank line, so that the lines of a
scope are known exactly. Signs and imports are read with ast, which is ten times cheaper and loses nothing
that they ask for.
"""

import ast
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Read = Callable[[str], bytes | None]

EXIT_CODES = {"DRIFT": 2, "PARTIAL": 2, "OUTDATED": 1, "APPLY": 1, "NOOP": 0, "SHIPPED": 0}


# What ast raises on text that is no Python, or Python nested too deeply for it.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


class Problem(Exception):
    """Something a user can cause: the message says what it is and what to do.

    verdict  of the tree (PARTIAL or DRIFT), None where the environment or our own data is at fault
    """

    def __init__(self, message: str, verdict: str | None = None):
        super().__init__(message)
        self.verdict = verdict
        self.exit_code = EXIT_CODES[verdict] if verdict else 3


def sha256(data: bytes | None) -> str | None:
    """None for the data of a file that is not there."""
    return None if data is None else hashlib.sha256(data).hexdigest()


# Many releases are surveyed in one run and a tree takes megabytes, so the oldest are forgotten.
@lru_cache(maxsize=128)
def _tree(text: str) -> ast.Module:
    return ast.parse(text.removeprefix("\ufeff"))


def syntax_error(text: str, parse=_tree) -> str | None:
    try:
        parse(text)
    except UNPARSABLE as error:
        return str(error) or "nested too deeply"
    return None


def decode(data: bytes) -> str | None:
    """The text of a file with LF endings, or None where it is not UTF-8."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def hits(text: str, lines: str) -> list[int]:
    """0-based numbers of the lines of `text` at which `lines`, whole lines, occur."""
    text = text if text.endswith("\n") else text + "\n"
    found, at = [], text.find(lines)
    while at >= 0:
        if at == 0 or text[at - 1] == "\n":
            found.append(text.count("\n", 0, at))
        at = text.find(lines, at + 1)
    return found


@dataclass(frozen=True)
class Span:
    """Lines start <= n < end of a definition, decorators and comments above it included; its body is the rest."""

    start: int
    body: int
    end: int


@lru_cache(maxsize=None)
def outline(text: str) -> dict[str, list[Span]]:
    """Dotted name -> every class, function and assignment of that name, in a class or at top level or nested.

    A definition below `if`, `try` or `with` belongs to the scope around it. Problem where text is not Python.
    """
    try:
        import libcst
        from libcst._nodes.internal import CodegenState
    except ImportError:
        raise Problem("libcst is missing; run: python -m pip install libcst") from None

    # libcst's position metadata costs three times the parse. Writing the code out once, and noting how
    # many tokens there are before and after each definition, gives the same lines for half a parse.
    class Marks(CodegenState):
        def before_codegen(self, node):
            kind = type(node)  # isinstance on these classes is slow, and every node passes here
            if kind in scopes:
                path.append((node, len(self.tokens)))
            elif path and node is path[-1][0].body:
                bodies[id(path[-1][0])] = len(self.tokens)
            elif kind is libcst.AssignTarget or kind is libcst.AnnAssign:
                if type(node.target) is libcst.Name:
                    marks.append((dotted() + node.target.value, *[len(self.tokens)] * 3))

        def after_codegen(self, node):
            if path and node is path[-1][0]:
                name = dotted().rstrip(".")
                _, start = path.pop()
                marks.append((name, start, bodies[id(node)], len(self.tokens)))

    def dotted() -> str:
        return "".join(node.name.value + "." for node, _ in path)

    scopes = {libcst.ClassDef, libcst.FunctionDef}
    path, bodies, marks = [], {}, []
    try:
        module = libcst.parse_module(text.removeprefix("\ufeff").removesuffix("\n") + "\n")
        state = Marks(default_indent=module.default_indent, default_newline=module.default_newline)
        module._codegen(state)
    except libcst.ParserSyntaxError as error:
        raise Problem(f"not Python (line {error.raw_line})", "DRIFT") from None
    except RecursionError:
        raise Problem("nested too deeply to be read", "DRIFT") from None
    lines = [0, *accumulate(token.count("\n") for token in state.tokens)]
    spans: dict[str, list[Span]] = {}
    for name, start, body, end in marks:
        # A body begins with the end of its header's line.
        spans.setdefault(name, []).append(Span(lines[start], lines[body] + 1, lines[end]))
    return spans


def places(text: str, scope: str, lines: str) -> list[int]:
    """The hits of `lines` that lie inside the one class or function `scope` of `text`.

    At top level ("") a match starts outside the body of every class and function.
    """
    found = hits(text, lines)
    if not found:
        return []
    spans = outline(text)
    if not scope:
        bodies = [span for named in spans.values() for span in named]
        return [at for at in found if not any(span.body <= at < span.end for span in bodies)]
    (span,) = spans[scope]
    return [at for at in found if span.start <= at and at + lines.count("\n") <= span.end]


def edit(data: bytes, edits: list[tuple[int, str, str]]) -> bytes:
    """Replace, at each 0-based line, old lines by new ones, with the line ends that were there."""
    lines = data.split(b"\n")
    for at, old, new in sorted(edits, reverse=True):
        carriage = b"\r" if lines[at].endswith(b"\r") else b""
        lines[at : at + old.count("\n")] = [line.encode() + carriage for line in new.removesuffix("\n").split("\n")]
    return b"\n".join(lines)


def scope_lines(text: str, scope: str) -> tuple[int, list[str]]:
    """(0-based number of the first line, the lines) of a scope, or of the file where it is not there once."""
    lines = text.split("\n")
    try:
        (span,) = outline(text).get(scope, [Span(0, 0, len(lines))])
    except (Problem, ValueError):
        return 0, lines
    return span.start, lines[span.start : span.end]


def nearest(text: str, scope: str, wanted: str) -> tuple[float, int, list[str]]:
    """(likeness 0 to 1, 0-based line number, lines) of the piece of a scope that is most like the wanted lines."""
    start, lines = scope_lines(text, scope)
    size = min(wanted.count("\n"), len(lines))
    grams = _grams(wanted)
    # Comparing texts is slow: only the windows with most three-letter pieces in common are compared.
    shared = [0, *accumulate((_grams(line) & grams).total() for line in lines)]
    letters = [0, *accumulate(len(line) + 1 for line in lines)]

    def promise(at: int) -> float:
        return (shared[at + size] - shared[at]) / (letters[at + size] - letters[at] + len(wanted))

    likely = sorted(range(len(lines) - size + 1), key=promise, reverse=True)[:5]
    windows = [(at, lines[at : at + size]) for at in likely]
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(window: list[str]) -> float:
        matcher.set_seq1("\n".join(window) + "\n")
        return matcher.ratio()

    best, at, found = max((likeness(window), at, window) for at, window in windows)
    return best, start + at, found


def _grams(text: str) -> Counter[str]:
    return Counter(text[i : i + 3] for i in range(len(text) - 2))


def difference(text: str, scope: str, wanted: str) -> str:
    """The wanted lines against the nearest that are there, as a diff; starts on a line of its own."""
    _, at, found = nearest(text, scope, wanted)
    expected = wanted.splitlines()
    diff = difflib.unified_diff(expected, found, "expected", f"found at line {at + 1}", n=len(expected), lineterm="")
    return "".join("\n" + line for line in diff)


# Signs: syntax that shows that a release has a feature.


def has_sign(text: str, scope: str, pattern: str) -> bool:
    """Whether `pattern`, as a Sign has it, is in that scope. A scope that is not there shows nothing."""
    try:
        tree = _tree(text)
    except UNPARSABLE:
        return False
    wanted = parsed_pattern(pattern)
    direct = isinstance(wanted, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    for found in _scopes(tree, scope):
        nodes = _direct(found.body) if direct else ast.walk(found)
        if any(_matches(wanted, node) for node in nodes):
            return True
    return False


@lru_cache(maxsize=None)
def parsed_pattern(text: str) -> ast.AST:
    # Python has no `...` among parameters or dict entries: spell it as a starred one.
    text = re.sub(r"(\bdef \w+\([^)]*?)\.\.\.(?=\s*\))", r"\1*_", text)
    text = re.sub(r"\.\.\.(?=\s*\})", "**_", text)
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _direct(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope: below if, for, try and with too, but not inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                yield from _direct(getattr(statement, part, ()))


def _scopes(tree: ast.Module, dotted: str) -> list[ast.AST]:
    scopes: list[ast.AST] = [tree]
    for name in filter(None, dotted.split(".")):
        inner = (node for scope in scopes for node in _direct(scope.body))
        scopes = [node for node in inner if hasattr(node, "body") and getattr(node, "name", None) == name]
    return scopes


def _is_rest(node) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is ...


def _matches(pattern, node) -> bool:
    if isinstance(pattern, list):
        return isinstance(node, list) and _matches_list(pattern, node)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        return isinstance(node, ast.expr)
    if isinstance(pattern, ast.Name) and isinstance(node, ast.arg):
        return pattern.id == node.arg
    if isinstance(pattern, ast.Assign) and isinstance(node, ast.AnnAssign):
        return _matches(pattern.targets, [node.target]) and _matches(pattern.value, node.value)
    if type(pattern) is not type(node):
        return False
    special = _SPECIAL.get(type(pattern))
    if special:
        return special(pattern, node)
    fields = [name for name in pattern._fields if name not in ("ctx", "kind", "type_comment")]
    return all(_matches(getattr(pattern, name), getattr(node, name, None)) for name in fields)


def _matches_list(patterns: list, nodes: list) -> bool:
    if not patterns:
        return not nodes
    if _is_rest(patterns[0]):
        return any(_matches_list(patterns[1:], nodes[i:]) for i in range(len(nodes) + 1))
    return bool(nodes) and _matches(patterns[0], nodes[0]) and _matches_list(patterns[1:], nodes[1:])


def _matches_call(pattern: ast.Call, node: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    exact = not any(map(_is_rest, pattern.args))
    return (
        _matches(pattern.func, node.func)
        and _matches_list(pattern.args, node.args)
        and all(k.arg in given and _matches(k.value, given[k.arg]) for k in pattern.keywords)
        and not (exact and len(pattern.keywords) != len(node.keywords))
    )


def _matches_dict(pattern: ast.Dict, node: ast.Dict) -> bool:
    entries = [(key, value) for key, value in zip(pattern.keys, pattern.values) if key is not None]
    there = [(key, value) for key, value in zip(node.keys, node.values) if key is not None]
    found = all(any(_matches(k, key) and _matches(v, value) for key, value in there) for k, v in entries)
    return found and (None in pattern.keys or len(entries) == len(node.keys))


def _parameters(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in named if argument]


def _matches_function(pattern: ast.FunctionDef, node: ast.FunctionDef) -> bool:
    wanted, there = _parameters(pattern.args), _parameters(node.args)
    same = set(wanted) - {"_"} <= set(there) if "_" in wanted else wanted == there
    return pattern.name == node.name and same and _matches_list(pattern.body, node.body)


def _matches_class(pattern: ast.ClassDef, node: ast.ClassDef) -> bool:
    bases = not pattern.bases or _matches_list(pattern.bases, node.bases)
    return pattern.name == node.name and bases and _matches_list(pattern.body, node.body)


def _matches_import(pattern: ast.ImportFrom, node: ast.ImportFrom) -> bool:
    wanted = {(alias.name, alias.asname) for alias in pattern.names}
    there = {(alias.name, alias.asname) for alias in node.names}
    return (pattern.module, pattern.level) == (node.module, node.level) and wanted <= there


_SPECIAL = {
    ast.Call: _matches_call,
    ast.Dict: _matches_dict,
    ast.FunctionDef: _matches_function,
    ast.AsyncFunctionDef: _matches_function,
    ast.ClassDef: _matches_class,
    ast.ImportFrom: _matches_import,
}


# Imports: does every vLLM name that our text uses exist in the tree?


@lru_cache(maxsize=256)
def imports(text: str, path: str) -> frozenset[tuple[str, str | None]]:
    """(module, name) of each vLLM import of a file; the name is None for `import module`."""
    package = path.split("/")[:-1]
    found: set[tuple[str, str | None]] = set()
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {(module, alias.name) for alias in node.names}
    return frozenset((module, name) for module, name in found if module.split(".")[0] == "vllm")


def _module_text(read: Read, module: str) -> str | None:
    path = module.replace(".", "/")
    data = read(f"{path}.py")
    data = read(f"{path}/__init__.py") if data is None else data
    return None if data is None else decode(data)


@lru_cache(maxsize=None)
def _names(text: str) -> frozenset[str]:
    """Names that a module binds when it is imported; "*" where it takes what another one has."""
    names = set()
    for statement in _direct(_tree(text).body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        elif hasattr(statement, "name"):
            names.add(statement.name)
        else:
            names |= {name.id for name in _own_names(statement) if isinstance(name.ctx, ast.Store)}
    return frozenset(names)


def _own_names(node: ast.AST) -> Iterator[ast.Name]:
    """Names in a statement, not those in the statements below it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name):
            yield child
        elif not isinstance(child, ast.stmt):
            yield from _own_names(child)


def resolves(read: Read, module: str, name: str | None) -> bool:
    """Whether `from module import name` finds something. A module with __getattr__ or a star is believed."""
    text = _module_text(read, module)
    if text is None:
        return False
    if name in (None, "*") or _module_text(read, f"{module}.{name}") is not None:
        return True
    return syntax_error(text) is None and bool({name, "__getattr__", "*"} & _names(text))


def missing_imports(read: Read, path: str, before: str | None, after: str) -> list[str]:
    """vLLM names that `after` imports, that `before` did not, and that the tree lacks."""
    ours = imports(after, path) - (imports(before, path) if before else frozenset())
    lacking = [(module, name) for module, name in sorted(ours, key=str) if not resolves(read, module, name)]
    return [f"from {module} import {name}" if name else f"import {module}" for module, name in lacking]
