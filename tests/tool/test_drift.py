"""The drift check: its readers, the matrix over vLLM's real wheels, exit codes and what it prints."""

import functools
import http.server
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import zipfile
from pathlib import Path

import pytest

import _drift
from _patchlib import Problem
from patches import PATCHES
from tests.support.trees import REPO
from tests.tool.patching import call, patch_set

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
        server.handle_error = lambda *_: None  # readers that have what they want hang up
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
    with pytest.raises(Problem, match=r"answers no ranged reads; download the wheel .* PIP_FIND_LINKS"):
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
    with pytest.raises(Problem, match=r"has no tag v0.30.0; fetch it with git -C"):
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
    with pytest.raises(Problem, match=r"git could not read vllm/a.py"):
        read("vllm/a.py")


def test_tree_reader(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_bytes(b"a\r\n")
    read = _drift.tree_reader(tmp_path)
    assert [read("vllm/__init__.py"), read("vllm/b.py"), read("vllm/__init__.py/c.py")] == [b"a\r\n", None, None]
    with pytest.raises(Problem, match="--tree takes the folder that contains vllm/"):
        _drift.tree_reader(tmp_path / "vllm")


# Real releases, over the network: each file of each wheel is fetched once, for all the tests below.

VERSIONS = ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

# The first release whose own source has it, as the patches say; None for never. Before that it is APPLY on the versions
# that the patches fit, and MISSING on later ones.
SHIPPED_SINCE = {
    **{patch.name: patch.shipped_in for patch in PATCHES},
    "dflash2/configs/": None,
    "dflash2/": "0.28.0",
    "dflash2/sample/": "0.28.0",
    "dflash2/spec_decode/dflash2/": "0.28.0",
    "dflash2/layers/dflash2/": None,
    "dflash2/beam/": "0.33.0",
    "dflash2/beam/nvidia/": "0.33.0",
}


def expected(name, version):
    since = SHIPPED_SINCE[name]
    if since and VERSIONS.index(version) >= VERSIONS.index(since):
        return "SHIPPED"
    return "APPLY" if version in ("0.27.0", "0.27.1") else "MISSING"


class Surveyed:
    """What one drift check over the index found, how many bytes of wheels it read, what it opened for writing."""

    def __init__(self):
        self.bytes, self.written, watching = 0, [], True

        def audit(event, arguments):
            if watching and event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.written.append(str(arguments[0]))

        def count(response, *_, **__):
            self.bytes += int(response.headers.get("Content-Length", 0))

        def counted(index, url):
            opened = session(index, url)
            opened.hooks["response"].append(count)
            return opened

        session = _drift.Index._session
        sys.addaudithook(audit)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_drift.Index, "_session", counted)
            patch.setattr(sys, "dont_write_bytecode", True)
            self.patch_set = patch_set()
            versions = [*VERSIONS, "0.26.0", "9.9.9"]
            self.results = _drift.survey_all(_drift.how_to_read(versions, None, None), versions, self.patch_set)
        watching = False


@pytest.fixture(scope="session")
def surveyed():
    return Surveyed()


@pytest.mark.network
@pytest.mark.parametrize("version", VERSIONS)
def test_state_of_every_patch_on_every_release(surveyed, version):
    report = surveyed.results[version]
    assert not isinstance(report, str), report
    assert {row.name: row.state for row in report.patches} == {name: expected(name, version) for name in SHIPPED_SINCE}
    assert report.verdict == ("APPLY" if version < "0.28" else "SHIPPED")


def test_every_folder_is_in_the_table():
    assert list(SHIPPED_SINCE) == [*(patch.name for patch in PATCHES), *patch_set().folders]


@pytest.mark.network
def test_it_reads_megabytes_and_writes_nothing(surveyed):
    assert 500_000 < surveyed.bytes / (len(VERSIONS) + 1) < 5_000_000
    assert [path for path in surveyed.written if path != os.devnull] == []


def command(surveyed, versions, *arguments):
    """What the command makes of these versions' results, which are not read again."""
    with pytest.MonkeyPatch.context() as patch:
        results = {version: surveyed.results[version] for version in versions}
        patch.setattr(_drift, "survey_releases", lambda *_: results)
        return call(None, "--drift", *versions, *arguments)


@pytest.mark.network
def test_exit_codes_over_the_index(surveyed):
    def code(*versions):
        return command(surveyed, versions).code

    assert code(*VERSIONS) == 0
    assert code("0.33.0", "0.26.0") == 2
    assert code("0.33.0", "0.26.0", "9.9.9") == 3


@pytest.mark.network
def test_an_unsupported_and_an_unknown_version(surveyed):
    results = {version: surveyed.results[version] for version in ("0.26.0", "9.9.9")}
    assert results["9.9.9"] == "vllm 9.9.9 is not on the index that pip is configured for"
    assert results["0.26.0"].message.startswith("vLLM 0.26.0 is not supported: the patches fit 0.27.0 and 0.27.1")
    printed = _drift.lines(results, surveyed.patch_set)
    assert printed[0].split() == ["patch", "0.26.0", "9.9.9"]
    assert printed[-1] == "Drifted: 0.26.0; could not be read: 9.9.9."
    assert _drift.faults(results)[-1].startswith("9.9.9: vllm 9.9.9 is not on")


@pytest.mark.network
def test_what_is_printed(surveyed):
    results = {version: surveyed.results[version] for version in VERSIONS}
    printed = _drift.lines(results, surveyed.patch_set)
    rows = printed[: printed.index("")]
    assert [row.split()[0] for row in rows] == ["patch", *SHIPPED_SINCE, "verdict"]
    starts = [rows[0].index(version) for version in VERSIONS]
    assert all(row[start - 1] == " " and row[start] != " " for row in rows for start in starts)
    (newest,) = [line for line in printed if line.startswith("0.33.0 ships")]
    further = [patch.name for patch in PATCHES if not patch.core]
    lost = [name for name in further if SHIPPED_SINCE[name] is None]
    assert newest.endswith(f"moving to it loses {len(lost)} ({', '.join(lost)}).")
    had = [name for name in further if (SHIPPED_SINCE[name] or "1") <= "0.31.0"]
    summary = f"ships {len(had)} of our {len(further)} further fixes ({', '.join(had)})"
    assert summary in next(line for line in printed if "0.31.0 ships" in line)
    assert not [line for line in printed if line.startswith("0.27.1 ships")]
    assert printed[-1] == (
        "Can be patched: 0.27.0, 0.27.1; ships DFlash2: 0.28.0, 0.29.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0."
    )
    assert _drift.faults(results) == []


@pytest.mark.network
def test_json(surveyed):
    given = command(surveyed, surveyed.results, "--json").json()
    assert list(given) == ["versions", "exit_code"] and given["exit_code"] == 3
    assert list(given["versions"]) == [*VERSIONS, "0.26.0", "9.9.9"]
    assert [given["versions"][version]["verdict"] for version in ("0.27.1", "0.33.0", "0.26.0", "9.9.9")] == [
        "APPLY",
        "SHIPPED",
        "DRIFT",
        None,
    ]
    for version, single in given["versions"].items():
        assert set(single) == {"verdict", "exit_code", "version", "message", "patches"}
        assert single["version"] == version
        for row in single["patches"]:
            assert set(row) == {"name", "state", "files", "detail", "shipped_in"}


# The command, on wheels, trees and clones made of the installed vLLM 0.27.1


def only(folder):
    """An environment in which pip knows no index but the wheels of a folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**env, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def drift(*arguments, env=None):
    return subprocess.run(
        [sys.executable, REPO / "apply_all.py", "--drift", *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
    )


def sources(site, change=lambda data: data):
    return {path.relative_to(site).as_posix(): change(path.read_bytes()) for path in site.glob("vllm/**/*.py")}


def test_wheel_with_carriage_returns(pristine, tmp_path):
    write_wheel(tmp_path, "0.27.1", sources(pristine, lambda data: data.replace(b"\n", b"\r\n")))
    done = drift("0.27.1", "v0.27.1", "--json", env=only(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    given = json.loads(done.stdout)
    assert given["exit_code"] == 0 and list(given["versions"]) == ["0.27.1"]
    assert given["versions"]["0.27.1"]["verdict"] == "APPLY"


def test_tree(pristine):
    done = drift("0.27.1", "--tree", pristine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nCan be patched: 0.27.1.\n")
    refused = drift("0.27.0", "0.27.1", "--tree", pristine)
    assert refused.returncode == 3
    assert refused.stderr == "0.27.0, 0.27.1: --tree holds one version, 2 are named: 0.27.0, 0.27.1\n"


def test_patched_tree(patched):
    assert drift("0.27.1", "--tree", patched).stdout.endswith("\nPatched already: 0.27.1.\n")


def test_git(pristine, clone):
    """One anchor of one tag differs: that tag drifts, by name, and the other one does not."""
    files = sources(pristine)
    hunk = next(patch for patch in PATCHES if patch.name == "causality").hunks[0]
    word = hunk.old.encode().replace(b"override", b"overrule", 1)
    drifted = {**files, hunk.file: files[hunk.file].replace(hunk.old.encode(), word)}
    folder = clone({"0.27.0": drifted, "0.27.1": files})
    done = drift("0.27.0", "0.27.1", "--git", folder)
    assert done.returncode == 2
    assert done.stdout.endswith("\nCan be patched: 0.27.1; drifted: 0.27.0.\n")
    assert done.stderr.startswith(f"0.27.0 causality DRIFT: {hunk.file}: hunk 1 of causality, in {hunk.scope}: ")
    assert done.stderr.count("\n") == 1
    missing = drift("0.27.1", "9.9.9", "--git", folder)
    assert missing.returncode == 3
    assert missing.stderr == f"9.9.9: {folder} has no tag v9.9.9; fetch it with git -C {folder} fetch --tags\n"


def test_without_the_libraries(tmp_path):
    """A user who installed the tool's requirements only is told what --drift needs."""
    code = (
        "import sys; sys.modules['unearth'] = None; import apply_all; sys.exit(apply_all.main(['--drift', '0.28.0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=only(tmp_path), capture_output=True, text=True)
    assert done.returncode == 3
    assert "--drift needs unearth; run: " in done.stderr and "requirements-drift.txt" in done.stderr


def test_bar_on_a_terminal_only(tmp_path):
    write_wheel(tmp_path, "0.28.0", {"vllm/__init__.py": b""})
    command = [sys.executable, REPO / "apply_all.py", "--drift", "0.28.0"]
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    with subprocess.Popen(command, env=only(tmp_path), stdout=subprocess.DEVNULL, stderr=end) as process:
        os.close(end)
        seen = b""
        try:
            while part := os.read(terminal, 1024):
                seen += part
        except OSError:
            pass  # Linux's way to say that the other end is closed
    os.close(terminal)
    assert process.returncode == 2
    assert b"0/1" in seen and b"version" in seen
    piped = subprocess.run(command, env=only(tmp_path), capture_output=True)
    assert piped.returncode == 2
    assert b"0/1" not in piped.stderr + piped.stdout


# The scheduled job


def job_script(job, step):
    yaml = pytest.importorskip("yaml", reason="PyYAML, which vLLM brings, reads the workflow")
    workflow = yaml.safe_load((REPO / ".github/workflows/drift.yml").read_text())
    assert {"schedule", "workflow_dispatch"} <= set(workflow[True])  # YAML 1.1 reads `on` as true
    return next(each["run"] for each in workflow["jobs"][job]["steps"] if each.get("name") == step)


def run_job(script, folder, versions=""):
    """The arguments that a job's script gives to apply_all.py, with this `python` instead of a real one."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -m ]; then echo "vllm (0.28.0)"; echo "Available versions: 0.28.0, 0.27.1, 0.27.0, 0.9.2"; '
        "else shift; echo $*; fi\n"
    )
    python.chmod(0o755)
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "ASKED": versions}
    return subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_scheduled_job_for_releases(tmp_path):
    script = job_script("releases", "Compare with the wheels")
    assert run_job(script, tmp_path) == "--drift 0.27.0 0.27.1 0.28.0\n"


def test_scheduled_job_for_tags(clone, tmp_path):
    tags = ("0.9.2", "0.26.0", "0.27.0", "0.28.0rc1", "0.27.1", "0.28.0", "0.29.0rc1")
    clone({tag: {"vllm/a.py": tag.encode()} for tag in tags}).rename(tmp_path / "vllm.git")
    script = job_script("tags", "Compare with the tags")
    assert run_job(script, tmp_path) == "--drift 0.27.0 0.27.1 0.28.0 0.29.0rc1 --git vllm.git\n"


def test_scheduled_job_for_versions_that_were_asked_for(tmp_path):
    script = job_script("releases", "Compare with the wheels")
    assert run_job(script, tmp_path, "0.30.0 0.31.0") == "--drift 0.30.0 0.31.0\n"
