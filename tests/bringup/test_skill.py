"""The commands of AGENTS.md and of the bring-up skill run, in their order, in a checkout."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import transformers

from tests.support.places import REPOSITORY

SKILL = REPOSITORY / "skills" / "bring-up" / "SKILL.md"
COPIED = ("src", "tests", "tools", "docs", "examples", "pyproject.toml", "README.md", "CONTRIBUTING.md")
# An editable installation's finder would put the installed package before the copy.
RUN = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
kind, name, *sys.argv[1:] = sys.argv[1:]
if name == "jaxis.cli.script":
    from jaxis.cli.script import script
    script()
elif kind == "module":
    runpy.run_module(name, run_name="__main__", alter_sys=True)
elif kind == "file":
    runpy.run_path(name, run_name="__main__")
"""


def commands(page):
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^\$ (.+)$", "".join(blocks), re.MULTILINE)


def test_the_skill_has_the_open_format():
    front = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", SKILL.read_text())
    assert front[1] == SKILL.parent.name
    assert len(front[2]) < 1024


def test_what_agents_md_names_exists():
    for command in commands(REPOSITORY / "AGENTS.md"):
        for path in re.findall(r"(?:src|tests)/[\w/.]+", command):
            assert (REPOSITORY / path).exists(), command
    for tool in re.findall(r"`python (?:-m )?(tools[/.]\w+)", (REPOSITORY / "AGENTS.md").read_text()):
        place = REPOSITORY / tool.removesuffix(".py").replace(".", "/")
        assert place.with_suffix(".py").exists() or place.is_dir(), tool


@pytest.mark.slow
def test_commands_of_the_skill_run(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / ".venv").symlink_to(sys.prefix)
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, checkout / name)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
    config = transformers.Qwen3Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    named = {
        "CKPT": str(tmp_path / "checkpoint"),
        "NAME": "Falcon4",
        "FAMILY": "qwen3",
    }
    named["FILE"] = "src/jaxis/models/falcon4.py"
    path = os.pathsep.join([str(checkout / "src"), str(checkout)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    for command in commands(SKILL):
        program, *arguments = (named.get(word, word) for word in shlex.split(command))
        if program == "jaxis":
            started = ["module", "jaxis.cli.script", *arguments]
        elif program == "python":
            started = ["module", *arguments[1:]] if arguments[0] == "-m" else ["file", *arguments]
        else:
            started = ["module", program, *arguments]
        started = [sys.executable, "-c", RUN, *started]
        result = subprocess.run(started, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        # transformers has no Falcon4, which one test of those says.
        expected = 1 if "test_reference" in command else 0
        assert result.returncode == expected, f"{command}\n{result.stdout}\n{result.stderr}"
    assert (checkout / "report" / "report.md").exists()
