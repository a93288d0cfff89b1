"""Without its extras jaxis runs, and what needs one says so in one line. A process of its own hides their modules."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from jaxis.host.extras import EXTRAS, missing_module
from tests.support.places import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
HIDE = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if any(name == module or name.startswith(module + ".") for module in {sum(EXTRAS.values(), ())!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run_without_extras(code, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HIDE + code, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def run_command(*arguments):
    return run_without_extras("from jaxis.cli.main import main\nmain()", *arguments)


def requirement_name(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_the_help_and_generate_need_none():
    code = """
from jaxis.cli.main import app

small = ["--kv-cache-memory", "4MiB"]
for command in (["--help"], ["generate", "the cat", "--max-tokens", "2", "--raw", *small], ["chat", *small]):
    print(app(command, standalone_mode=False), flush=True)
"""
    process = run_without_extras(code)
    assert process.returncode == 0, process.stderr
    assert "generate" in process.stdout


def test_several_hosts_need_one():
    result = run_without_extras("from jaxis import LLM\nLLM(nnodes=2, tensor_parallel_size=2)")
    assert "ConfigError: LLM with nnodes=2 needs fastapi: pip install 'jaxis[server]'" in result.stderr


def test_published_events_need_one():
    result = run_without_extras("from jaxis import LLM\nLLM(kv_events_config={'enable_kv_cache_events': True})")
    assert "ConfigError: kv_events_config needs msgspec: pip install 'jaxis[kv-events]'" in result.stderr


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve"], "jaxis serve needs fastapi: pip install 'jaxis[server]'"),
        (["run-batch", "-i", os.devnull, "-o", "-"], "jaxis run-batch needs fastapi: pip install 'jaxis[server]'"),
        (["infer", "--replicas", "2"], "--replicas needs ray: pip install 'jaxis[ray]'"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(arguments, line):
    process = run_command(*arguments)
    assert process.returncode == 1
    assert process.stderr == f"jaxis: error: {line}\n"


def test_an_orbax_checkpoint_names_its_own(tmp_path):
    process = run_without_extras(
        """
from jaxis.errors import ConfigError
from jaxis.loading.orbax_checkpoint import OrbaxCheckpoint

try:
    OrbaxCheckpoint(sys.argv[1])
except ConfigError as error:
    print(error)
""",
        tmp_path,
    )
    assert process.stdout == f"the Orbax checkpoint {tmp_path} needs orbax: pip install 'jaxis[orbax]'\n"


def test_every_distribution_of_an_extra_is_looked_for():
    of_module = packages_distributions()
    for extra, modules in EXTRAS.items():
        if missing_module(extra) is not None:
            continue  # one that `all` does not bring
        wanted = {requirement_name(requirement) for requirement in PROJECT["optional-dependencies"][extra]} - {"jaxis"}
        found = {requirement_name(name) for module in modules for name in of_module[module.partition(".")[0]]}
        # uvicorn goes on without uvloop; typer brings pydantic.
        assert wanted - {"uvloop", "pydantic"} <= found, extra


def test_all_is_every_extra_of_the_list_but_ray_which_is_heavy_and_wandb_which_is_a_service():
    names = [name for name in EXTRAS if name not in ("ray", "wandb")]
    assert PROJECT["optional-dependencies"]["all"] == [f"jaxis[{','.join(names)}]"]
