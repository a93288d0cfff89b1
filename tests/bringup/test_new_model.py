"""`jaxis new-model`: what it writes passes the tests of the family that it copied."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxis.bringup.new_model import new_model
from jaxis.errors import ConfigError
from jaxis.models.registry import built_in_models
from tests.support.places import REPOSITORY

CHANGED = ("src/jaxis/models/registry.py", "tests/support/parity.py", "tools/supported_models/families.py")
# An editable installation's finder would put the installed package before the copy.
RUN_PYTEST = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
FAMILIES = sorted(
    {
        path.partition(":")[0].rpartition(".")[2]
        for architecture, path in built_in_models().items()
        if architecture.endswith("ForCausalLM")
    }
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that are changed, as in a checkout."""
    for name in CHANGED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("like", FAMILIES)
def test_writes_the_file_the_registry_line_the_test_row_and_the_entry_of_the_page(checkout: Path, like: str):
    made = new_model("NewThing2", like, checkout)
    assert made.architecture == "NewThing2ForCausalLM"
    family = ast.parse((checkout / "src/jaxis/models/new_thing2.py").read_text())
    defined = [node.name for node in family.body if isinstance(node, ast.ClassDef)]
    assert "NewThing2ForCausalLM" in defined
    copied = {
        node.name
        for node in ast.parse((REPOSITORY / f"src/jaxis/models/{like}.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert not copied & {name for name in defined if name.startswith("NewThing2")}
    registry = (checkout / CHANGED[0]).read_text()
    lines = re.findall(r'^    "(\w+)": "jaxis', registry, re.MULTILINE)
    assert "NewThing2ForCausalLM" in lines
    assert lines == sorted(lines)
    ast.parse((checkout / CHANGED[1]).read_text())
    for name in CHANGED:
        before, after = (REPOSITORY / name).read_text().splitlines(), (checkout / name).read_text().splitlines()
        added = [line for line in after if line not in before]
        assert any("NewThing2" in line for line in added)
        assert set(before) <= set(after)


@pytest.mark.slow
@pytest.mark.parametrize("like", FAMILIES)
def test_what_it_writes_passes_the_tests_of_the_family_it_copied(tmp_path: Path, like: str):
    for folder in ("src", "tests/models", "tests/support"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / CHANGED[2]).parent.mkdir(parents=True)
    for file in ("pyproject.toml", CHANGED[2]):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    made = new_model("NewThing2", like, tmp_path)
    python, _, _, *arguments = made.check.replace("'", "").split()
    assert python == "python"
    command = [sys.executable, "-c", RUN_PYTEST, *arguments, "-q"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout)


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("Falcon4", "qwen99", "is not a family of jaxis; choose one of: .*qwen3"),
        ("Qwen3", "llama", "already exists"),
        ("falcon", "llama", "must be a class name such as"),
        ("FalconForCausalLM", "llama", "must be a class name such as"),
    ],
)
def test_mistakes(checkout: Path, name: str, like: str, message: str):
    before = {path: (checkout / path).read_text() for path in CHANGED}
    with pytest.raises(ConfigError, match=message):
        new_model(name, like, checkout)
    assert before == {path: (checkout / path).read_text() for path in CHANGED}


def test_a_folder_that_is_no_checkout(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a checkout of jaxis"):
        new_model("Falcon4", "llama", tmp_path)
