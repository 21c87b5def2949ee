"""The twenty ways in which tools of this kind have failed their users, each on the real vLLM 0.27.1."""

import keyword
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import _patchlib
import _patchtext
import _tree
from _patchlib import Hunk, Patch, Problem
from patches import INSTALLED, PATCHES
from tests.tool.patching import (
    CAUSALITY,
    EXTRA,
    HOME,
    PYTHON,
    REPO,
    SOURCE,
    call,
    contents,
    edit_file,
    edit_hunk,
    older_patch_set,
    patch_set,
    snapshot,
)

MODULE = INSTALLED["dflash2/qwen3_dflash2.py"]


def apply(tree, **options):
    result = call("--root", tree, **options)
    assert result.code == 0, result.out + result.err
    return result


# 1
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_01_one_word_of_an_anchor_differs(tree, patch):
    hunk = patch.hunks[-1]
    words = [word for word in re.findall(r"[A-Za-z]\w{2,}", hunk.old) if not keyword.iskeyword(word)]
    line = next(line for line in hunk.old.splitlines(keepends=True) if words[-1] in line)
    other = line.replace(words[-1], words[-1] + "x", 1)
    edit_hunk(tree, hunk, hunk.old, line, other)
    before = snapshot(tree)
    result = call("--root", tree, "--json")
    assert (result.code, result.json()["verdict"]) == (2, "DRIFT")
    (row,) = [row for row in result.json()["patches"] if row["name"] == patch.name]
    assert row["state"] == "DRIFT"
    assert hunk.file in row["detail"] and f"hunk {len(patch.hunks)} of {patch.name}" in row["detail"]
    assert "-" + line.rstrip("\n") in row["detail"].splitlines()
    assert "+" + other.rstrip("\n") in row["detail"].splitlines()
    assert snapshot(tree) == before


def test_01_says_so_to_people(tree):
    edit_file(tree, CAUSALITY, '.get("causal")', '.get("causality")')
    result = call("--root", tree)
    assert result.code == 2
    assert "causality" in result.out and "DRIFT" in result.out and "Nothing is written" in result.out
    assert '-    override = (getattr(config, "dflash_config", None) or {}).get("causal")' in result.err
    assert '+    override = (getattr(config, "dflash_config", None) or {}).get("causality")' in result.err


# 2
def test_02_someone_edits_our_text(patched_tree):
    edit_file(patched_tree, CAUSALITY, 'getattr(config, "is_causal", None)', 'getattr(config, "is_causal", False)')
    before = snapshot(patched_tree)
    result = call("--root", patched_tree, "--json")
    assert (result.code, result.json()["verdict"]) == (2, "PARTIAL")
    (row,) = [row for row in result.json()["patches"] if row["name"] == "causality"]
    assert row["state"] == "PARTIAL" and "edited by someone else" in row["detail"]
    assert "--revert" in result.json()["message"]
    refused = call("--root", patched_tree, "--revert")
    assert refused.code == 2 and CAUSALITY in refused.err and "--force" in refused.err
    assert snapshot(patched_tree) == before


def test_02_force_discards_the_edit(patched_tree, template):
    edit_file(patched_tree, CAUSALITY, 'getattr(config, "is_causal", None)', 'getattr(config, "is_causal", False)')
    assert call("--root", patched_tree, "--revert", "--force").code == 0
    assert contents(patched_tree) == contents(template)


@pytest.mark.parametrize("keep_record", [True, False])
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_02_an_edit_in_any_patch_is_seen(patched_tree, patch, keep_record):
    """Also where the old text is still a part of what is left, and where nobody recorded that we were here."""
    if not keep_record:
        shutil.rmtree(patched_tree / HOME)
    hunk = patch.hunks[0]
    line = next(line for line in hunk.new.splitlines(keepends=True) if line not in hunk.old and line.strip())
    edit_hunk(patched_tree, hunk, hunk.new, line, line.rstrip("\n") + "  # mine\n")
    result = call("--root", patched_tree, "--json")
    assert result.code == 2
    if keep_record:
        assert result.states()[patch.name] == "PARTIAL"


def test_02_someone_edits_a_module_of_ours(patched_tree):
    with open(patched_tree / MODULE, "a") as file:
        file.write("# mine\n")
    result = call("--root", patched_tree, "--json")
    assert (result.code, result.states()["dflash2/"]) == (2, "PARTIAL")
    assert call("--root", patched_tree, "--revert").code == 2


# 3
def test_03_one_hunk_holds_the_text_of_another(tree):
    """Wholly, in the same scope."""
    (hunk,) = PATCHES[0].hunks
    text = (tree / CAUSALITY).read_text()
    anchor = "    if override is not None:\n"
    first = Patch("first", "", "", None, "", hunks=(Hunk(CAUSALITY, hunk.scope, anchor, hunk.new + anchor),))
    both = patch_set([first, *PATCHES])
    apply(tree, patch_set=both)
    assert (tree / CAUSALITY).read_text().count(hunk.new) == 2
    assert call("--root", tree, "--check", patch_set=both).code == 0
    assert call("--root", tree, "--revert", patch_set=both).code == 0
    assert (tree / CAUSALITY).read_text() == text


# 4
def shipping(tree):
    """A tree that ships DFlash2 by itself and lacks all further fixes: patched by us, then passed off as upstream's."""
    core = patch_set([patch for patch in PATCHES if patch.core])
    apply(tree, patch_set=core)
    shutil.rmtree(tree / HOME)
    for patch in PATCHES:
        for hunk in patch.hunks if patch.core else ():
            # The same syntax in other words, as upstream's own text is.
            place = tree / hunk.file
            added = [line for line in hunk.new.splitlines(keepends=True) if line not in hunk.old and line.strip()]
            text = place.read_text()
            for line in added:
                plain = not set("\"'\\#,([{") & set(line.rstrip()[-1:])
                text = text.replace(line, line.rstrip("\n") + "  #\n", 1) if plain else text
            place.write_text(text)
    for path in INSTALLED.values():
        (tree / path).write_text("# upstream's\n")
    for folder in tree.glob("vllm*.dist-info"):
        metadata = (folder / "METADATA").read_text().replace("Version: 0.27.1", "Version: 0.28.0")
        (folder / "METADATA").write_text(metadata)


def test_04_a_release_that_ships_it(tree):
    shipping(tree)
    before = snapshot(tree)
    result = call("--root", tree, "--json")
    assert (result.code, result.json()["verdict"]) == (0, "SHIPPED"), result.json()["message"]
    states = result.states()
    assert {states[patch.name] for patch in PATCHES if patch.core} == {"SHIPPED"}
    missing = [name for name, state in states.items() if state == "MISSING"]
    assert missing and all(name in result.json()["message"] for name in missing)
    assert "MISSING" in call("--root", tree).out
    assert call("--root", tree, "--check").code == 0
    assert snapshot(tree) == before


# 5
def test_05_unrelated_lines_on_top(patched_tree):
    for patch in PATCHES:
        for path in {hunk.file for hunk in patch.hunks}:
            place = patched_tree / path
            place.write_bytes(b"# unrelated\n" * 10 + place.read_bytes())
    before = snapshot(patched_tree)
    result = call("--root", patched_tree, "--json")
    assert (result.code, result.json()["verdict"]) == (0, "NOOP")
    assert snapshot(patched_tree) == before


def test_05_also_without_a_record(patched_tree):
    shutil.rmtree(patched_tree / HOME)
    before = snapshot(patched_tree)
    result = call("--root", patched_tree, "--json")
    assert (result.code, result.json()["verdict"]) == (0, "NOOP")
    assert snapshot(patched_tree) == before
    refused = call("--root", patched_tree, "--revert")
    assert refused.code == 2 and "reinstall vLLM" in refused.err


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.core and len(p.hunks) > 1], ids=lambda p: p.name)
def test_04_a_seam_copied_in_part_by_hand_is_not_shipped(template, patch):
    """The signs of the feature may lie in the part that was copied; the part that was not is still missing."""
    read = _tree.reader(template)
    for left_out in patch.hunks:
        changes = {}
        for path in {hunk.file for hunk in patch.hunks}:
            text = read(path).decode()
            hunks = [hunk for hunk in patch.hunks if hunk.file == path and hunk != left_out]
            edits = [(_patchtext.places(text, hunk.scope, hunk.old)[0], hunk.old, hunk.new) for hunk in hunks]
            changes[path] = _patchtext.edit(read(path), edits)
        report = _patchlib.survey(lambda path: changes.get(path, read(path)), "0.27.1", patch_set())
        states = {row.name: row.state for row in report.patches}
        assert (states[patch.name], report.verdict) == ("PARTIAL", "PARTIAL"), left_out


def test_05_but_a_second_definition_is_not_unrelated(patched_tree):
    with open(patched_tree / CAUSALITY, "a") as file:
        file.write("\n\ndef _dflash_layer_causal(config, layer_type):\n    return True\n")
    result = call("--root", patched_tree, "--json")
    assert (result.code, result.states()["causality"]) == (2, "PARTIAL")


# 6
def test_06_the_last_anchor_of_all_is_missing(tree):
    hunk = PATCHES[-1].hunks[-1]
    edit_file(tree, hunk.file, hunk.old, "")
    before = snapshot(tree)
    assert call("--root", tree).code == 2
    assert snapshot(tree) == before


# 7
GOOD = Hunk("vllm/a.py", "f", "    return 1\n", "    return 2\n")


def patch(*hunks, name="mine", **more):
    return Patch(name, "why", "upstream", None, "never", hunks=hunks, **more)


@pytest.mark.parametrize(
    "patches, wanted",
    [
        ([patch(replace(GOOD, old=""))], "patch mine: hunk 1 of vllm/a.py: old text is empty"),
        ([patch(replace(GOOD, old="  \n"))], "old text is empty"),
        ([patch(replace(GOOD, new=""))], "new text is empty"),
        ([patch(replace(GOOD, new=GOOD.old))], "old and new text are equal"),
        ([patch(replace(GOOD, old="return 1"))], "whole lines"),
        ([patch(replace(GOOD, new="    return (\n"))], "not Python"),
        ([patch(replace(GOOD, new="    def f(:\n        pass\n"))], "not Python"),
        ([patch(GOOD, GOOD)], "patch mine: hunk 2 overlaps hunk 1 of patch mine in vllm/a.py"),
        ([patch(GOOD), patch(GOOD, name="other")], "patch other: hunk 1 overlaps hunk 1 of patch mine"),
        ([patch(GOOD, replace(GOOD, old="    x = 1\n    return 1\n"))], "overlaps"),
        ([patch(replace(GOOD, old="    a()\n    b()\n"), replace(GOOD, old="    b()\n    c()\n"))], "overlaps"),
        ([patch(GOOD), patch()], "2 patches have this name"),
        ([patch(replace(GOOD, file="../a.py"))], "not a path below vllm/"),
        ([patch(replace(GOOD, file="vllm/../a.py"))], "not a path below vllm/"),
        ([patch(replace(GOOD, scope="f g"))], "not a dotted name"),
        ([patch(name="two words")], "one word"),
        ([patch(shipped=((),))], "always true"),
        ([patch(shipped=((_patchlib.Sign("vllm/a.py", "", "x +"),),))], "the pattern is not"),
        ([patch(defines=(("vllm/a.py", ""),))], "not a dotted name"),
    ],
)
def test_07_faulty_patches_are_refused_by_name(patches, wanted):
    with pytest.raises(Problem, match=wanted) as refused:
        _patchlib.load(patches, {}, SOURCE)
    assert refused.value.exit_code == 3 and patches[-1].name in str(refused.value)


@pytest.mark.parametrize(
    "installed, data, wanted",
    [
        ({"dflash2/no.py": "vllm/no.py"}, None, "dflash2/no.py: INSTALLED names it"),
        ({"dflash2/a.py": "vllm/b.py"}, b"def f(:\n", "dflash2/a.py: not Python"),
        ({"dflash2/a.py": "../b.py"}, b"", "not a path below vllm/"),
        ({"dflash2/a.py": "vllm/a.py"}, b"", "vllm/a.py is written twice"),
        ({"dflash2/a.py": "vllm/b.py", "dflash2/b.py": "vllm/b.py"}, b"", "vllm/b.py is written twice"),
    ],
)
def test_07_faulty_files_are_refused_by_name(installed, data, wanted):
    with pytest.raises(Problem, match=wanted):
        _patchlib.load([patch(GOOD)], installed, lambda path: data)


def test_07_the_command_says_which(tool, tree):
    place = tool / "patches" / "causality.py"
    place.write_text(place.read_text().replace("old='''\\\n", "old='''\\\n''' and '''"))
    done = subprocess.run([PYTHON, tool / "apply_all.py", "--root", tree], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == "apply_all.py: patch causality: hunk 1 of " + CAUSALITY + ": old text is empty\n"


def test_07_a_result_that_only_the_tree_shows_to_be_no_python(tree):
    """Each text is a part of Python, their sum is not: the block that follows loses its header."""
    hunk = Hunk(CAUSALITY, "_dflash_layer_causal", "    if override is not None:\n", "    override = override\n")
    before = snapshot(tree)
    result = call("--root", tree, "--json", patch_set=patch_set([*PATCHES, patch(hunk)]))
    assert result.code == 2 and "not Python" in result.out
    assert result.states()["mine"] == "DRIFT"
    assert snapshot(tree) == before


# 8
def test_08_again_and_again(tree):
    first = apply(tree)
    assert "Applied" in first.out
    before = snapshot(tree)
    for _ in range(2):
        again = apply(tree)
        assert "nothing to do" in again.out
        assert snapshot(tree) == before


def test_08_twice_at_the_same_moment(tree, patched_template):
    command = [PYTHON, "-c", "import sys, apply_all; sys.exit(apply_all.main(sys.argv[1:]))", "--root", str(tree)]
    running = [subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted("Applied" in output for output in outputs) == [False, True]
    assert contents(tree) == contents(patched_template)


# 9
def test_09_inside_a_dirty_checkout(tmp_path, template, patched_template):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    (checkout / "dirty.py").write_text("x = (\n")
    site = shutil.copytree(template, checkout / ".venv" / "lib" / "site-packages")
    environment = {**os.environ, "PATH": ""}  # nothing that could be consulted
    done = subprocess.run([PYTHON, "apply_all.py", "--root", site], cwd=REPO, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert contents(site) == contents(patched_template)
    assert (checkout / "dirty.py").read_text() == "x = (\n"


# 10
@pytest.mark.parametrize("path", sorted({hunk.file for patch in PATCHES for hunk in patch.hunks}))
def test_10_a_target_was_deleted(tree, path):
    (tree / path).unlink()
    before = snapshot(tree)
    result = call("--root", tree, "--json")
    assert (result.code, result.json()["verdict"]) == (2, "DRIFT")
    assert f"{path}: hunk" in result.out and "missing" in result.out
    assert snapshot(tree) == before


def test_10_after_it_was_patched(patched_tree, template):
    (patched_tree / CAUSALITY).unlink()
    assert call("--root", patched_tree).code == 2
    assert call("--root", patched_tree, "--revert").code == 2
    assert call("--root", patched_tree, "--revert", "--force").code == 0
    assert contents(patched_tree) == contents(template)


# 11
def test_11_hard_links_into_a_cache(tree, tmp_path, patched_template):
    cache = tmp_path / "cache"
    for path in tree.rglob("*"):
        if path.is_file():
            (cache / path.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, cache / path.relative_to(tree))
    before = snapshot(cache)
    apply(tree)
    assert contents(tree) == contents(patched_template)
    assert call("--root", tree, "--revert").code == 0
    assert snapshot(cache) == before


# 12
def test_12_a_target_is_a_symlink_out_of_the_tree(tree, tmp_path, template):
    outside = tmp_path / "outside.py"
    shutil.move(tree / CAUSALITY, outside)
    (tree / CAUSALITY).symlink_to(outside)
    before = outside.read_bytes()
    apply(tree)
    assert outside.read_bytes() == before
    assert not (tree / CAUSALITY).is_symlink() and b"is_causal" in (tree / CAUSALITY).read_bytes()
    assert call("--root", tree, "--revert").code == 0
    assert outside.read_bytes() == before and contents(tree) == contents(template)


@pytest.mark.parametrize("part", ["vllm", "vllm/model_executor", "vllm/model_executor/models"])
def test_12_a_folder_is_a_symlink_out_of_the_tree(tree, tmp_path, part):
    outside = tmp_path / "outside"
    shutil.move(tree / part, outside)
    (tree / part).symlink_to(outside)
    before = snapshot(outside), snapshot(tree)
    result = call("--root", tree)
    assert result.code == 3 and "is a symlink to" in result.err
    assert (snapshot(outside), snapshot(tree)) == before


def test_12_a_planted_record_leads_nowhere_else(patched_tree, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    record = patched_tree / HOME / "record.json"
    record.write_text(record.read_text().replace(f'"{CAUSALITY}"', '"vllm/../../victim"'))
    result = call("--root", patched_tree, "--revert", "--force")
    assert result.code == 2 and "damaged" in result.err
    assert victim.read_text() == "precious"


# 13
@pytest.fixture
def read_only_copy():
    """A copy of a tree that may not be written to, in a folder that everybody may enter; pytest's own is private."""
    folders = []

    def make(site):
        folder = Path(tempfile.mkdtemp())
        folder.chmod(0o755)
        copy = shutil.copytree(site, folder / "site-packages")
        folders.append(folder)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        return copy

    yield make
    for folder in folders:
        for path in folder.rglob("*"):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
        shutil.rmtree(folder)


def as_nobody(*arguments):
    """Runs the tool without root's licence to ignore mode bits. It loads itself before, where nobody may not look."""
    code = (
        "import sys, os, apply_all, _patchtext\n"
        "own = apply_all.own_patches()\n"
        "apply_all.own_patches = lambda: own\n"
        "apply_all.parse([]), _patchtext.outline('x = 1')\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(apply_all.main(sys.argv[1:]))"
    )
    command = [PYTHON, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True)


def test_13_read_only_and_patched_already(patched_template, read_only_copy):
    site = read_only_copy(patched_template)
    before = snapshot(site)
    done = as_nobody("--root", site)
    assert done.returncode == 0, done.stderr
    assert snapshot(site) == before


def test_13_read_only_and_not_patched(template, read_only_copy):
    site = read_only_copy(template)
    before = snapshot(site)
    done = as_nobody("--root", site)
    assert done.returncode == 3
    assert "not writable" in done.stderr and "Traceback" not in done.stderr
    assert snapshot(site) == before


# 14
@pytest.mark.parametrize("source, path", INSTALLED.items())
def test_14_an_installed_file_is_missing(patched_tree, source, path):
    (patched_tree / path).unlink()
    before = snapshot(patched_tree)
    result = call("--root", patched_tree, "--json")
    assert (result.code, result.json()["verdict"]) == (2, "PARTIAL")
    assert result.states()[source.rpartition("/")[0] + "/"] == "PARTIAL"
    assert path in result.out
    assert snapshot(patched_tree) == before
    shutil.rmtree(patched_tree / HOME)
    assert call("--root", patched_tree).code == 2


def test_14_all_installed_files_are_missing(patched_tree):
    for path in INSTALLED.values():
        (patched_tree / path).unlink()
    assert call("--root", patched_tree).code == 2
    shutil.rmtree(patched_tree / HOME)
    assert call("--root", patched_tree).code == 2


# 15
@pytest.mark.parametrize("arguments, code", [((), 0), (("--check", "--json"), 1)])
def test_15_ascii_locale(tree, arguments, code):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    command = [PYTHON, "apply_all.py", "--root", str(tree), *arguments]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True)
    assert done.returncode == code, done.stderr


def test_15_text_that_the_locale_cannot_print(tree):
    edit_file(tree, CAUSALITY, '.get("causal")', '.get("caus\u00e4l")')
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([PYTHON, "apply_all.py", "--root", tree], cwd=REPO, env=environment, capture_output=True)
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert b'.get("caus\\xe4l")' in done.stderr


# 16
def crlf(path):
    path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))


def test_16_installed_files_have_crlf(tree, patched_template):
    targets = {hunk.file for patch in PATCHES for hunk in patch.hunks}
    for path in targets:
        crlf(tree / path)
    before = {path: (tree / path).read_bytes() for path in targets}
    apply(tree)
    for path in targets:
        data = (tree / path).read_bytes()
        assert data.replace(b"\r\n", b"\n") == (patched_template / path).read_bytes()
        assert data.count(b"\n") == data.count(b"\r\n")
    assert call("--root", tree, "--check").code == 0
    assert call("--root", tree, "--revert").code == 0
    assert {path: (tree / path).read_bytes() for path in targets} == before


def test_16_our_own_checkout_has_crlf(tool, tree, patched_template):
    for path in tool.rglob("*.py"):
        crlf(path)
    done = subprocess.run([PYTHON, tool / "apply_all.py", "--root", tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(tree) == contents(patched_template)


# 17
def test_17_upgrade_of_this_tool(tree, patched_template, template):
    older = older_patch_set()
    apply(tree, patch_set=older)
    patched_by_older = snapshot(tree)
    check = call("--root", tree, "--check", "--json")
    assert (check.code, check.json()["verdict"]) == (1, "OUTDATED")
    assert {"OUTDATED"} <= set(check.states().values()) <= {"OUTDATED", "NOOP"}
    assert snapshot(tree) == patched_by_older
    apply(tree)
    assert contents(tree) == contents(patched_template)
    assert call("--root", tree, "--revert").code == 0
    assert contents(tree) == contents(template)


def test_17_files_that_this_version_no_longer_has_are_gone(tree):
    apply(tree, patch_set=older_patch_set())
    assert (tree / EXTRA).exists()
    apply(tree)
    assert not (tree / EXTRA).parent.exists()


def test_17_an_upgrade_does_not_lose_edits(tree):
    apply(tree, patch_set=older_patch_set())
    edit_file(tree, CAUSALITY, "# an earlier version", "# mine")
    before = snapshot(tree)
    result = call("--root", tree, "--json")
    assert (result.code, result.json()["verdict"], result.states()["causality"]) == (2, "PARTIAL", "PARTIAL")
    assert snapshot(tree) == before


# 18
def wheel(template, folder):
    """A wheel of the template, as the index has one of the whole."""
    (info,) = template.glob("vllm*.dist-info")
    there = {path.relative_to(template).as_posix() for path in template.rglob("*") if path.is_file()}
    name = folder / f"{info.name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(name, "w") as archive:
        installers = {f"{info.name}/{part}" for part in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
        for path in sorted(there - installers):
            archive.write(template / path, path)
        lines = (info / "RECORD").read_text().splitlines()
        wheels = [line for line in lines if line.split(",")[0] in archive.namelist()]
        archive.writestr(f"{info.name}/RECORD", "\n".join([*wheels, f"{info.name}/RECORD,,"]) + "\n")
    return name


def pip(venv, *arguments):
    command = [PYTHON, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def venv(tmp_path):
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


def test_18_pip_uninstall_and_install(venv, template, tmp_path):
    archive = wheel(template, tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    empty = contents(site)
    pip(venv, "install", "--no-index", "--no-deps", archive)
    pristine = without_bytecode(site)
    apply(site)
    python = venv / "bin" / "python"
    subprocess.run([python, "-m", "compileall", "-q", site / "vllm"], check=True)
    pip(venv, "uninstall", "--yes", _distribution(template))
    assert contents(site) == empty
    pip(venv, "install", "--no-index", "--no-deps", archive)
    assert without_bytecode(site) == pristine


def without_bytecode(site):
    return {path: data for path, data in contents(site).items() if not path.endswith(".pyc")}


def _distribution(site):
    (info,) = site.glob("vllm*.dist-info")
    return info.name.split("-")[0]


def test_18_record_is_true(patched_tree):
    """Every file that we changed or added is in RECORD with its hash and size, our own record included."""
    (info,) = patched_tree.glob("vllm*.dist-info")
    lines = dict(line.split(",", 1) for line in (info / "RECORD").read_text().splitlines())
    ours = [path for path in (patched_tree / HOME).rglob("*") if path.is_file()]
    ours += [patched_tree / path for path in INSTALLED.values()]
    ours += [patched_tree / hunk.file for patch in PATCHES for hunk in patch.hunks]
    for place in ours:
        path = place.relative_to(patched_tree).as_posix()
        assert f"{path},{lines[path]}" == _tree._wheel_line(path, place.read_bytes()).decode()
    assert HOME + "/record.json" in lines


# 19
@pytest.mark.parametrize(
    "line, lacks",
    [
        (b"from vllm.logger import no_such_logger\n", "from vllm.logger import no_such_logger"),
        (b"from vllm.no_such_module import f\n", "from vllm.no_such_module import f"),
        (b"import vllm.no_such_module\n", "import vllm.no_such_module"),
        (b"def f():\n    from .no_such_sibling import g\n", "no_such_sibling import g"),
    ],
)
def test_19_a_module_imports_what_this_vllm_lacks(tree, line, lacks):
    before = contents(tree)
    lacking = patch_set(source=lambda path: SOURCE(path) + (line if path == "dflash2/qwen3_dflash2.py" else b""))
    result = call("--root", tree, "--json", patch_set=lacking)
    assert result.code == 2 and lacks in result.out
    assert contents(tree) == before


def test_19_a_hunk_imports_what_this_vllm_lacks(tree):
    (hunk,) = PATCHES[0].hunks
    hunk = replace(hunk, new="    from vllm.logger import no_such_logger\n" + hunk.new)
    before = contents(tree)
    lacking = patch_set([replace(PATCHES[0], hunks=(hunk,)), *PATCHES[1:]])
    result = call("--root", tree, "--json", patch_set=lacking)
    assert (result.code, result.states()["causality"]) == (2, "DRIFT")
    assert "no_such_logger" in result.out and contents(tree) == before


def test_19_found_after_writing_it_is_rolled_back(tree, monkeypatch):
    """A promise that only the files on the disk break, here because another process took a module away."""
    before = contents(tree)
    report = _patchlib.survey(_tree.reader(tree), "0.27.1", patch_set())
    site = _tree.locate(str(tree))
    (tree / "vllm/logger.py").rename(tree / "vllm/logger.away")
    with pytest.raises(Problem, match=r"this vLLM has no: .*vllm\.logger.*Everything was put back") as refused:
        _tree.apply(site, report, patch_set())
    assert refused.value.exit_code == 2
    (tree / "vllm/logger.away").rename(tree / "vllm/logger.py")
    assert contents(tree) == before


# 20
def test_20_stale_bytecode_does_not_run(tree):
    """Also where the compiled copy claims to be good whatever the source says."""
    for mode in ("timestamp", "unchecked-hash"):
        command = [PYTHON, "-m", "compileall", "-q", "-f", "--invalidation-mode", mode, tree / "vllm"]
        subprocess.run(command, check=True)
        compiled = list((tree / CAUSALITY).parent.glob("__pycache__/qwen3_dflash.*.pyc"))
        assert compiled
        apply(tree)
        assert not any(path.exists() for path in compiled)
        os.utime(tree / CAUSALITY, (1, 1))
        assert call("--root", tree, "--revert").code == 0


def test_20_python_runs_the_new_code(tmp_path):
    """Same length, same time, warm bytecode."""
    root = tmp_path / "site"
    (root / "vllm").mkdir(parents=True)
    (root / "vllm/__init__.py").write_text("")
    (root / "vllm/_version.py").write_text("__version__ = '0.27.1'\n")
    (root / "vllm/a.py").write_text("def f():\n    return 1\n")
    os.utime(root / "vllm/a.py", (1, 1))
    command = [sys.executable, "-c", "from vllm.a import f; print(f())"]

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def running():
        return subprocess.check_output(command, env={**environment, "PYTHONPATH": str(root)}, text=True).strip()

    assert running() == "1" and list(root.glob("vllm/__pycache__/a.*.pyc"))
    ours = _patchlib.load([patch(GOOD)], {}, SOURCE)
    apply(root, patch_set=ours)
    os.utime(root / "vllm/a.py", (1, 1))
    assert running() == "2"
    assert call("--root", root, "--revert", patch_set=ours).code == 0
    os.utime(root / "vllm/a.py", (1, 1))
    assert running() == "1"
