"""The patch tool's core: what a patch is, what state a tree is in, and what would be written.

Text in, verdict out; only the last part of this file touches a disk.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hunk:
    """Replace `old` by `new`, once, inside one scope of one file.

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
