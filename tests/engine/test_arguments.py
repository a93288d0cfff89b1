"""The arguments of an engine: one list, from which the command line, `LLM` and the documentation take theirs."""

import itertools
import os
from typing import get_type_hints

import pytest

from jaxis.engine.argument_groups.combinations import REFUSALS, EngineFeature
from jaxis.engine.argument_groups.engine_kwargs import EngineKwargs
from jaxis.engine.argument_groups.fields import argument_types
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.cache_memory import set_gpu_memory_utilization
from jaxis.errors import ConfigError
from tests.support.places import REPOSITORY
from tools import engine_arguments


def test_keyword_arguments_have_the_same_names_and_types():
    assert get_type_hints(EngineKwargs) == {name: hint for name, hint in argument_types().items() if name != "model"}


def test_lists_of_arguments_are_what_the_declaration_says():
    """`EngineArgs`' docstring, `EngineKwargs`, the configuration's fields and the table of docs/loading.md."""
    for path, text in engine_arguments.rendered().items():
        assert path.read_text("utf-8") == text, f"{path} is out of date: run python -m tools.engine_arguments"


def test_quantization_is_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match="quantization='int3' is neither one of"):
        EngineArgs(quantization="int3")
    (tmp_path / "rules.yaml").write_text("- {module_path: '.*', weight_qtype: int3}\n")
    with pytest.raises(ConfigError, match=r"rules.yaml: rule 1: weight_qtype='int3' is not supported"):
        EngineArgs(quantization=tmp_path / "rules.yaml")
    with pytest.raises(ConfigError, match="kv_cache_memory='much' must be a number of bytes"):
        EngineArgs(kv_cache_memory="much")


ASKS_FOR = {
    EngineFeature.NO_PREFIX_CACHE: {"enable_prefix_caching": False},
    EngineFeature.HOSTS: {"nnodes": 2, "tensor_parallel_size": 2},
    EngineFeature.STAGES: {"pipeline_parallel_size": 2},
    EngineFeature.DATA_RANKS: {"data_parallel_size": 2, "enable_expert_parallel": True},
    EngineFeature.DECODE_CONTEXT: {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    EngineFeature.KV_EVENTS: {"kv_events_config": {"enable_kv_cache_events": True}},
    EngineFeature.KV_OFFLOADING: {"kv_offloading_size": 1},
    EngineFeature.KV_TRANSFER: {"kv_transfer_config": {"kv_role": "kv_both"}},
    EngineFeature.ADAPTERS: {"enable_lora": True},
    EngineFeature.LAYER_DRAFTS: {"speculative_config": {"method": "mtp"}},
}


@pytest.mark.parametrize(
    "pair", itertools.combinations(EngineFeature, 2), ids=lambda pair: "+".join(f.name for f in pair)
)
def test_just_the_features_that_the_table_names_are_refused_together(pair):
    arguments = ASKS_FOR[pair[0]] | ASKS_FOR[pair[1]]
    reasons = [refusal.because for refusal in REFUSALS if {refusal.first, refusal.second} == set(pair)]
    if not reasons:
        EngineArgs(**arguments)
        return
    [because] = reasons
    with pytest.raises(ConfigError, match=f"does not combine with .*, because {because}: leave one of them out"):
        EngineArgs(**arguments)


def test_the_page_of_proofs_has_the_table():
    others: dict[str, list[str]] = {}
    for first, second, _ in REFUSALS:
        others.setdefault(first.value, []).append(second.value)
    rows = "\n".join(f"| {feature} | {', '.join(names)} |" for feature, names in others.items())
    assert f"|---|---|\n{rows}\n\n" in (REPOSITORY / "docs" / "proof.md").read_text()


@pytest.mark.parametrize("share", [0, -0.5, 1.5, True, "0.9"])
def test_a_share_of_gpu_memory_that_is_none(share):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=.* must be a number above 0, and at most 1"):
        EngineArgs(gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("share", "environment", "set_to"),
    [
        (None, {}, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        (0.5, {}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        (None, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}),
        (None, {"XLA_CLIENT_MEM_FRACTION": "0.3"}, {"XLA_CLIENT_MEM_FRACTION": "0.3"}),
        (0.5, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
    ],
)
def test_gpu_memory_by_argument_environment_or_default(share, environment, set_to, monkeypatch):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        monkeypatch.setenv(name, environment.get(name, ""))
    set_gpu_memory_utilization(share)
    assert {name: os.environ[name] for name in names if os.environ.get(name)} == set_to
