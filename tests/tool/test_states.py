"""What the command says of a tree, on the real vLLM 0.27.1: states, verdicts, and nothing written by mistake."""

import keyword
import re
import shutil
from dataclasses import replace

import pytest

import _patchlib
import _site
import _source
from _patchlib import Hunk, Patch
from patches import PATCHES
from tests.tool.patching import (
    CAUSALITY,
    HOME,
    MODULE,
    OURS,
    another_patch_set,
    call,
    contents,
    edit_file,
    edit_hunk,
    patch_set,
    row_of,
    set_version,
    succeed,
    targets,
    unchanged,
)

each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)


def reworded(hunk):
    """(line of the hunk's old text, the same line with its last word changed)."""
    words = [word for word in re.findall(r"[A-Za-z]\w{2,}", hunk.old) if not keyword.iskeyword(word)]
    line = next(line for line in hunk.old.splitlines(keepends=True) if words[-1] in line)
    return line, line.replace(words[-1], words[-1] + "x", 1)


def test_states_and_exit_codes_in_turn(tree):
    def asked(*arguments, **options):
        result = call(tree, "--json", *arguments, **options)
        found = result.json()
        assert found["exit_code"] == result.code and found["version"].startswith("0.27.1")
        assert set(found) == {"verdict", "exit_code", "version", "message", "patches"}
        assert all(set(row) == {"name", "state", "files", "detail", "shipped_in"} for row in found["patches"])
        assert found["patches"][0]["name"] == PATCHES[0].name
        return found["verdict"], result.code

    assert asked("--check") == ("APPLY", 1)
    assert asked("--status") == ("APPLY", 0)
    assert asked("--revert") == ("APPLY", 0)
    assert asked(patch_set=another_patch_set()) == ("NOOP", 0)
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


def test_again_and_again(tree):
    assert "Applied" in succeed(tree).out
    with unchanged(tree):
        for _ in range(2):
            assert "nothing to do" in succeed(tree).out


# vLLM's source is not what a patch was written for


@each_patch
def test_one_word_of_an_anchor_differs(tree, patch):
    hunk = patch.hunks[-1]
    line, other = reworded(hunk)
    edit_hunk(tree, hunk, hunk.old, line, other)
    with unchanged(tree):
        result = call(tree, "--json")
    assert (result.code, result.verdict, result.states()[patch.name]) == (2, "DRIFT", "DRIFT")
    detail = result.detail(patch.name)
    assert hunk.file in detail and f"hunk {len(patch.hunks)} of {patch.name}" in detail
    assert "-" + line.rstrip("\n") in detail.splitlines()
    assert "+" + other.rstrip("\n") in detail.splitlines()


def test_drift_as_people_read_it(tree):
    edit_file(tree, CAUSALITY, '.get("causal")', '.get("causality")')
    result = call(tree)
    assert result.code == 2
    assert "causality" in result.out and "DRIFT" in result.out and "Nothing is written" in result.out
    assert '-    override = (getattr(config, "dflash_config", None) or {}).get("causal")' in result.err
    assert '+    override = (getattr(config, "dflash_config", None) or {}).get("causality")' in result.err


@pytest.mark.parametrize(
    "old, new, diagnosis",
    [
        ('.get("causal")', ".get('causal')", "reformatted or recommented, is at line {line}"),
        (
            '.get("causal")',
            '.get(\n        "causal"\n    )',
            "reformatted or recommented, is at line {line}",
        ),
        ('.get("causal")', '.get("causal")  # why', "reformatted or recommented, is at line {line}"),
        ('.get("causal")', '.get("causality")', "the code changed"),
    ],
)
def test_drift_says_whether_the_code_changed(tree, old, new, diagnosis):
    edit_file(tree, CAUSALITY, old, new)
    line = 1 + next(
        number
        for number, line in enumerate((tree / CAUSALITY).read_text().splitlines())
        if "override = (getattr" in line
    )
    result = call(tree, "--json")
    assert result.states()["causality"] == "DRIFT"
    assert diagnosis.format(line=line) in result.detail("causality")


def test_the_last_anchor_of_all_is_missing(tree):
    hunk = PATCHES[-1].hunks[-1]
    edit_file(tree, hunk.file, hunk.old, "")
    with unchanged(tree):
        assert call(tree).code == 2


@pytest.mark.parametrize("path", targets())
def test_a_target_was_deleted(tree, path):
    (tree / path).unlink()
    with unchanged(tree):
        result = call(tree, "--json")
    assert (result.code, result.verdict) == (2, "DRIFT")
    assert f"{path}: hunk" in result.out and "missing" in result.out


def test_a_target_nested_too_deeply_to_be_read(tree):
    with (tree / CAUSALITY).open("a") as file:
        file.write(f"x = {'-' * 8000}1\n")
    result = call(tree)
    assert result.code == 2 and CAUSALITY in result.err


@pytest.mark.parametrize("version", ["0.26.0", "0.27.2", "0.27.1.post1", "0.27.1rc1", "0.28.0.dev1"])
def test_an_unsupported_version(tree, version):
    set_version(tree, version)
    with unchanged(tree):
        result = call(tree)
        assert call(tree, "--json").verdict == "DRIFT"
    assert result.code == 2
    assert f"vLLM {version} is not supported: the patches fit 0.27.0 and 0.27.1" in result.out.splitlines()[-1]


@pytest.mark.parametrize("version", ["v0.27.1", "0.27.1.0", "0.27.01", "0.27", "0.27.1+rocm", "V0.27.1.0+cu129"])
def test_a_supported_version_however_it_is_spelt(tree, version):
    """As PEP 440 compares them."""
    set_version(tree, version)
    succeed(tree)
    assert call(tree, "--check").code == 0
    succeed(tree, "--revert")


# Our text was edited, or some of it is there


def test_someone_edits_our_text(patched_tree, template):
    edit_file(patched_tree, CAUSALITY, 'getattr(config, "is_causal", None)', 'getattr(config, "is_causal", False)')
    with unchanged(patched_tree):
        result = call(patched_tree, "--json")
        assert (result.code, result.verdict, result.states()["causality"]) == (2, "PARTIAL", "PARTIAL")
        assert "edited by someone else" in result.detail("causality")
        assert "--revert" in result.json()["message"]
        refused = call(patched_tree, "--revert")
        assert refused.code == 2 and CAUSALITY in refused.err and "--force" in refused.err
    succeed(patched_tree, "--revert", "--force")
    assert contents(patched_tree) == contents(template)


@pytest.mark.parametrize("keep_record", [True, False])
@each_patch
def test_an_edit_in_any_patch_is_seen(patched_tree, patch, keep_record):
    """Also if the old text is still a part of what is left, and if nobody recorded that we were here."""
    if not keep_record:
        shutil.rmtree(patched_tree / HOME)
    hunk = patch.hunks[0]
    line = next(line for line in hunk.new.splitlines(keepends=True) if line not in hunk.old and line.strip())
    edit_hunk(patched_tree, hunk, hunk.new, line, line.rstrip("\n") + "  # mine\n")
    result = call(patched_tree, "--json")
    assert result.code == 2
    if keep_record:
        assert result.states()[patch.name] == "PARTIAL"


def test_someone_edits_a_module_of_ours(patched_tree):
    with (patched_tree / MODULE).open("a") as file:
        file.write("# mine\n")
    result = call(patched_tree, "--check", "--json")
    assert (result.code, result.states()[row_of(MODULE)]) == (2, "PARTIAL")
    assert call(patched_tree, "--revert").code == 2


@pytest.mark.parametrize("keep_record", [True, False])
@pytest.mark.parametrize("path", OURS.files)
def test_an_installed_file_is_missing(patched_tree, path, keep_record):
    if not keep_record:
        shutil.rmtree(patched_tree / HOME)
    (patched_tree / path).unlink()
    with unchanged(patched_tree):
        result = call(patched_tree, "--json")
    assert (result.code, result.verdict) == (2, "PARTIAL")
    if keep_record:
        assert result.states()[row_of(path)] == "PARTIAL" and path in result.out


@pytest.mark.parametrize("keep_record", [True, False])
def test_all_installed_files_are_missing(patched_tree, keep_record):
    if not keep_record:
        shutil.rmtree(patched_tree / HOME)
    for path in OURS.files:
        (patched_tree / path).unlink()
    assert call(patched_tree).code == 2


def test_a_patched_file_is_gone(patched_tree, template):
    """Nothing is kept that could bring it back: the rest is taken out only if that is what is asked for."""
    (patched_tree / CAUSALITY).unlink()
    with unchanged(patched_tree):
        assert call(patched_tree).code == 2
        refused = call(patched_tree, "--revert")
        assert refused.code == 2 and CAUSALITY in refused.err
    forced = succeed(patched_tree, "--revert", "--force")
    assert CAUSALITY in forced.out + forced.err
    wanted = contents(template)
    del wanted[CAUSALITY]
    assert contents(patched_tree) == wanted


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.core and len(p.hunks) > 1], ids=lambda p: p.name)
def test_a_seam_copied_in_part_by_hand_is_not_shipped(template, patch):
    """The signs of the feature may lie in the part that was copied; the part that was not is still missing."""
    read = _site.reader(template)
    for left_out in patch.hunks:
        changes = {}
        for path in {hunk.file for hunk in patch.hunks}:
            text = read(path).decode()
            hunks = [hunk for hunk in patch.hunks if hunk.file == path and hunk != left_out]
            edits = [(_source.find_in_scope(text, hunk.scope, hunk.old)[0], hunk.old, hunk.new) for hunk in hunks]
            changes[path] = _source.replace_lines(read(path), edits)
        report = _patchlib.survey(lambda path, changes=changes: changes.get(path, read(path)), "0.27.1", patch_set())
        states = {row.name: row.state for row in report.patches}
        assert (states[patch.name], report.verdict) == ("PARTIAL", "PARTIAL"), left_out


def test_a_second_definition_is_not_unrelated(patched_tree):
    with (patched_tree / CAUSALITY).open("a") as file:
        file.write("\n\ndef _dflash_layer_causal(config, layer_type):\n    return True\n")
    result = call(patched_tree, "--json")
    assert (result.code, result.states()["causality"]) == (2, "PARTIAL")


@pytest.mark.parametrize("data", [b"# theirs\n", b""])
def test_a_file_in_the_way(tree, data):
    (tree / MODULE).write_bytes(data)
    with unchanged(tree):
        result = call(tree)
    assert result.code == 2 and f"{MODULE}: a file that is not ours is in the way" in result.err


# Our text, and others' elsewhere


@pytest.mark.parametrize("keep_record", [True, False])
def test_unrelated_lines_on_top(patched_tree, keep_record):
    if not keep_record:
        shutil.rmtree(patched_tree / HOME)
    for path in targets():
        place = patched_tree / path
        place.write_bytes(b"# unrelated\n" * 10 + place.read_bytes())
    with unchanged(patched_tree):
        result = call(patched_tree, "--json")
    assert (result.code, result.verdict) == (0, "NOOP")


def test_one_hunk_holds_the_text_of_another(tree, template):
    """Wholly, in the same scope."""
    (hunk,) = PATCHES[0].hunks
    anchor = "    if override is not None:\n"
    first = Patch("first", "", "", None, hunks=(Hunk(CAUSALITY, hunk.scope, anchor, hunk.new + anchor),), core=True)
    both = patch_set([first, *PATCHES])
    succeed(tree, patch_set=both)
    assert (tree / CAUSALITY).read_text().count(hunk.new) == 2
    assert call(tree, "--check", patch_set=both).code == 0
    succeed(tree, "--revert", patch_set=both)
    assert contents(tree) == contents(template)


def test_a_backport_by_someone_else(tree):
    """What they ported is theirs, the rest is applied, and a later run does not take our text for theirs."""
    edit_file(
        tree,
        CAUSALITY,
        '    override = (getattr(config, "dflash_config", None) or {}).get("causal")\n',
        '    override = getattr(config, "is_causal", None)  # theirs\n',
    )
    before = contents(tree)
    check = call(tree, "--check", "--json")
    assert (check.code, check.verdict) == (1, "APPLY")
    assert (check.states()["causality"], check.states()["registry"]) == ("SHIPPED", "APPLY")
    succeed(tree)
    for _ in range(2):
        again = succeed(tree, "--json")
        assert again.verdict == "NOOP"
        assert (again.states()["causality"], again.states()["registry"]) == ("SHIPPED", "NOOP")
    succeed(tree, "--revert")
    assert contents(tree) == before


def shipping(tree):
    """A tree that ships DFlash2 by itself and lacks all further fixes: patched by us, then passed off as upstream's."""
    # The port's own modules import what draft-noise adds.
    succeed(tree, patch_set=patch_set([patch for patch in PATCHES if patch.core or patch.name == "draft-noise"]))
    shutil.rmtree(tree / HOME)
    for hunk in [hunk for patch in PATCHES if patch.core for hunk in patch.hunks]:
        # The same syntax in other words, as upstream's own text is.
        place = tree / hunk.file
        added = [line for line in hunk.new.splitlines(keepends=True) if line not in hunk.old and line.strip()]
        text = place.read_text()
        for line in added:
            plain = not set("\"'\\#,([{") & set(line.rstrip()[-1:])
            text = text.replace(line, line.rstrip("\n") + "  #\n", 1) if plain else text
        place.write_text(text)
    for path in OURS.files:
        (tree / path).write_text("# upstream's\n")
    set_version(tree, "0.28.0")


def test_a_release_that_ships_it(tree):
    shipping(tree)
    with unchanged(tree):
        result = succeed(tree, "--json")
        assert result.verdict == "SHIPPED", result.json()["message"]
        states = result.states()
        assert {states[patch.name] for patch in PATCHES if patch.core} == {"SHIPPED"}
        missing = [name for name, state in states.items() if state == "MISSING"]
        assert missing and all(name in result.json()["message"] for name in missing)
        assert "MISSING" in succeed(tree).out
        assert call(tree, "--check").code == 0


# A result that would be wrong


def test_a_result_that_only_the_tree_shows_to_be_no_python(tree):
    """Each text is a part of Python, their sum is not: the block that follows loses its header."""
    hunk = Hunk(CAUSALITY, "_dflash_layer_causal", "    if override is not None:\n", "    override = override\n")
    mine = Patch("mine", "", "", None, hunks=(hunk,), core=True)
    with unchanged(tree):
        result = call(tree, "--json", patch_set=patch_set([*PATCHES, mine]))
    assert result.code == 2 and "not Python" in result.out
    assert result.states()["mine"] == "DRIFT"


def test_overlaps_that_only_the_tree_shows(tree):
    """Two scopes, one inside the other, whose anchors meet in one line."""
    anchor = "    if override is not None:\n"
    one = Hunk(CAUSALITY, "_dflash_layer_causal", anchor, "    if override or override is False:\n")
    text = (tree / CAUSALITY).read_text()
    start = text.index("def _dflash_layer_causal(")
    old = text[start : text.index(anchor) + len(anchor)]
    other = Hunk(CAUSALITY, "", old, old + "        pass\n    if override is not None:\n")
    both = [Patch(name, "", "", None, hunks=(hunk,), core=True) for name, hunk in (("one", one), ("two", other))]
    with unchanged(tree):
        result = call(tree, patch_set=patch_set(both))
    assert result.code in (2, 3) and "patch one: a hunk overlaps one of patch two" in result.err


@pytest.mark.parametrize(
    "line, lacks",
    [
        ("from vllm.logger import no_such_logger\n", "from vllm.logger import no_such_logger"),
        ("from vllm.no_such_module import f\n", "from vllm.no_such_module import f"),
        ("import vllm.no_such_module\n", "import vllm.no_such_module"),
        ("def f():\n    from .no_such_sibling import g\n", "no_such_sibling import g"),
    ],
)
def test_a_module_imports_what_this_vllm_lacks(tree, line, lacks):
    lacking = replace(OURS, files={**OURS.files, MODULE: OURS.files[MODULE] + line.encode()})
    with unchanged(tree):
        result = call(tree, "--json", patch_set=lacking)
    assert result.code == 2 and lacks in result.out


def test_a_hunk_imports_what_this_vllm_lacks(tree):
    (hunk,) = PATCHES[0].hunks
    hunk = replace(hunk, new="    from vllm.logger import no_such_logger\n" + hunk.new)
    lacking = patch_set([replace(PATCHES[0], hunks=(hunk,)), *PATCHES[1:]])
    with unchanged(tree):
        result = call(tree, "--json", patch_set=lacking)
    assert (result.code, result.states()["causality"]) == (2, "DRIFT")
    assert "no_such_logger" in result.out
