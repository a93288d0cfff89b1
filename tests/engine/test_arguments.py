"""The arguments of an engine: one list, from which the command line, `LLM` and the documentation take theirs."""

import re
from typing import get_type_hints

import pytest

from jaxis.engine.argument_fields import argument_infos, argument_types
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_kwargs import EngineKwargs
from jaxis.errors import ConfigError
from tests.support.places import REPOSITORY

PAGE = REPOSITORY / "docs" / "loading.md"


def test_keyword_arguments_have_the_same_names_and_types():
    assert get_type_hints(EngineKwargs) == {name: hint for name, hint in argument_types().items() if name != "model"}


def test_every_argument_is_described():
    described = re.findall(r"^      (\w+): ", EngineArgs.__doc__, re.MULTILINE)
    assert [name for name in described if name != "ConfigError"] == list(argument_infos())


def test_the_page_names_every_argument_and_its_default():
    page = PAGE.read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", page, re.MULTILINE))
    defaults = {name: EngineArgs.__dataclass_fields__[name].default for name in argument_infos()}
    assert set(defaults) <= set(rows)
    for name, default in defaults.items():
        if name in rows and default is not None and name not in ("revision", "token", "cache_dir"):
            assert rows[name].strip(' `"') == str(default), name


def test_quantization_is_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="quantization='int3' is neither one of"):
        EngineArgs(quantization="int3")
    (tmp_path / "rules.yaml").write_text("- {module_path: '.*', weight_qtype: int3}\n")
    with pytest.raises(ConfigError, match=r"rules.yaml: rule 1: weight_qtype='int3' is not supported"):
        EngineArgs(quantization=tmp_path / "rules.yaml")
    with pytest.raises(ConfigError, match="kv_cache_memory='much' must be a number of bytes"):
        EngineArgs(kv_cache_memory="much")


def test_layers_that_draft_are_refused_with_several_data_ranks():
    with pytest.raises(
        ConfigError, match="method='mtp' is for one data rank, not for data_parallel_size=2: give ngram"
    ):
        EngineArgs(data_parallel_size=2, enable_expert_parallel=True, speculative_config={"method": "mtp"})
