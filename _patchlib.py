"""The patch tool's core: what a patch is, what state a tree is in, and what would be written.

Text in, verdict out. A tree is reached only through a function that maps a path to bytes, so a
site-packages folder, a wheel on an index, a checkout and a git tag are all judged alike, and nothing
here can write. `_tree.py` holds the half that touches a disk.
"""

import ast
import difflib
import hashlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, combinations

Read = Callable[[str], bytes | None]

SUPPORTED = ("0.27.0", "0.27.1")
STATES = ("DRIFT", "PARTIAL", "OUTDATED", "APPLY", "NOOP", "SHIPPED", "MISSING")  # the worst first
EXIT_CODES = {"DRIFT": 2, "PARTIAL": 2, "OUTDATED": 1, "APPLY": 1, "NOOP": 0, "SHIPPED": 0}

# Our record and the originals it keeps, inside the tree so that they travel with it.
HOME = "vllm/_dflash2_patch"
RECORD = f"{HOME}/record.json"

EDITED = "edited by someone else"


class Problem(Exception):
    """Something a user can cause: the message says what it is and what to do.

    verdict  of the tree (PARTIAL or DRIFT), None where the environment or our own data is at fault
    """

    def __init__(self, message: str, verdict: str | None = None):
        super().__init__(message)
        self.verdict = verdict
        self.exit_code = EXIT_CODES[verdict] if verdict else 3


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
    folders  row name (the source's top folder) -> its destinations
    digest   changes whenever a byte that would be written changes
    """

    patches: tuple[Patch, ...]
    files: dict[str, bytes]
    folders: dict[str, tuple[str, ...]]
    digest: str

    def hunks(self, file: str | None = None) -> list[Hunk]:
        """All hunks, or those of one file."""
        return [hunk for patch in self.patches for hunk in patch.hunks if file in (None, hunk.file)]


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
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "version": self.version,
            "message": self.message,
            "patches": rows,
        }


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
        row = path.split("/")[0] + "/"
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
        if fault := _path_fault(destination):
            raise Problem(f"{path}: {fault}")
        if destination in files or destination in patched:
            raise Problem(f"{path}: {destination} is written twice")
        if destination.endswith(".py"):
            # A checkout with CRLF endings must install the same bytes as any other.
            data = data.replace(b"\r\n", b"\n")
            if error := _syntax_error(data.decode("utf-8", "replace")):
                raise Problem(f"{path}: not Python ({error})")
        files[destination] = data
    return files


def _path_fault(path: str) -> str | None:
    parts = path.split("/")
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
        if fault := _path_fault(file) or _scope_fault(name, allow_empty=False):
            return f"defines: {fault}"
    for sign in (sign for signs in patch.shipped for sign in signs):
        if fault := _path_fault(sign.file) or _scope_fault(sign.scope) or _pattern_fault(sign.pattern):
            return f"sign {sign.pattern!r}: {fault}"
    if () in patch.shipped:
        return "shipped holds an empty alternative, which is always true"
    return None


def _hunk_fault(hunk: Hunk) -> str | None:
    if fault := _path_fault(hunk.file) or _scope_fault(hunk.scope):
        return fault
    if not hunk.old.strip():
        return "old text is empty"
    if not hunk.new.strip():
        return "new text is empty; to delete lines, keep a neighbouring one in both texts"
    if hunk.old == hunk.new:
        return "old and new text are equal"
    if not hunk.old.endswith("\n") or not hunk.new.endswith("\n"):
        return "old and new text must be whole lines, the last one ended too"
    if is_python_part(hunk.old) and not is_python_part(hunk.new):
        return "the result is not Python"
    return None


def _scope_fault(scope: str, allow_empty: bool = True) -> str | None:
    if (scope or not allow_empty) and not all(part.isidentifier() for part in scope.split(".")):
        return f"{scope!r} is not a dotted name"
    return None


def _pattern_fault(pattern: str) -> str | None:
    try:
        _pattern(pattern)
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


# What a hunk's text may be a part of: a statement, a header or a continuation of one, arguments, a literal.
_SURROUNDINGS = (
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
    ("_(", ""),
    ("", ")"),
)


def is_python_part(text: str) -> bool:
    """Whether whole lines, cut from a file, may be Python there. False also where it cannot be told."""
    text = textwrap.dedent(text)
    lines = [line for line in text.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    opened = "".join(" " * indent + "if _:\n" for indent in sorted({i for i in indents if i < indents[0]}))
    last = " " * (indents[-1] + 1)
    return any(
        _syntax_error(before + opened + text + (last + after if after == "pass" else after), ast.parse) is None
        for before, after in _SURROUNDINGS
    )


# Text: where things are in it.


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Many releases are surveyed in one run and a tree takes megabytes, so the oldest are forgotten.
@lru_cache(maxsize=128)
def _tree(text: str) -> ast.Module:
    return ast.parse(text.removeprefix("\ufeff"))


def _syntax_error(text: str, parse=_tree) -> str | None:
    try:
        parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        return str(error)
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
            if isinstance(node, (libcst.ClassDef, libcst.FunctionDef)):
                path.append((node, len(self.tokens)))
            elif path and node is path[-1][0].body:
                bodies[id(path[-1][0])] = len(self.tokens)
            elif isinstance(node, (libcst.Assign, libcst.AnnAssign)):
                targets = [t.target for t in node.targets] if isinstance(node, libcst.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, libcst.Name):
                        marks.append((dotted() + target.value, *[len(self.tokens)] * 3))

        def after_codegen(self, node):
            if path and node is path[-1][0]:
                name = dotted().rstrip(".")
                _, start = path.pop()
                marks.append((name, start, bodies[id(node)], len(self.tokens)))

    def dotted() -> str:
        return "".join(node.name.value + "." for node, _ in path)

    path, bodies, marks = [], {}, []
    try:
        module = libcst.parse_module(text.removeprefix("\ufeff").removesuffix("\n") + "\n")
    except libcst.ParserSyntaxError as error:
        raise Problem(f"not Python (line {error.raw_line})", "DRIFT") from None
    state = Marks(default_indent=module.default_indent, default_newline=module.default_newline)
    module._codegen(state)
    lines = [0, *accumulate(token.count("\n") for token in state.tokens)]
    spans: dict[str, list[Span]] = {}
    for name, *places in marks:
        spans.setdefault(name, []).append(Span(*(lines[place] for place in places)))
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


def edit(data: bytes, edits: list[tuple[int, Hunk]]) -> bytes:
    """Replace, at each 0-based line, a hunk's old lines by its new ones, with the line ends that were there."""
    lines = data.split(b"\n")
    for at, hunk in sorted(edits, key=lambda pair: pair[0], reverse=True):
        carriage = b"\r" if lines[at].endswith(b"\r") else b""
        new = hunk.new.removesuffix("\n").split("\n")
        lines[at : at + hunk.old.count("\n")] = [line.encode() + carriage for line in new]
    return b"\n".join(lines)


# Signs: syntax that shows that a release has a feature.


def has_sign(text: str, sign: Sign) -> bool:
    """Whether the text shows the sign. A scope that is not there shows nothing."""
    try:
        tree = _tree(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    pattern = _pattern(sign.pattern)
    direct = isinstance(pattern, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    for scope in _scopes(tree, sign.scope):
        nodes = _direct(scope.body) if direct else ast.walk(scope)
        if any(_matches(pattern, node) for node in nodes):
            return True
    return False


@lru_cache(maxsize=None)
def _pattern(text: str) -> ast.AST:
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


def imports(text: str, path: str) -> set[tuple[str, str | None]]:
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
    return {(module, name) for module, name in found if module.split(".")[0] == "vllm"}


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
            bound = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names |= {node.id for node in bound if isinstance(node.ctx, ast.Store)}
    return frozenset(names)


def resolves(read: Read, module: str, name: str | None) -> bool:
    """Whether `from module import name` finds something. A module with __getattr__ or a star is believed."""
    text = _module_text(read, module)
    if text is None:
        return False
    if name in (None, "*") or _module_text(read, f"{module}.{name}") is not None:
        return True
    return _syntax_error(text) is None and bool({name, "__getattr__", "*"} & _names(text))


def missing_imports(read: Read, path: str, before: str | None, after: str) -> list[str]:
    """vLLM names that `after` imports, that `before` did not, and that the tree lacks."""
    ours = imports(after, path) - (imports(before, path) if before else set())
    lacking = [(module, name) for module, name in sorted(ours, key=str) if not resolves(read, module, name)]
    return [f"from {module} import {name}" if name else f"import {module}" for module, name in lacking]


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
        for path in (*files, *record.folders, *filter(None, [record.wheel])):
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"it names {path}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Problem(f"{RECORD} is damaged ({error}): reinstall vLLM, then apply again", "PARTIAL") from None
    return record


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
    return [path for path, data in found.items() if _hash(data) not in record.files[path]]


def _hash(data: bytes | None) -> str | None:
    return None if data is None else sha256(data)


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


def _judge(read: Read, patch_set: PatchSet, record: Record | None) -> tuple[list[Row], bool]:
    """The rows, and whether this release ships the port itself."""
    ours = record is not None or _mostly_ours(read, patch_set)
    # Text that we inserted is no sign that upstream has a feature.
    before = _without_ours(read, patch_set, record) if ours else read
    applied = set(record.patches) if record else set()
    shipped = {p.name for p in patch_set.patches if p.name not in applied and ships(before, p)}
    core = {p.name for p in patch_set.patches if p.core}
    if not ours and core and core <= shipped and any(read(path) is not None for path in patch_set.files):
        return _shipping_rows(read, patch_set, shipped), True
    folders = [_folder_row(read, patch_set, name, record) for name in patch_set.folders]
    installed = overall(row.state for row in folders) if folders else "NOOP"
    rows = []
    for patch in patch_set.patches:
        if patch.name in shipped:
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
    return text is not None and has_sign(text, sign)


def _mostly_ours(read: Read, patch_set: PatchSet) -> bool:
    """Without a record: a line or two may be the same upstream, most of our text is not."""
    hunks = patch_set.hunks()
    found = [hunk for hunk in hunks if hits(_text(read, hunk.file) or "", hunk.new)]
    return len(found) * 2 > len(hunks)


def _without_ours(read: Read, patch_set: PatchSet, record: Record | None) -> Read:
    """The tree as it was before us: kept originals, or our text taken out where there is no record."""

    def before(path: str) -> bytes | None:
        if record and path in record.files:
            return original(read, record, path)
        text = _text(read, path)
        if text is None or path in patch_set.files:
            return None
        data = text.encode()
        # The longest first: one hunk's text may hold another's.
        for hunk in sorted(patch_set.hunks(path), key=lambda hunk: -len(hunk.new)):
            if len(found := hits(data.decode(), hunk.new)) == 1:
                data = edit(data, [(found[0], replace(hunk, old=hunk.new, new=hunk.old))])
        return data

    return _once(before)


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
    if record and all(_hash(read(path)) == record.files[path][1] for path in files):
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
            return lost, _scope_count(text, hunk.scope) + nearest(text, hunk)
        old, new = _old_and_new(text, hunk, beside)
    except Problem as error:
        return lost, str(error)
    if len(new) == 1 and not old:
        return "NOOP", "the new text is there"
    if applied and len(old) == 1 and not new:
        return "PARTIAL", "the original text is back"
    if applied:
        return "PARTIAL", EDITED + nearest(text, hunk, applied=True)
    if len(old) == 1 and not new:
        if _traces(text, hunk):
            return "PARTIAL", f"{EDITED}, or some of the new text is there already"
        return "APPLY", "the old text is there"
    if old or new:
        return "PARTIAL" if new else "DRIFT", f"the old text is there {len(old)} times, the new text {len(new)} times"
    if _closeness(text, hunk.new) > _closeness(text, hunk.old):
        return "PARTIAL", EDITED + nearest(text, hunk, applied=True)
    return "DRIFT", "the text to replace is not there" + nearest(text, hunk)


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
    old, there = set(hunk.old.splitlines()), set(_scope_lines(text, hunk.scope)[1])
    added = [line for line in hunk.new.splitlines() if len(line.strip()) > 8 and line not in old]
    return bool(added) and sum(line in there for line in added) * 2 > len(added)


def _scope_lines(text: str, scope: str) -> tuple[int, list[str]]:
    """(0-based number of the first line, the lines) of a scope, or of the file where it is not there once."""
    lines = text.split("\n")
    try:
        (span,) = outline(text).get(scope, [Span(0, 0, len(lines))])
    except (Problem, ValueError):
        return 0, lines
    return span.start, lines[span.start : span.end]


def _nearest_window(text: str, scope: str, wanted: str) -> tuple[float, int, list[str]]:
    """(likeness, 0-based line number, lines) of the piece of a scope that is most like the wanted lines."""
    start, lines = _scope_lines(text, scope)
    size = wanted.count("\n")
    words = Counter(re.findall(r"\w+", wanted))
    windows = [(at, lines[at : at + size]) for at in range(max(1, len(lines) - size + 1))]

    def shared(window) -> int:
        return sum((Counter(re.findall(r"\w+", "\n".join(window[1]))) & words).values())

    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)

    def likeness(window) -> float:
        matcher.set_seq1("\n".join(window[1]) + "\n")
        return matcher.ratio()

    likely = sorted(windows, key=shared, reverse=True)[:3]
    at, found = max(likely, key=likeness)
    return likeness((at, found)), start + at, found


def _closeness(text: str, hunk_text: str) -> float:
    return _nearest_window(text, "", hunk_text)[0]


def nearest(text: str, hunk: Hunk, applied: bool = False) -> str:
    """What was expected against the nearest text that is there, as a diff on lines of its own."""
    wanted = hunk.new if applied else hunk.old
    _, at, found = _nearest_window(text, hunk.scope, wanted)
    expected = wanted.splitlines()
    diff = difflib.unified_diff(expected, found, "expected", f"found at line {at + 1}", n=len(expected), lineterm="")
    return "".join("\n" + line for line in diff)


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
        changes[path] = edit(read(path), [(at, hunk) for at, hunk, _ in located])
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
        if text is None or (error := _syntax_error(text)):
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
    before = _without_ours(read, patch_set, read_record(read))
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
