"""What the patch tool's tests share: small private trees of the real vLLM 0.27.1, and the tool run in this process.

The tool itself says which files it needs: whatever a survey and an application ask for is copied. In one process
no text is parsed twice, so that an application to such a tree takes a fraction of a second.
"""

import contextlib
import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import _patchlib
import _patchtext
import _tree
import apply_all
from patches import INSTALLED, PATCHES

REPO = Path(apply_all.__file__).resolve().parent
SOURCE = _tree.reader(REPO)
CAUSALITY = "vllm/model_executor/models/qwen3_dflash.py"
HOME = "vllm/_dflash2_patch"
PYTHON = sys.executable


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)

    def states(self):
        return {row["name"]: row["state"] for row in self.json()["patches"]}


def call(*arguments, patch_set=None):
    """apply_all.py in this process, with this copy's patches or with others."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    own = apply_all.own_patches
    if patch_set is not None:
        apply_all.own_patches = lambda: patch_set
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = apply_all.main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    finally:
        apply_all.own_patches = own
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    assert "Traceback" not in err
    return Result(code, out, err)


def snapshot(root):
    """Everything below a folder that a write would change: bytes, mode, time and identity of each file."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        found[path.relative_to(root).as_posix()] = (data, info.st_mode, info.st_mtime_ns, info.st_ino)
    return found


def contents(root):
    """Path -> bytes of every file below a folder, None for a folder."""
    paths = sorted(Path(root).rglob("*"))
    return {path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


def patch_set(patches=PATCHES, installed=INSTALLED, source=SOURCE):
    return _patchlib.load(patches, installed, source)


EXTRA = "vllm/extra/of_an_earlier_version.py"


def older_patch_set():
    """An earlier version of this tool: other text in a hunk, other modules, a patch fewer, a file and a folder more."""
    first, *others = PATCHES[:-1]
    hunk = first.hunks[0]
    early = replace(first, hunks=(replace(hunk, new=hunk.new + "    # an earlier version\n"), *first.hunks[1:]))
    installed = {**INSTALLED, "dflash2/extra.py": EXTRA}

    def source(path):
        return b"" if path == "dflash2/extra.py" else SOURCE(path) + b"# an earlier version\n"

    return patch_set([early, *others], installed, source)


def edit_file(root, path, old, new):
    """What another tool does: replace text in a file of the tree."""
    place = root / path
    text = place.read_bytes().decode()
    assert old in text, f"{path} does not hold {old!r}"
    place.write_bytes(text.replace(old, new, 1).encode())


def edit_hunk(root, hunk, there, line, other):
    """Change one line of the hunk's old or new text, whichever `there` is, where it is in its scope."""
    text = (root / hunk.file).read_text()
    (at,) = _patchtext.places(text, hunk.scope, there)
    lines = text.splitlines(keepends=True)
    at += there.splitlines(keepends=True).index(line)
    assert lines[at] == line
    (root / hunk.file).write_text("".join([*lines[:at], other, *lines[at + 1 :]]))
