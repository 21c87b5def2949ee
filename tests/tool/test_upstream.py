"""tests/upstream.py finds what patching breaks and never passes unchecked; small stand-ins for vLLM and its tests."""

import pytest

from tests import upstream

TESTS = {
    "tests/test_a.py": """
import pytest, thing
def test_value(): assert thing.VALUE == 1
def test_always(): pass
def test_skipped(): pytest.skip("no reason")
""",
    "tests/test_b.py": "import pytest\ndef test_skipped(): pytest.skip('no GPU')\n",
    "tests/test_c.py": "import no_such_package\ndef test_never(): pass\n",
}


@pytest.fixture
def world(tmp_path, monkeypatch):
    """world(pristine value, patched value, files) -> before_and_after's arguments; a site is a folder with thing.py."""
    for name, text in TESTS.items():
        path = tmp_path / "sdist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def make(before, after, *files):
        data = {"version": "1", "lists": {"few": {"files": list(files)}}, "newer": {"2": list(files)}}
        monkeypatch.setattr(upstream, "DATA", data)
        sites = []
        for name, value in (("pristine", before), ("patched", after)):
            site = tmp_path / name
            site.mkdir()
            (site / "thing.py").write_text(f"VALUE = {value}\n")
            sites.append(site)
        return {"1": tmp_path / "sdist", "2": tmp_path / "sdist"}, *sites

    return make


@pytest.mark.parametrize(
    ("before", "after", "files", "status", "said"),
    [
        (1, 1, ["tests/test_a.py"], 0, "few: 1 files, 2 passed pristine, 2 patched"),
        (1, 2, ["tests/test_a.py"], 1, "lost: tests.test_a::test_value"),
        (2, 1, ["tests/test_a.py"], 0, "few: 1 files, 1 passed pristine, 2 patched"),
        (1, 1, ["tests/test_a.py", "tests/test_b.py"], 1, "not checked: no test of tests/test_b.py passes"),
        (1, 1, ["tests/test_c.py"], 1, "not checked: no test of tests/test_c.py passes"),
        (1, 1, ["tests/test_missing.py"], 1, "not checked: no test of tests/test_missing.py passes"),
    ],
)
def test_pristine_against_patched(world, capsys, before, after, files, status, said):
    assert upstream.before_and_after("few", *world(before, after, *files)) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("after", "file", "status", "said"),
    [
        (1, "tests/test_a.py", 0, "2's tests on the patched copy: 2 passed, 0 not"),
        (2, "tests/test_a.py", 1, "failed: tests.test_a::test_value"),
        (1, "tests/test_b.py", 1, "not checked: no test of tests/test_b.py passes"),
    ],
)
def test_later_releases_tests_must_all_pass(world, capsys, after, file, status, said):
    assert upstream.later_releases("newer", *world(3, after, file)) == status
    assert said in capsys.readouterr().out


def test_a_run_that_never_ends_has_not_passed(world, capsys, monkeypatch):
    monkeypatch.setattr(upstream, "RUN_LIMIT_S", 0)
    assert upstream.before_and_after("few", *world(1, 1, "tests/test_a.py")) == 1
    assert "ended after 0 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("index", "said"),
    [("http://127.0.0.1:9/simple", "could not be read"), ("empty", "has no source distribution of vLLM 0.27.1")],
)
def test_without_the_archive_nothing_passes(tmp_path, monkeypatch, capsys, index, said):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(upstream, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(upstream._drift, "_ask_pip", lambda: {"no-index": "1", "find-links": f"{tmp_path}/empty"})
    if index != "empty":
        monkeypatch.setattr(upstream._drift, "_ask_pip", lambda: {"index-url": index})
    monkeypatch.setattr("sys.argv", ["upstream", "quick"])
    assert upstream.main() == 3
    out = capsys.readouterr().out
    assert "skipped, nothing was checked" in out
    assert said in out
    assert not (tmp_path / "cache/vllm-0.27.1").exists()


def test_every_listed_file_is_listed_once():
    for name in upstream.DATA["lists"]:
        files = upstream.listed(name)
        assert len(files) == len(set(files)), name
