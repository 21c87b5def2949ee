"""Writes docs/PATCHES.md from patches/: `python -m docs.patches_page`."""

import importlib
import pkgutil
from pathlib import Path

import patches

PAGE = Path(__file__).with_name("PATCHES.md")

HEAD = """\
# What each patch is for

Written from [patches/](../patches) by `python -m docs.patches_page`; do not edit. The first patches are the port of
DFlash2 itself; the others are fixes that serving it on 0.27.1 needs. How to add or drop one:
[CONTRIBUTING.md](../CONTRIBUTING.md).

| patch | what it is for | in vLLM since |
| --- | --- | --- |
"""


def modules() -> dict:
    """{name of the patch: the module that holds it}."""
    found = (importlib.import_module(f"patches.{info.name}") for info in pkgutil.iter_modules(patches.__path__))
    return {module.PATCH.name: module for module in found}


def row(patch) -> str:
    return f"| [{patch.name}](#{patch.name}) | {patch.why} | {patch.shipped_in or 'no release'} |\n"


def section(patch, docstring: str) -> str:
    files = ", ".join(f"`{file}`" for file in sorted({hunk.file for hunk in patch.hunks}))
    drop = f"once vLLM {patch.shipped_in} is the oldest that you serve" if patch.shipped_in else "not yet"
    facts = f"- Edits: {files}\n- Upstream: {patch.upstream}\n- Can be dropped: {drop}\n"
    return f"\n## {patch.name}\n\n{docstring.strip()}\n\n{facts}"


def page() -> str:
    docstrings = {name: module.__doc__ for name, module in modules().items()}
    rows = "".join(row(patch) for patch in patches.PATCHES)
    return HEAD + rows + "".join(section(patch, docstrings[patch.name]) for patch in patches.PATCHES)


if __name__ == "__main__":
    PAGE.write_text(page())
