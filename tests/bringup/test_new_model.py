"""`jaxis new-model`: what it writes passes the tests of the family that it copied."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxis.bringup.new_model import new_model
from jaxis.errors import ConfigError
from jaxis.models.registry import built_in_models
from tests.support.places import REPOSITORY

PARITY = "tests/data/families.yaml"
TABLE = "src/jaxis/models/architectures.json"
# An editable installation's finder would put the installed package before the copy.
RUN_PYTEST = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
FAMILIES = sorted(
    {
        model.__module__.rpartition(".")[2]
        for architecture, model in built_in_models().items()
        if architecture.endswith("ForCausalLM")
    }
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The folder and the files that are changed, as in a checkout."""
    (tmp_path / "src/jaxis/models").mkdir(parents=True)
    (tmp_path / PARITY).parent.mkdir(parents=True)
    for file in (TABLE, PARITY):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    return tmp_path


@pytest.mark.sampled(24)
@pytest.mark.parametrize("like", FAMILIES)
def test_writes_the_file_with_its_declaration_and_the_test_row(checkout: Path, like: str):
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
    [declaration] = [node.value for node in family.body if isinstance(node, ast.Assign) and _calls_family(node.value)]
    assert [ast.unparse(argument) for argument in declaration.args[:2]] == ["'NewThing2'", "(NewThing2ForCausalLM,)"]
    assert {keyword.arg for keyword in declaration.keywords} <= {"tiny"}
    added = json.loads((checkout / TABLE).read_text()).items() - json.loads((REPOSITORY / TABLE).read_text()).items()
    assert added == {("NewThing2ForCausalLM", "new_thing2")}
    before, after = (REPOSITORY / PARITY).read_text().splitlines(), (checkout / PARITY).read_text().splitlines()
    assert set(before) <= set(after)
    rows = [yaml.safe_load((folder / PARITY).read_text())["families"] for folder in (REPOSITORY, checkout)]
    [added] = [row for row in rows[1] if row not in rows[0]]
    assert (added.pop("name"), added.pop("architecture")) == ("NewThing2", "NewThing2ForCausalLM")
    assert any(added.items() <= row.items() for row in rows[0])
    assert any(step.startswith("python tools/reference_keys.py") for step in made.next_steps)


def _calls_family(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Family"


@pytest.mark.slow
@pytest.mark.parametrize("like", FAMILIES)
def test_what_it_writes_passes_the_tests_of_the_family_it_copied(tmp_path: Path, like: str):
    for folder in ("src", "tests/models", "tests/support"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", PARITY):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / file, tmp_path / file)
    made = new_model("NewThing2", like, tmp_path)
    python, _, _, *arguments = shlex.split(made.check)
    assert python == "python"
    command = [sys.executable, "-c", RUN_PYTEST, *arguments, "-q"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout)


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("Falcon4", "qwen99", "is not a family of jaxis.*jaxis analyze names .*; choose one of: .*qwen3"),
        ("Falcon4", "lama", "is not a family of jaxis: did you mean llama"),
        ("Qwen3", "llama", "already exists"),
        ("falcon", "llama", "must be a class name such as"),
        ("FalconForCausalLM", "llama", "must be a class name such as"),
    ],
)
def test_mistakes(checkout: Path, name: str, like: str, message: str):
    before = (checkout / PARITY).read_text()
    with pytest.raises(ConfigError, match=message):
        new_model(name, like, checkout)
    assert (checkout / PARITY).read_text() == before
    assert [path.name for path in (checkout / "src/jaxis/models").iterdir()] == [Path(TABLE).name]


def test_a_folder_that_is_no_checkout(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a checkout of jaxis"):
        new_model("Falcon4", "llama", tmp_path)
