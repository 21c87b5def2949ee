"""The README keeps in step with the patches, the command line and the files it names."""

import re

import pytest

import apply_all
import patches
from tests.support.trees import REPO

README = (REPO / "README.md").read_text()


def test_the_table_lists_each_patch_with_its_reason():
    wanted = [f"| {p.name} | {p.why} | {p.shipped_in or 'no release'} |" for p in patches.PATCHES]
    table = README.split("| patch | what it is for | in vLLM since |\n| --- | --- | --- |\n")[1].split("\n\n")[0]
    assert table.splitlines() == wanted


def test_every_linked_file_is_there():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 3
    assert [link for link in links if not (REPO / link).exists()] == []


@pytest.mark.parametrize("line", re.findall(r"^python apply_all\.py(.*?)(?:   .*)?$", README, re.MULTILINE))
def test_every_command_line_parses(line):
    apply_all.parse(line.split())
