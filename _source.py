"""Text and syntax: where lines stand in a file, which scope holds them, and what a file defines and imports.

Everything is found with ast; no text is parsed twice, and a text that is not Python is remembered as such. libcst
is imported for one question only, which a syntax tree cannot answer: whether drifted code was merely reformatted.
"""

import ast
import contextlib
import copy
import difflib
import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, dropwhile, takewhile
from typing import Any

# Path below site-packages -> the file's bytes, None if there is no such file.
Read = Callable[[str], bytes | None]


class NotPython(ValueError):
    """A text that Python cannot parse; says why."""


def sha256(data: bytes | None) -> str | None:
    """None for the data of a file that is not there."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def decode(data: bytes) -> str | None:
    """The text of a file with LF line ends, or None if it is not UTF-8."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def find_lines(text: str, lines: str) -> list[int]:
    """0-based numbers of the lines of `text` at which `lines`, whole lines, occur."""
    text = text if text.endswith("\n") else text + "\n"
    found, at = [], text.find(lines)
    while at >= 0:
        if at == 0 or text[at - 1] == "\n":
            found.append(text.count("\n", 0, at))
        at = text.find(lines, at + 1)
    return found


def replace_lines(data: bytes, edits: Iterable[tuple[int, str, str]]) -> bytes:
    """Replace, at each 0-based line, old lines by new ones, with the line ends that were there."""
    lines = data.split(b"\n")
    for at, old, new in sorted(edits, reverse=True):
        carriage = b"\r" if lines[at].endswith(b"\r") else b""
        added = [line.encode() + carriage for line in new.split("\n")[:-1]]
        lines[at : at + old.count("\n")] = added
    return b"\n".join(lines)


# Syntax. Many releases are surveyed in one run and a tree takes megabytes, so the oldest are forgotten.


@lru_cache(maxsize=128)
def _parsed(text: str) -> ast.Module | str:
    """The syntax tree of a text, or why there is none."""
    try:
        # Elsewhere in this module a lone carriage return does not end a line.
        return ast.parse(text.removeprefix("\ufeff").replace("\r", " "))
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or "nested too deeply to be read"


def parse(text: str) -> ast.Module:
    """The syntax tree of a text; NotPython if there is none."""
    parsed = _parsed(text)
    if isinstance(parsed, str):
        raise NotPython(f"not Python ({parsed})")
    return parsed


def syntax_error(text: str) -> str | None:
    """Why a text is not Python, or None."""
    parsed = _parsed(text)
    return parsed if isinstance(parsed, str) else None


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of one scope: below if, for, try and with too, but not inside functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, Definition):
            for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                yield from _statements(getattr(statement, part, ()))


def _all_statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Those inside functions and classes too. Walking every expression as well takes ten times as long."""
    for statement in _statements(body):
        yield statement
        if isinstance(statement, Definition):
            yield from _all_statements(statement.body)


@dataclass(frozen=True)
class Span:
    """Lines start <= n < end of a definition, decorators and comments above it included; its body is the rest."""

    start: int
    body: int
    end: int


@lru_cache(maxsize=128)
def definitions(text: str) -> dict[str, list[Span]]:
    """Dotted name -> every class, function and assignment of that name. NotPython if the text cannot be parsed.

    A definition below `if`, `try` or `with` belongs to the scope around it.
    """
    lines = text.split("\n")
    found: dict[str, list[Span]] = {}

    def visit(body: Iterable[ast.AST], prefix: str) -> None:
        for node in _statements(body):
            if isinstance(node, Definition):
                found.setdefault(prefix + node.name, []).append(_span(node, lines))
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        end = node.end_lineno or node.lineno
                        found.setdefault(prefix + target.id, []).append(Span(node.lineno - 1, end, end))

    visit(parse(text).body, "")
    return found


def _span(node: Definition, lines: list[str]) -> Span:
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    while start and lines[start - 1].strip()[:1] in ("", "#"):
        start -= 1
    end = last = node.end_lineno or node.lineno
    while last < len(lines) and lines[last].strip()[:1] in ("", "#"):
        last += 1
        if lines[last - 1].lstrip() and lines[last - 1].index("#") > node.col_offset:
            end = last
    return Span(start, max(node.lineno, node.body[0].lineno - 1), end)


def find_in_scope(text: str, scope: str, lines: str) -> list[int]:
    """Where `lines` stand inside the one class or function `scope` of `text`.

    At top level ("") a match starts outside the body of every class and function. NotPython if there are matches in
    a text that cannot be parsed.
    """
    found = find_lines(text, lines)
    if not found:
        return []
    spans = definitions(text)
    if not scope:
        bodies = [span for named in spans.values() for span in named]
        return [at for at in found if not any(span.body <= at < span.end for span in bodies)]
    (span,) = spans[scope]
    return [at for at in found if span.start <= at and at + lines.count("\n") <= span.end]


def scope_lines(text: str, scope: str) -> tuple[int, list[str]]:
    """(0-based number of the first line, the lines) of a scope, or of the file if the scope is not there once."""
    lines = text.split("\n")
    try:
        (span,) = definitions(text).get(scope, [])
    except ValueError:
        return 0, lines
    return span.start, lines[span.start : span.end]


# Near misses: what stands where something else was expected.


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
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(at: int) -> float:
        matcher.set_seq1("\n".join(lines[at : at + size]) + "\n")
        return matcher.ratio()

    best, at = max((likeness(at), at) for at in likely)
    return best, start + at, lines[at : at + size]


def _grams(text: str) -> Counter[str]:
    return Counter(text[i : i + 3] for i in range(len(text) - 2))


def near_miss(text: str, scope: str, wanted: str) -> str:
    """The wanted lines against the nearest that are there, as a diff; starts on a line of its own."""
    _, at, found = nearest(text, scope, wanted)
    expected = wanted.splitlines()
    diff = difflib.unified_diff(expected, found, "expected", f"found at line {at + 1}", n=len(expected), lineterm="")
    return "".join("\n" + line for line in diff)


# What whole lines, cut from a file, may lack to be a module: a body, a call, a literal or a signature around them.
_AROUND = [("", ""), ("", "pass"), ("f(_,\n", "\n)"), ("{**_,\n", "\n}"), ("def f(_,\n", "\n): pass")]
_AROUND += [("from f import (_,\n", "\n)"), ("f(_, ", ""), ("def f(_, ", "pass")]


def same_code(text: str, scope: str, wanted: str) -> int | None:
    """The 1-based line of a scope at which the wanted lines stand in another layout or with other comments.

    None if the code itself differs; NotPython if that cannot be told; ImportError without libcst.
    """
    from libcst.metadata import MetadataWrapper, PositionProvider

    if scope and len(definitions(text).get(scope, ())) != 1:
        return None
    start, lines = scope_lines(text, scope)
    wrapper = MetadataWrapper(_lossless("\n".join(lines) + "\n"))
    nodes, there = zip(*_code(wrapper.module))
    for sought in _readings(wanted):
        for at in range(len(there) - len(sought) + 1):
            if there[at : at + len(sought)] == sought:
                return start + wrapper.resolve(PositionProvider)[nodes[at]].start.line
    return None


def _lossless(text: str) -> Any:
    import libcst

    try:
        return libcst.parse_module(textwrap.dedent(text))
    except (libcst.ParserSyntaxError, RecursionError):
        raise NotPython("cannot be read by libcst") from None


def _readings(wanted: str) -> list[tuple[tuple[str, str], ...]]:
    """The code of lines cut from a file, once for each kind of a part of Python as which they can be read."""
    found, wanted = [], textwrap.dedent(wanted)
    for before, after in _AROUND:
        with contextlib.suppress(NotPython):
            inner = " " * 80 if after == "pass" else ""
            shapes = [shape for _, shape in _code(_lossless(before + wanted + inner + after))]
            first = shapes.index(("Name", "_")) + 1 if before else 0
            last = shapes.index(("Pass", "")) if "pass" in after else len(shapes)
            if sought := _balanced(shapes[first:last]):
                found.append(tuple(sought))
    if not found:
        raise NotPython("not a part of Python")
    return found


_END = ("end", "")


def _balanced(shapes: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without the ends of what began before these."""
    shapes = list(dropwhile(lambda shape: shape == _END, shapes))
    depths = accumulate(-1 if shape == _END else 1 for shape in shapes)
    return [shape for shape, depth in zip(shapes, takewhile(lambda depth: depth >= 0, depths))]


def _code(node: Any) -> Iterator[tuple[Any, tuple[str, str]]]:
    """(node, what it is) of a libcst tree without its layout, in the order of the text; `_END` closes each."""
    import libcst as cst

    layout: tuple[type, ...] = (
        cst.BaseParenthesizableWhitespace,
        cst.TrailingWhitespace,
        cst.EmptyLine,
        cst.Newline,
        cst.Comment,
    )
    layout += (cst.Comma, cst.Semicolon, cst.LeftParen, cst.RightParen, cst.LeftSquareBracket, cst.RightSquareBracket)
    if isinstance(node, (*layout, cst.LeftCurlyBrace, cst.RightCurlyBrace)):
        return
    wrapper = isinstance(node, cst.Module | cst.BaseSuite | cst.SimpleStatementLine | cst.Expr | cst.Arg | cst.Element)
    string = isinstance(node, cst.SimpleString | cst.ConcatenatedString)
    value = repr(node.evaluated_value) if string else getattr(node, "value", "")
    decorators = [child for child in node.children if isinstance(child, cst.Decorator)]
    for child in decorators:
        yield from _code(child)
    if not wrapper:
        yield node, ("string" if string else type(node).__name__, value if isinstance(value, str) else "")
    for child in () if string else node.children[len(decorators) :]:
        if child not in decorators:
            yield from _code(child)
    if not wrapper:
        yield node, _END


# Markers: syntax that shows that a release has a feature.


def has_marker(text: str, scope: str, marker: str) -> bool:
    """Whether a node in the scope, as `ast.unparse` spells it, starts with the marker's text.

    A definition is spelled without its decorators. A scope that is not there shows nothing.
    """
    if not all(word in text for word in re.findall(r"\w+", marker)) or syntax_error(text):
        return False
    nodes = (node for found in _scopes(parse(text), scope) for node in ast.walk(found))
    return any(_spelled(node).startswith(marker) for node in nodes if isinstance(node, ast.stmt | ast.expr | ast.arg))


def _spelled(node: ast.AST) -> str:
    if isinstance(node, Definition):
        node = copy.copy(node)
        node.decorator_list, node.body = [], []
    return ast.unparse(node)


def _scopes(tree: ast.Module, dotted: str) -> list[Any]:
    scopes: list[Any] = [tree]
    for name in filter(None, dotted.split(".")):
        inner = (node for scope in scopes for node in _statements(scope.body))
        scopes = [node for node in inner if isinstance(node, Definition) and node.name == name]
    return scopes


# Imports: does every vLLM name that our text uses exist in the tree?


@lru_cache(maxsize=256)
def imports(text: str, path: str) -> frozenset[tuple[str, str | None]]:
    """(module, name) of each vLLM import of a file; the name is None for `import module`."""
    package = path.split("/")[:-1]
    found: set[tuple[str, str | None]] = set()
    for node in _all_statements(parse(text).body):
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


@lru_cache(maxsize=256)
def _names(text: str) -> frozenset[str]:
    """Names that a module binds when it is imported; "*" if it takes what another one has."""
    names: set[str] = set()
    for statement in _statements(parse(text).body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        elif isinstance(statement, Definition):
            names.add(statement.name)
        else:
            heads = [getattr(statement, "target", None), *getattr(statement, "items", ())]
            nodes = [node for head in heads if head for node in ast.walk(head)]
            nodes += [] if hasattr(statement, "body") else ast.walk(statement)
            names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return frozenset(names)


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
