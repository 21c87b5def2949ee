"""The Dockerfile's own commands, run with sh against a private environment instead of an image."""

import os
import re
import shutil
import subprocess

import pytest

from tests.support.trees import REPO, venv_around

LINES = re.sub(r"\\\n", "", (REPO / "Dockerfile").read_text()).splitlines()


def instructions(word):
    return [line.split(None, 1)[1] for line in LINES if line.startswith(word + " ")]


def build(tree, folder):
    """COPY and RUN, with / standing for `folder` and python3 for the environment that holds `tree`."""
    for copy in instructions("COPY"):
        *sources, destination = copy.split()
        target = folder / destination.lstrip("/")
        for source in sources:
            found = sorted(REPO.glob(source.rstrip("/")))
            assert found, f"COPY {source}: nothing there"
            for path in found:
                into = target if source.endswith("/") else target / path.name
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(path, into) if path.is_dir() else shutil.copy2(path, into)
    commands = [re.sub(r"(?<=[\s=])/(?=opt/|tmp/)", f"{folder}/", command) for command in instructions("RUN")]
    path = os.pathsep.join([str(venv_around(tree) / "bin"), os.environ["PATH"]])
    return [
        subprocess.run(
            ["sh", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        for command in commands
    ]


def test_one_layer_from_a_base_that_can_be_chosen():
    assert instructions("ARG") == ["BASE_IMAGE=vllm/vllm-openai:v0.27.1"]
    assert instructions("FROM") == ["${BASE_IMAGE}"]
    (run,) = instructions("RUN")
    steps = [step.split("python3 ")[-1] for step in re.split(r"\s*&&\s*", run)]
    assert steps[1:3] == ["/opt/dflash2/apply_all.py", "/opt/dflash2/apply_all.py --check"]
    assert not instructions("ENV")


@pytest.mark.network
def test_a_good_base_is_patched_and_keeps_nothing_else(make_tree, tmp_path):
    tree = make_tree()
    (tmp_path / "tmp").mkdir()
    (done,) = build(tree, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tree / "vllm/model_executor/models/qwen3_dflash2.py").exists()
    assert "is patched" in done.stdout
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.network
def test_a_drifted_base_fails_the_build(make_tree, tmp_path):
    tree = make_tree()
    drifted = tree / "vllm/model_executor/models/qwen3_dflash.py"
    drifted.write_text(drifted.read_text().replace("def _dflash_layer_causal", "def _layer_causal"))
    (done,) = build(tree, tmp_path)
    assert done.returncode == 2
    assert "qwen3_dflash.py" in done.stderr
    assert not (tree / "vllm/model_executor/models/qwen3_dflash2.py").exists()
