"""Ways in which a family becomes known: built in, registered, or from another package's entry point."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxis.errors import ConfigError
from jaxis.models import registry
from jaxis.models.llama import LlamaForCausalLM
from jaxis.models.mistral import MistralForCausalLM
from jaxis.models.registry import (
    built_in_families,
    built_in_models,
    declared_architectures,
    get_model_class,
    register_model,
    supported_architectures,
)
from tests.support.places import REPOSITORY
from tools.supported_models.__main__ import KEYS, PLAIN, RENAMES, TABLE
from tools.supported_models.table import family_keys, plain_ggufs, renames, table

EXTERNAL_MODEL = REPOSITORY / "examples" / "external_model"


@pytest.fixture(autouse=True)
def no_registrations(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_every_file_of_a_family_declares_its_classes_and_each_name_is_declared_once():
    declared = [name for family in built_in_families() for name in family.architectures]
    assert len(declared) == len(set(declared))
    defined = {
        node.name
        for path in Path(registry.__file__).parent.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and re.search("(For(CausalLM|ConditionalGeneration)|LMHeadModel)$", node.name)
    }
    assert set(built_in_models()) == defined
    for architecture, model_class in built_in_models().items():
        assert get_model_class([architecture]) is model_class


def test_the_tables_have_what_the_files_declare():
    for file, text in ((TABLE, table()), (PLAIN, plain_ggufs()), (RENAMES, renames()), (KEYS, family_keys())):
        assert file.read_text() == text, "run python -m tools.supported_models"
    assert sorted(declared_architectures()) == supported_architectures()


def test_a_family_without_its_file_is_an_error_of_one_line_and_is_not_listed(monkeypatch):
    monkeypatch.setattr(registry, "_modules", lambda: {"GoneForCausalLM": "gone", "LlamaForCausalLM": "llama"})
    with pytest.raises(ConfigError) as error:
        get_model_class(["GoneForCausalLM"])
    assert str(error.value) == "GoneForCausalLM needs jaxis.models.gone, which is not part of this installation"
    with pytest.raises(ConfigError, match=r"needs jaxis\.models\.gone"):
        get_model_class(["GoneModel"])
    assert {name for family in built_in_families.__wrapped__() for name in family.architectures} >= {"LlamaForCausalLM"}


def test_another_name_of_an_architecture_is_the_same_class():
    assert get_model_class(["InternLM3ForCausalLM"]) is LlamaForCausalLM
    assert "InternLM3ForCausalLM" in supported_architectures()
    assert "InternLM3ForCausalLM" not in built_in_models()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("architecture", "file"),
    [("LlamaForCausalLM", "llama"), ("KimiK25ForConditionalGeneration", "deepseek_v3"), ("Unheard", None)],
)
def test_a_name_imports_only_the_file_of_its_family(architecture, file):
    script = f"""
import sys
from jaxis.models.registry import is_supported
print(is_supported([{architecture!r}]))
print(*(name for name, module in sys.modules.items() if name.startswith("jaxis.models.") and hasattr(module, "FAMILY")))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == (["True", f"jaxis.models.{file}"] if file else ["False"])


def test_the_first_known_name_decides():
    assert get_model_class(["Unheard", "MistralForCausalLM", "LlamaForCausalLM"]) is MistralForCausalLM


def test_a_class_can_be_registered():
    register_model("MineForCausalLM", LlamaForCausalLM)
    assert get_model_class(["MineForCausalLM"]) is LlamaForCausalLM
    assert "MineForCausalLM" in supported_architectures()


def test_a_class_can_be_registered_by_its_path():
    register_model("MineForCausalLM", "jaxis.models.llama:LlamaForCausalLM")
    assert get_model_class(["MineForCausalLM"]) is LlamaForCausalLM


def test_a_registration_overrides_a_built_in_class():
    register_model("LlamaForCausalLM", MistralForCausalLM)
    assert get_model_class(["LlamaForCausalLM"]) is MistralForCausalLM


def test_a_path_without_a_class_is_refused():
    with pytest.raises(ConfigError, match=r"write it as 'package.module:Class'"):
        register_model("MineForCausalLM", "jaxis.models.llama")


@pytest.mark.parametrize("path", ["no_such_package:Model", "jaxis.models.llama:NoSuchModel"])
def test_a_path_that_leads_nowhere_is_named(path):
    register_model("MineForCausalLM", path)
    with pytest.raises(ConfigError, match=f"'{path}' registered for MineForCausalLM cannot be imported"):
        get_model_class(["MineForCausalLM"])


@pytest.mark.slow
def test_an_installed_package_adds_a_family(tmp_path):
    install = ["install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(EXTERNAL_MODEL)], check=True)
    assert {path.name for path in tmp_path.iterdir()} >= {"jaxis_olmo2.py", "jaxis_olmo2-0.1.0.dist-info"}
    # The package's own test loads a checkpoint, here through the entry point alone.
    script = """
import sys, tempfile
sys.path.append(sys.argv[1])
import test_jaxis_olmo2 as example
example.register_model = lambda *_: None
from pathlib import Path
with tempfile.TemporaryDirectory() as folder:
    example.test_logits_equal_transformers(Path(folder))
print(example.Olmo2ForCausalLM.__module__, sys.modules["jaxis_olmo2"].__file__)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(EXTERNAL_MODEL)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "jaxis_olmo2.py") in result.stdout
