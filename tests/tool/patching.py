"""The patch tool run in this process, small trees to run it on, and what a test looks at afterwards."""

import contextlib
import io
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import _patchlib
import _site
import _source
import apply_all
from _patchlib import STATE_DIR, Hunk, Patch
from patches import INSTALLED, PATCHES

REPO = Path(apply_all.__file__).resolve().parent
PYTHON = sys.executable
SOURCE = _site.reader(REPO)
FILES = _site.list_installed(REPO, INSTALLED)
HOME = STATE_DIR
RECORD = f"{HOME}/record.json"

CAUSALITY = "vllm/model_executor/models/qwen3_dflash.py"
MODULE = "vllm/model_executor/models/qwen3_dflash2.py"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)

    @property
    def verdict(self):
        return self.json()["verdict"]

    def states(self):
        return {row["name"]: row["state"] for row in self.json()["patches"]}

    def detail(self, name):
        return next(row["detail"] for row in self.json()["patches"] if row["name"] == name)


def call(root, *arguments, patch_set=None):
    """apply_all.py --root `root` in this process, with this copy's patches or with others; None leaves --root out."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    own = apply_all.own_patches
    if patch_set is not None:
        apply_all.own_patches = lambda: patch_set
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = apply_all.main([*([] if root is None else ["--root", str(root)]), *map(str, arguments)])
    except SystemExit as error:
        code = error.code
    finally:
        apply_all.own_patches = own
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    assert "Traceback" not in err
    return Result(code, out, err)


def succeed(root, *arguments, **options):
    """`call`, which must exit with 0."""
    result = call(root, *arguments, **options)
    assert result.code == 0, result.out + result.err
    return result


def snapshot(root):
    """Everything below a folder that a write would change: bytes, mode, time and identity of each file."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        found[path.relative_to(root).as_posix()] = (data, info.st_mode, info.st_mtime_ns, info.st_ino)
    return found


def contents(root):
    """Path -> bytes of every file below a folder, its target for a link that leads nowhere, None for a folder."""

    def content(path):
        return path.read_bytes() if path.is_file() else None if path.is_dir() else os.readlink(path)

    return {path.relative_to(root).as_posix(): content(path) for path in sorted(Path(root).rglob("*"))}


@contextlib.contextmanager
def unchanged(root):
    """Nothing below the folder is touched meanwhile, not even its times."""
    before = snapshot(root)
    yield
    assert snapshot(root) == before


def patch_set(patches=PATCHES, installed=FILES, source=SOURCE):
    return _patchlib.load(patches, installed, source)


OURS = patch_set()


def row_of(path):
    """Name of the row that an installed file is part of."""
    return next(name for name, paths in OURS.folders.items() if path in paths)


def edit_file(root, path, old, new):
    """What another tool does: replace text in a file of the tree."""
    place = root / path
    text = place.read_bytes().decode()
    assert old in text, f"{path} does not hold {old!r}"
    place.write_bytes(text.replace(old, new, 1).encode())


def edit_hunk(root, hunk, there, line, other):
    """Change one line of the hunk's old or new text, whichever `there` is, where it is in its scope."""
    text = (root / hunk.file).read_text()
    (at,) = _source.find_in_scope(text, hunk.scope, there)
    lines = text.splitlines(keepends=True)
    at += there.splitlines(keepends=True).index(line)
    assert lines[at] == line
    (root / hunk.file).write_text("".join([*lines[:at], other, *lines[at + 1 :]]))


def crlf(path):
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))


def info(tree):
    """The dist-info folder of a tree's vLLM."""
    (folder,) = tree.glob("vllm*.dist-info")
    return folder


def set_version(tree, version):
    """The version that the tree's distribution names."""
    metadata = info(tree) / "METADATA"
    before = next(line for line in metadata.read_text().splitlines() if line.startswith("Version:"))
    metadata.write_text(metadata.read_text().replace(before, f"Version: {version}"))


def targets(patches=PATCHES):
    """The files of vLLM that the patches change."""
    return sorted({hunk.file for patch in patches for hunk in patch.hunks})


# Another version of this tool

EXTRA = "vllm/extra/of_another_version.py"


def another_patch_set():
    """Another version: other text in a hunk, other modules, a patch fewer, a file and a folder more."""
    first, *others = PATCHES[:-1]
    hunk = first.hunks[0]
    early = replace(first, hunks=(replace(hunk, new=hunk.new + "    # another version\n"), *first.hunks[1:]))

    def source(path):
        if path == "dflash2/extra.py":
            return b""
        data = SOURCE(path)
        return data + b"# another version\n" if data is not None else None

    return patch_set([early, *others], {**FILES, "dflash2/extra.py": EXTRA}, source)


# The least vLLM and the least patches that have one of each kind. An application takes milliseconds.

SMALL_FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = '0.27.1'\n",
    "vllm/a.py": "def f():\n    a()\n    b()\n    c()\n\n\nclass C:\n    def g(self):\n        return 1\n",
    "vllm/deep/__init__.py": "",
    "vllm/deep/b.py": "from vllm.a import f\n\nLIMIT = 1\n\n\ndef h():\n    return f()\n",
    "vllm-0.27.1.dist-info/METADATA": "Metadata-Version: 2.4\nName: vllm\nVersion: 0.27.1\n",
}
SMALL_PATCHES = (
    Patch(
        name="two-files",
        why="a hunk in a function and one at the top level",
        upstream="",
        shipped_in=None,
        hunks=(
            Hunk("vllm/a.py", "f", "    b()\n", "    b()\n    added_by_us()\n"),
            Hunk("vllm/deep/b.py", "", "LIMIT = 1\n", "LIMIT = 2\n"),
        ),
        core=True,
    ),
    Patch(
        name="method",
        why="imports a module of ours",
        upstream="",
        shipped_in=None,
        hunks=(
            Hunk(
                "vllm/a.py",
                "C.g",
                "        return 1\n",
                "        from vllm.new.inner.m import one\n\n        return one()\n",
            ),
        ),
        core=True,
    ),
)
SMALL_INSTALLED = {"d/__init__.py": "vllm/new/inner/__init__.py", "d/m.py": "vllm/new/inner/m.py"}
SMALL_SOURCES = {"d/__init__.py": b"", "d/m.py": b"from vllm.deep.b import h\n\n\ndef one():\n    return h()\n"}


def small_patch_set(version=1):
    """Version 1 is this tool's; version 0 has other text in two hunks and in a module, and a file more."""
    patches, installed, sources = SMALL_PATCHES, SMALL_INSTALLED, SMALL_SOURCES
    if version == 0:
        first, second = patches
        one, two = first.hunks
        hunks = (replace(one, new=one.new + "    by_another_version()\n"), replace(two, new="LIMIT = 3\n"))
        patches = (replace(first, hunks=hunks), second)
        installed = {**installed, "e/x.py": "vllm/extra/x.py"}
        sources = {**sources, "d/m.py": sources["d/m.py"] + b"# another version\n", "e/x.py": b""}
    return _patchlib.load(patches, installed, sources.get)


def make_small_tree(root):
    """Writes the least vLLM below `root`, with a RECORD of its wheel."""
    for path, text in SMALL_FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    wheel = "vllm-0.27.1.dist-info/RECORD"
    (root / wheel).write_text("".join(f"{path},,\n" for path in (*SMALL_FILES, wheel)))
    return root


def format_1(tree, patch_set):
    """Patches the tree as version 0.1.0 of the tool left it: originals kept beside a record that has no hunks."""
    before = {path: (tree / path).read_bytes() for path in targets(patch_set.patches)}
    wheel = info(tree) / "RECORD"
    name, listed = f"{info(tree).name}/RECORD", wheel.read_bytes()
    succeed(tree, patch_set=patch_set)
    shutil.rmtree(tree / HOME)
    ours = {f"{HOME}/originals/{path}.orig": data for path, data in {**before, name: listed}.items()}
    files = {path: (_source.sha256(data), _source.sha256((tree / path).read_bytes())) for path, data in before.items()}
    files |= {path: (None, _source.sha256(data)) for path, data in patch_set.files.items()}
    folders = {parent.as_posix() for path in (*patch_set.files, *ours) for parent in Path(path).parents if parent.parts}
    known = {parent.as_posix() for path in (*before, "vllm/_version.py", name) for parent in Path(path).parents}
    record = {
        "format": 1,
        "digest": "of version 0.1.0",
        "version": "0.27.1",
        "patches": [*(patch.name for patch in patch_set.patches), *patch_set.folders],
        "files": files,
        "folders": sorted(folders - known),
        "wheel": name,
    }
    ours[RECORD] = json.dumps(record, indent=1).encode()
    for path, data in ours.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    kept = [line for line in wheel.read_bytes().splitlines(keepends=True) if not line.startswith(f"{HOME}/".encode())]
    end = kept[0].removeprefix(kept[0].rstrip())
    wheel.write_bytes(b"".join([*kept, *(f"{path},,{len(data)}".encode() + end for path, data in ours.items())]))
