"""What becomes of a patched tree: moved, converted, edited by others, patched by another version; and the way back."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest

import _site
import apply_all
from _patchlib import Problem
from patches import PATCHES
from tests.tool.patching import (
    CAUSALITY,
    EXTRA,
    HOME,
    MODULE,
    OURS,
    RECORD,
    another_patch_set,
    call,
    contents,
    crlf,
    edit_file,
    format_1,
    info,
    patch_set,
    set_version,
    small_patch_set,
    succeed,
    targets,
    unchanged,
)

MAMBA = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"


def files(tree):
    """All but the wheel's RECORD, which holds the hashes of what others wrote, too."""
    return {path: data for path, data in contents(tree).items() if not path.endswith(".dist-info/RECORD")}


def goes_back(tree, template):
    """The tree is patched, says so, and --revert restores every byte."""
    with unchanged(tree):
        assert call(tree, "--check", "--json").verdict == "NOOP"
        assert "nothing to do" in succeed(tree).out
    succeed(tree, "--revert")
    assert contents(tree) == contents(template)


# Moved


def git(folder, *arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, "-C", folder, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize("attributes", ["", "* text eol=crlf\n"], ids=["as it is", "crlf"])
def test_committed_with_a_common_gitignore_and_cloned(patched_tree, template, tmp_path, attributes):
    (patched_tree / ".gitignore").write_text("*.orig\n*.rej\n*.bak\n*.log\n.*.swp\n__pycache__/\n*.egg-info/\n")
    if attributes:
        (patched_tree / ".gitattributes").write_text(attributes)
    git(patched_tree, "init", "--quiet")
    git(patched_tree, "add", ".")
    git(patched_tree, "commit", "--quiet", "-m", "vendored")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", patched_tree, clone], check=True, capture_output=True)
    assert (b"\r\n" in (clone / CAUSALITY).read_bytes()) == bool(attributes)
    shutil.rmtree(clone / ".git")
    for name in (".gitignore", ".gitattributes"):
        (clone / name).unlink(missing_ok=True)
    with unchanged(clone):
        assert call(clone, "--check", "--json").verdict == "NOOP"
    succeed(clone, "--revert")
    found = {path: data.replace(b"\r\n", b"\n") if data else data for path, data in files(clone).items()}
    assert found == files(template)


def test_copied_by_a_tool_that_leaves_orig_behind(patched_tree, template, tmp_path):
    copy = shutil.copytree(patched_tree, tmp_path / "copy", ignore=shutil.ignore_patterns("*.orig", "*~", ".*"))
    goes_back(copy, template)


def test_nothing_but_the_record_is_kept(patched_tree):
    assert [path.name for path in (patched_tree / HOME).rglob("*")] == ["record.json"]


@pytest.mark.parametrize("which", ["ours", "vLLM's", "the record", "all"])
def test_line_ends_are_converted_after_patching(patched_tree, template, which):
    """As a checkout on another system does it, and back again."""
    groups = {"ours": [*OURS.files], "vLLM's": targets(), "the record": [RECORD]}
    groups["all"] = [path for paths in groups.values() for path in paths]
    before = {path: (patched_tree / path).read_bytes() for path in groups[which]}
    for path in before:
        crlf(patched_tree / path)
    with unchanged(patched_tree):
        assert call(patched_tree, "--check", "--json").verdict == "NOOP"
        succeed(patched_tree)
    clone = shutil.copytree(patched_tree, patched_tree.parent / "clone")
    succeed(clone, "--revert")
    for path in set(before) & set(targets()):
        assert b"\r\n" in (clone / path).read_bytes()
        (clone / path).write_bytes((clone / path).read_bytes().replace(b"\r\n", b"\n"))
    assert files(clone) == files(template)
    for path, data in before.items():
        (patched_tree / path).write_bytes(data)
    goes_back(patched_tree, template)


def test_line_ends_are_converted_from_crlf(tree, template):
    for path in targets():
        crlf(tree / path)
    succeed(tree)
    for path in targets():
        (tree / path).write_bytes((tree / path).read_bytes().replace(b"\r\n", b"\n"))
    goes_back(tree, template)


def test_the_next_build_writes_another_version(tree):
    """As setuptools_scm does from a checkout's git state: no dist-info, the version is in the package."""
    shutil.rmtree(info(tree))
    version = tree / "vllm/_version.py"
    version.write_text("__version__ = '0.27.1'\n")
    succeed(tree)
    version.write_text("__version__ = '0.27.2.dev0+g1234567.d20261201'\n")
    with unchanged(tree):
        assert call(tree, "--check", "--json").verdict == "NOOP"
    succeed(tree, "--revert")
    assert not (tree / HOME).exists() and not (tree / MODULE).exists()
    assert version.read_text().startswith("__version__ = '0.27.2.dev0")


def test_another_vllm_in_its_place(patched_tree, template):
    """Something replaced vLLM without uninstalling it: what is recorded is not about these files."""
    set_version(patched_tree, "0.28.0")
    for path in targets():
        (patched_tree / path).write_text("# 0.28.0\n")
    with unchanged(patched_tree):
        for arguments in ((), ("--check",)):
            result = call(patched_tree, *arguments)
            assert result.code == 2
            assert "was vLLM 0.27.1 when it was patched and is 0.28.0 now" in result.out + result.err
        assert call(patched_tree, "--revert").code == 2


# Edited by others


def theirs(tree):
    """Another tool's edit in every file that we patch, away from our text, and in a file of their own."""
    for path in targets():
        with (tree / path).open("a") as file:
            file.write("\n\ndef of_another_tool():\n    pass\n")
        place = tree / path
        place.write_text("# patched by another tool\n" + place.read_text())


def test_another_tool_s_edits_elsewhere_survive(patched_tree, tree_and_theirs):
    theirs(patched_tree)
    with unchanged(patched_tree):
        assert call(patched_tree, "--check", "--json").verdict == "NOOP"
        succeed(patched_tree)
    result = succeed(patched_tree, "--revert")
    assert "Edits by others were kept in" in result.out
    assert files(patched_tree) == tree_and_theirs


@pytest.fixture
def tree_and_theirs(template, tmp_path):
    """What an unpatched tree holds once another tool has edited it."""
    copy = shutil.copytree(template, tmp_path / "theirs")
    theirs(copy)
    return files(copy)


def test_another_tool_s_edits_before_ours_survive(tree, tree_and_theirs):
    theirs(tree)
    succeed(tree)
    assert call(tree, "--check").code == 0
    result = succeed(tree, "--revert")
    assert "Edits by others" not in result.out, "they were there before us"
    assert files(tree) == tree_and_theirs


@pytest.mark.parametrize("older", [another_patch_set, lambda: replace(another_patch_set(), digest="0")])
def test_another_tool_s_edits_survive_an_upgrade(tree, tree_and_theirs, older):
    succeed(tree, patch_set=older())
    theirs(tree)
    assert call(tree, "--check", "--json").verdict == "OUTDATED"
    succeed(tree)
    assert call(tree, "--check", "--json").verdict == "NOOP"
    succeed(tree, "--revert")
    assert files(tree) == tree_and_theirs


def test_force_discards_edits_of_our_lines_and_no_others(patched_tree, tree_and_theirs):
    theirs(patched_tree)
    edit_file(patched_tree, CAUSALITY, 'getattr(config, "is_causal", None)', 'getattr(config, "is_causal", False)')
    (patched_tree / MODULE).write_text("# theirs\n")
    with unchanged(patched_tree):
        assert call(patched_tree, "--check", "--json").verdict == "PARTIAL"
        refused = call(patched_tree, "--revert")
        assert refused.code == 2 and CAUSALITY in refused.err and MODULE in refused.err and "--force" in refused.err
        assert targets()[-1] not in refused.err, "only those that are in the way"
    succeed(patched_tree, "--revert", "--force")
    assert files(patched_tree) == tree_and_theirs


# What stands above the first is also how our own text ends; the second is found between lines that stand there twice.
LOOK_ALIKES = {("vllm/v1/worker/gpu/sample/gumbel.py", ""), (MAMBA, "MambaHybridModelState")}


@pytest.mark.parametrize("change", [lambda line: line[:-1] + "  # mine\n", lambda line: ""], ids=["changed", "removed"])
def test_an_edit_of_any_hunk_is_seen_and_can_be_discarded(patched_template, template, change):
    """The first line that we added: never taken for others' text, nor for ours that is gone."""
    recorded = _site.read_record(_site.reader(patched_template), OURS).files
    unclear = []
    for path, hunk in [(path, hunk) for path, entry in recorded.items() for hunk in entry.hunks]:
        added = [line for line in hunk.new.splitlines(keepends=True) if line not in hunk.old and line.strip()]
        if not added or (path, hunk.scope) in LOOK_ALIKES:
            continue
        new = hunk.new.replace(added[0], change(added[0]), 1)
        before, original = (patched_template / path).read_bytes(), (template / path).read_bytes()
        data = before.replace(hunk.new.encode(), new.encode(), 1)
        assert data != before
        if new != hunk.old:  # all that we added is gone
            with pytest.raises(Problem, match="edited by someone else"):
                _site.take_back(data, recorded[path].hunks)
        try:
            assert _site.take_back(data, recorded[path].hunks, force=True) == original, hunk
        except Problem as problem:
            assert "not clear where our lines end" in str(problem)
            unclear.append(hunk)
    assert len(unclear) <= 2


def test_our_text_was_taken_out_by_hand(patched_tree, template):
    shutil.copyfile(template / CAUSALITY, patched_tree / CAUSALITY)
    with unchanged(patched_tree):
        result = call(patched_tree, "--json")
    assert (result.code, result.states()["causality"]) == (2, "PARTIAL")
    succeed(patched_tree, "--revert", "--force")
    assert contents(patched_tree) == contents(template)


# The record


def test_without_a_record(patched_tree, template):
    """This version's own text is known, and gives way."""
    shutil.rmtree(patched_tree / HOME)
    with unchanged(patched_tree):
        assert call(patched_tree, "--check", "--json").verdict == "NOOP"
    assert "without a record" in succeed(patched_tree, "--revert").out
    found, wanted = contents(patched_tree), contents(template)
    wheel = f"{info(template).name}/RECORD"
    listed = found.pop(wheel).decode().splitlines()
    wanted.pop(wheel)
    assert found == wanted
    assert not [line for line in listed if line.startswith((f"{MODULE},", f"{HOME}/"))], (
        "an uninstall needs no such line"
    )


DAMAGED = [b"", b"[]", b"{}", b'{"format": 3}', b'{"format": 2, "files": []}', b"\xff", b"[" * 10**5, b"null"]


@pytest.mark.parametrize("record", DAMAGED, ids=lambda record: repr(record[:10]))
def test_a_damaged_record(patched_tree, template, record):
    (patched_tree / RECORD).write_bytes(record)
    with unchanged(patched_tree):
        for arguments in ((), ("--check",), ("--check", "--json")):
            result = call(patched_tree, *arguments)
            assert result.code == 2 and "record.json is damaged" in result.err
        assert result.verdict == "PARTIAL"
        status = call(patched_tree, "--status", "--json")
        assert (status.code, status.json()["exit_code"], status.verdict) == (0, 0, "PARTIAL")
    succeed(patched_tree, "--revert")
    found, wanted = contents(patched_tree), contents(template)
    assert {path for path in found if found[path] != wanted.get(path)} <= {f"{info(template).name}/RECORD"}
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"version": None},
        {"version": 5},
        {"tool": []},
        {"patches": None},
        {"digest": []},
        {"files": {}, "added": {}},
        {"files": {"": {"before": "0", "after": "0", "hunks": []}}},
        {"files": {"vllm/\0": {"before": "0", "after": "0", "hunks": []}}},
        {"files": {"vllm/\ud800": {"before": "0", "after": "0", "hunks": []}}},
        {"files": {"vllm/../../x.py": {"before": "0", "after": "0", "hunks": []}}},
        {"files": {"torch/__init__.py": {"before": "0", "after": "0", "hunks": []}}},
        {"files": {f"{RECORD}": {"before": "0", "after": "0", "hunks": []}}},
        {"files": {"vllm/x.py": {"before": ["0"], "after": {}, "hunks": []}}},
        {"files": {"vllm/x.py": {"before": "0", "after": "0", "hunks": [{"old": 1}]}}},
        {"added": {"vllm/../../x.py": "0"}},
        {"added": {"torch/__init__.py": "0"}},
        {"added": {"vllm/x.py": None}},
        {"folders": ["torch"]},
        {"folders": [f"{HOME}/../.."]},
        {"wheel": "vllm/__init__.py"},
        {"wheel": "../x.dist-info/RECORD"},
        {"wheel_lines": []},
    ],
    ids=str,
)
def test_a_record_with_what_is_not_ours(patched_tree, tmp_path, change):
    """Revert writes and removes what a record names: a planted one leads nowhere else."""
    victims = [tmp_path / "x.py", patched_tree / "torch/__init__.py", tmp_path / "x.dist-info/RECORD"]
    for victim in victims:
        victim.parent.mkdir(exist_ok=True)
        victim.write_text("precious")
    place = patched_tree / RECORD
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    with unchanged(patched_tree):
        result = call(patched_tree, "--check")
        assert result.code == 2 and "record.json is damaged" in result.err
    call(patched_tree, "--revert", "--force")
    assert [victim.read_text() for victim in victims] == ["precious"] * 3


def test_a_record_that_lacks_a_file(patched_tree, template):
    """Cut short by hand: no crash, and that file is as it is, or as it was."""
    place, patched = patched_tree / RECORD, (patched_tree / CAUSALITY).read_bytes()
    record = json.loads(place.read_text())
    del record["files"][CAUSALITY]
    place.write_text(json.dumps(record))
    call(patched_tree, "--check")
    call(patched_tree, "--revert")
    assert (patched_tree / CAUSALITY).read_bytes() in (patched, (template / CAUSALITY).read_bytes())


# Another version of this tool


def test_revert_needs_no_patch_that_fits(patched_tree, template):
    """Another version of the tool, whose patches no longer fit these originals, can still undo what the record says."""
    first = PATCHES[0].hunks[0]
    drifted = patch_set([replace(PATCHES[0], hunks=(replace(first, old="    nowhere = 1\n"),)), *PATCHES[1:]])
    assert call(patched_tree, patch_set=drifted).code == 2
    succeed(patched_tree, "--revert", patch_set=drifted)
    assert contents(patched_tree) == contents(template)


def test_upgrade(tree, patched_template, template):
    succeed(tree, patch_set=another_patch_set())
    assert (tree / EXTRA).exists()
    with unchanged(tree):
        check = call(tree, "--check", "--json")
    assert (check.code, check.verdict) == (1, "OUTDATED")
    assert {"OUTDATED"} <= set(check.states().values()) <= {"OUTDATED", "NOOP"}
    succeed(tree)
    assert not (tree / EXTRA).parent.exists()
    assert contents(tree) == contents(patched_template)
    goes_back(tree, template)


def test_an_upgrade_does_not_lose_edits(tree):
    succeed(tree, patch_set=another_patch_set())
    edit_file(tree, CAUSALITY, "# another version", "# mine")
    with unchanged(tree):
        result = call(tree, "--json")
    assert (result.code, result.verdict, result.states()["causality"]) == (2, "PARTIAL", "PARTIAL")


def by_version(tree, version, record=None):
    """The tree's record, as if another version of the tool had made it."""
    place = tree / RECORD
    place.write_text(json.dumps({**json.loads(place.read_text()), "tool": version}))


@pytest.mark.parametrize("version", ["99.0.0", "0.10.0"])
def test_an_older_tool_on_a_newer_one_s_tree(tree, template, version):
    """It says that it is the older one, and changes nothing; the way back is open."""
    succeed(tree, patch_set=another_patch_set())
    by_version(tree, version)
    with unchanged(tree):
        for arguments in ((), ("--check",)):
            result = call(tree, *arguments, "--json")
            assert (result.code, result.verdict) == (2, "PARTIAL")
            assert f"newer version of this tool ({version})" in result.json()["message"]
            assert apply_all.__version__ in result.json()["message"]
    succeed(tree, "--revert")
    assert contents(tree) == contents(template)


@pytest.mark.parametrize("version", ["0.0.1", apply_all.__version__])
def test_a_newer_tool_on_an_older_one_s_tree(tree, patched_template, version):
    succeed(tree, patch_set=another_patch_set())
    by_version(tree, version)
    assert call(tree, "--check", "--json").verdict == "OUTDATED"
    succeed(tree)
    assert contents(tree) == contents(patched_template)


@pytest.mark.parametrize("version", ["99.0.0", "0.0.1"])
def test_the_same_patches_by_another_version_are_the_same(patched_tree, version):
    by_version(patched_tree, version)
    with unchanged(patched_tree):
        assert call(patched_tree, "--check", "--json").verdict == "NOOP"


def test_the_record_says_which_version_made_it(patched_tree):
    record = json.loads((patched_tree / RECORD).read_text())
    assert (record["tool"], record["version"].split("+")[0]) == (apply_all.__version__, "0.27.1")


# Trees of version 0.1.0, whose record has no hunks and which kept the originals


@pytest.mark.parametrize("patch_set", [another_patch_set, lambda: OURS], ids=["other text", "the same text"])
def test_a_tree_of_the_first_format(tree, template, patched_template, patch_set):
    format_1(tree, patch_set())
    copy = shutil.copytree(tree, tree.parent / "copy")
    with unchanged(tree):
        check = call(tree, "--check", "--json")
    assert (check.code, check.verdict) in ((1, "OUTDATED"), (0, "NOOP"))
    succeed(copy, "--revert")
    assert contents(copy) == contents(template)
    succeed(tree)
    if check.code:
        assert files(tree) == files(patched_template)
        lines = [(info(each) / "RECORD").read_bytes().splitlines() for each in (tree, patched_template)]
        assert sorted(lines[0]) == sorted(lines[1])
    succeed(tree, "--revert")
    assert contents(tree) == contents(template)


def test_a_tree_of_the_first_format_and_others_edits(tree, template):
    format_1(tree, another_patch_set())
    edit_file(tree, CAUSALITY, "# another version", "# mine")
    with unchanged(tree):
        assert call(tree, "--check", "--json").verdict == "PARTIAL"
        refused = call(tree, "--revert")
        assert refused.code == 2 and CAUSALITY in refused.err
    succeed(tree, "--revert", "--force")
    assert contents(tree) == contents(template)


def test_a_tree_of_the_first_format_that_lost_an_original(tree, template):
    """Cloned without *.orig, its text known to this version: it gives way. Unknown text stays, and is named."""
    format_1(tree, OURS)
    for place in (tree / HOME).rglob("*.orig"):
        place.unlink()
    other = shutil.copytree(tree, tree.parent / "other")
    edit_file(other, CAUSALITY, 'getattr(config, "is_causal", None)', 'getattr(config, "is_causal", False)')
    result = call(other, "--revert")
    assert result.code == 2 and CAUSALITY in result.err
    succeed(tree, "--revert")
    assert {path: data for path, data in contents(tree).items() if path in targets()} == {
        path: data for path, data in contents(template).items() if path in targets()
    }
    assert not (tree / HOME).exists() and not (tree / MODULE).exists()


@pytest.mark.parametrize("keep", ["the original", "the file"])
def test_an_only_copy_is_no_litter(small, keep):
    """The record of a first-format tree is gone, and an original differs from its file: it may be all that there is."""
    ours = small_patch_set()
    format_1(small, ours)
    (small / RECORD).unlink()
    original = small / HOME / "originals/vllm/a.py.orig"
    if keep == "the original":
        (small / "vllm/a.py").write_text("# lost\n")
        call(small, "--revert", patch_set=ours)
        assert original.exists()
    else:
        succeed(small, "--revert", patch_set=ours)
        assert not original.exists()


def test_force_ends_where_ours_ends_if_the_lines_below_are_in_our_text_as_well(patched_tree, template):
    path = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
    edit_file(patched_tree, path, "if not fresh.any():", "if not fresh.any():  # theirs")
    assert call(patched_tree, "--revert").code == 2
    succeed(patched_tree, "--revert", "--force")
    assert contents(patched_tree) == contents(template)


def test_a_form_feed_ends_no_line(tree):
    path = "vllm/config/vllm.py"
    place = tree / path
    place.write_bytes(place.read_bytes().replace(b"\nimport copy\n", b"\n\x0c\nimport copy\n", 1))
    before = contents(tree)
    assert b"\x0c" in before[path]
    succeed(tree)
    edit_file(
        tree,
        path,
        "if self._is_dflash2_draft():\n            return True",
        "if self._is_dflash2_draft():  # theirs\n            return True",
    )
    succeed(tree, "--revert", "--force")
    assert contents(tree) == before


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_blank_line_in_the_wheels_record(tree, end):
    (wheel,) = tree.glob("vllm*.dist-info/RECORD")
    wheel.write_bytes(wheel.read_bytes() + end)
    before = contents(tree)
    succeed(tree)
    succeed(tree, "--revert")
    assert contents(tree) == before


def test_mixed_line_ends_where_we_write_are_refused_before_writing(tree):
    hunk = next(hunk for patch in PATCHES for hunk in patch.hunks if hunk.old.count("\n") > 2)
    first = hunk.old.splitlines(keepends=True)[0].encode()
    place = tree / hunk.file
    text = place.read_bytes()
    at = text.index(hunk.old.encode())
    place.write_bytes(text[:at] + first.replace(b"\n", b"\r\n") + text[at + len(first) :])
    with unchanged(tree):
        result = call(tree)
    assert result.code == 2 and "mixed line ends" in result.err
