"""The README keeps in step with the patches, the command line and the files it names."""

import re

import pytest

import apply_all
import patches
from _patchlib import State
from docs import patches_page
from tests.support.trees import REPO

README = (REPO / "README.md").read_text()


def test_the_page_of_patches_is_as_generated():
    assert patches_page.PAGE.read_text() == patches_page.page(), "run python -m docs.patches_page"


def test_the_page_of_patches_has_each_with_its_reason_and_its_files():
    text = patches_page.page()
    for patch in patches.PATCHES:
        assert f"| {patch.why} | {patch.shipped_in or 'no release'} |" in text
        section = text.split(f"\n## {patch.name}\n")[1].split("\n## ")[0]
        assert [hunk.file for hunk in patch.hunks if f"`{hunk.file}`" not in section] == []


PAGES = [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("docs/bench/README.md"), *REPO.glob("bench/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_linked_file_is_there(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_links_the_other_pages():
    for page in ("docs/PATCHES.md", "docs/ARCHITECTURE.md", "docs/bench/README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        assert f"]({page})" in README


@pytest.mark.parametrize("line", re.findall(r"^python apply_all\.py(.*?)(?:   .*)?$", README, re.MULTILINE))
def test_every_command_line_parses(line):
    apply_all.parse(line.split())


def test_the_table_has_each_state():
    table = README.split("| state | meaning |\n| --- | --- |\n")[1].split("\n\n")[0]
    assert sorted(row.split("|")[1].strip() for row in table.splitlines()) == sorted([*State, "UNREADABLE"])


def test_every_option_is_named():
    options = re.findall(r'add_argument\("(--\w+)"', (REPO / "apply_all.py").read_text())
    assert len(options) > 8
    assert [option for option in options if option not in README] == []
