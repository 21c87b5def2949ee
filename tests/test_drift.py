"""The drift check: its readers, the matrix over vLLM's real wheels, exit codes and what it prints."""

import functools
import http.server
import io
import json
import os
import pty
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import _drift
from _patchlib import Problem

REPO = Path(__file__).resolve().parent.parent
GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "init.defaultBranch=main"]


@pytest.mark.parametrize(
    "listing, wanted",
    [
        ("", {}),
        ("global.index-url='https://a.invalid/simple'", {"index-url": "https://a.invalid/simple"}),
        ("global.cert='a'\n:env:.cert='b'\ninstall.cert='c'", {"cert": "b"}),
        ("install.cert='c'\nglobal.cert='a'", {"cert": "c"}),
        ("freeze.timeout='10'\nglobal.find-links='\\n/a\\n/b=c'", {"find-links": "\n/a\n/b=c"}),
    ],
)
def test_pip_options(listing, wanted):
    assert _drift.pip_options(listing) == wanted


def test_sources(tmp_path):
    options = {
        "index-url": "https://a.invalid/simple",
        "extra-index-url": f"{tmp_path}\nhttps://b.invalid/simple",
        "find-links": f"{tmp_path} {tmp_path}/nothing https://c.invalid/wheels",
    }
    assert _drift.sources(options) == (
        ["https://a.invalid/simple", tmp_path.as_uri(), "https://b.invalid/simple"],
        [tmp_path.as_uri(), "https://c.invalid/wheels"],
    )
    assert _drift.sources(options | {"no-index": "true"})[0] == []
    assert _drift.sources({})[0][0].startswith("https://")


def write_wheel(folder, version, files):
    wheel = folder / f"vllm-{version}-cp38-abi3-win_arm64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def index(**options):
    return _drift.Index({"no-index": "1", **{key.replace("_", "-"): str(value) for key, value in options.items()}})


def test_local_wheels(tmp_path):
    """Any platform's wheel is read, bytes as they are; a local version stands in where nothing else is."""
    write_wheel(tmp_path, "0.28.0", {"vllm/a.py": b"x = 1\r\n"})
    write_wheel(tmp_path, "0.28.0+cu129", {"vllm/a.py": b"other"})
    write_wheel(tmp_path, "0.29.0+cu129", {"vllm/a.py": b"local"})
    (tmp_path / "vllm-0.30.0.tar.gz").write_bytes(b"")
    (tmp_path / "vllm-0.31.0-py3-none-any.whl").write_bytes(b"not a zip")
    wheels = index(find_links=tmp_path)
    for version, data in (("0.28.0", b"x = 1\r\n"), ("0.29.0", b"local")):
        with wheels.open(version) as wheel:
            read = _drift.wheel_reader(wheel)
            assert (read("vllm/a.py"), read("vllm/b.py")) == (data, None)
    for version, message in (
        ("0.30.0", "vllm 0.30.0 is only as a source archive on"),
        ("0.31.0", "vllm-0.31.0-py3-none-any.whl could not be read: File is not a zip file"),
        ("9.9.9", "vllm 9.9.9 is not on the index"),
    ):
        with pytest.raises(Problem, match=message):
            wheels.open(version)


def test_nowhere_to_look():
    with pytest.raises(Problem, match="nowhere to look"):
        index()


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A package index with ranged reads and a login; notes what it sent."""

    def do_GET(self):
        if self.headers.get("Authorization") != "Basic dXNlcjpzZWNyZXQ=":
            return self.send_error(401)
        path = Path(self.translate_path(self.path))
        wanted = self.headers.get("Range")
        if not wanted or not self.server.ranged or not path.is_file():
            return super().do_GET()
        data = path.read_bytes()
        first, last = wanted.removeprefix("bytes=").split("-")
        start = int(first) if first else max(0, len(data) - int(last))
        part = data[start : int(last) + 1 if first else None]
        self.server.sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path):
    """A simple index on this machine, behind a login, with a 4 MB wheel of version 0.28.0."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    wheel = write_wheel(folder, "0.28.0", {"big.so": os.urandom(4_000_000), "vllm/a.py": b"x = 1\r\n"})
    (folder / "index.html").write_text(f'<a href="{wheel.name}#sha256=0">{wheel.name}</a>')
    handler = functools.partial(Ranges, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.sent, server.ranged = 0, True
        server.url = f"http://user:secret@127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_ranged_reads_with_a_login(server):
    with _drift.Index({"index-url": server.url}).open("0.28.0") as wheel:
        assert _drift.wheel_reader(wheel)("vllm/a.py") == b"x = 1\r\n"
    assert 0 < server.sent < 100_000


def test_server_without_ranged_reads(server):
    server.ranged = False
    with pytest.raises(Problem, match="answers no ranged reads; download the wheel .* PIP_FIND_LINKS"):
        _drift.Index({"index-url": server.url}).open("0.28.0")


def test_a_broken_server_is_a_sentence_without_the_password(server, tmp_path):
    wheels = _drift.Index({"index-url": server.url})
    next(tmp_path.glob("vllm/*.whl")).unlink()
    with pytest.raises(Problem, match="could not be read: 404") as error:
        wheels.open("0.28.0")
    assert "secret" not in str(error.value)


def test_an_index_that_cannot_be_reached():
    with pytest.raises(Problem, match="the package index could not be read"):
        _drift.Index({"index-url": "http://127.0.0.1:9/simple"})


# Trees and clones


def git(clone, *arguments):
    subprocess.run([*GIT, "-C", str(clone), *arguments], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path):
    """clone({version: {path: bytes}}) -> a git clone with a tag for each version and nothing checked out."""

    def make(versions):
        folder = tmp_path / "clone"
        folder.mkdir()
        git(folder, "init")
        for version, files in versions.items():
            git(folder, "rm", "-rq", "--ignore-unmatch", ".")
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            git(folder, "add", ".")
            git(folder, "commit", "-qm", version)
            git(folder, "tag", f"v{version}")
        git(folder, "rm", "-rq", ".")
        return folder

    return make


def test_git_reader(clone, tmp_path):
    folder = clone({"0.28.0": {"vllm/a.py": b"old\r\n"}, "0.29.0": {"vllm/a.py": b"new\n", "vllm/b.py": b""}})
    old, new = _drift.git_reader(folder, "0.28.0"), _drift.git_reader(folder, "0.29.0")
    assert [old("vllm/a.py"), old("vllm/b.py")] == [b"old\r\n", None]
    assert [new("vllm/a.py"), new("vllm/b.py")] == [b"new\n", b""]
    with pytest.raises(Problem, match="has no tag v0.30.0; fetch it with git -C"):
        _drift.git_reader(folder, "0.30.0")
    with pytest.raises(Problem, match="is not a git clone"):
        _drift.git_reader(tmp_path, "0.28.0")
    with pytest.raises(Problem, match="is not a folder"):
        _drift.git_reader(tmp_path / "nothing", "0.28.0")


def test_a_blob_that_git_cannot_fetch_is_not_a_missing_file(clone, tmp_path):
    folder = clone({"0.28.0": {"vllm/a.py": b"text"}})
    git(folder, "config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial.git"
    git(tmp_path, "clone", "--bare", "--filter=blob:none", folder.as_uri(), str(partial))
    read = _drift.git_reader(partial, "0.28.0")
    assert read("vllm/b.py") is None
    folder.rename(tmp_path / "gone")
    with pytest.raises(Problem, match="git could not read vllm/a.py"):
        read("vllm/a.py")


def test_tree_reader(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_bytes(b"a\r\n")
    read = _drift.tree_reader(tmp_path)
    assert [read("vllm/__init__.py"), read("vllm/b.py"), read("vllm/__init__.py/c.py")] == [b"a\r\n", None, None]
    with pytest.raises(Problem, match="--tree takes the folder that contains vllm/"):
        _drift.tree_reader(tmp_path / "vllm")
