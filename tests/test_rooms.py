"""Requests to a room that is not installed are refused in one line."""

import pytest

from jaxis import rooms
from jaxis.engine.argument_groups.fields import argument_infos
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.engine_client import GENERATION
from jaxis.errors import ConfigError
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.rooms import has_room, room_module
from jaxis.runners import kind_of


def test_rooms_are_found_without_importing_what_is_in_them():
    assert has_room("lora")
    assert has_room("server.llama_cpp")
    assert not has_room("frescos")
    assert not has_room("frescos.of.giotto")


@pytest.fixture
def nothing_optional(monkeypatch):
    monkeypatch.setattr(rooms, "has_room", lambda _: False)


VALUES = {
    "adapter": "folder",
    "enable_lora": True,
    "kv_events_config": {"enable_kv_cache_events": True},
    "kv_offloading_dir": "folder",
    "kv_offloading_size": 1,
    "kv_transfer_config": {"kv_role": "kv_both"},
    "lora_modules": {"a": "folder"},
    "nnodes": 2,
    "speculative_config": {"method": "ngram"},
}


@pytest.mark.parametrize("name", [name for name, info in argument_infos().items() if info.room])
def test_an_argument_names_the_room_that_it_lacks(name, nothing_optional):
    message = rf"^{name} needs jaxis\.{argument_infos()[name].room}, which is not part of this installation$"
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**{name: VALUES[name]})


def test_the_defaults_need_no_optional_room(nothing_optional):
    EngineArgs()


def test_a_gguf_file_names_the_room_that_reads_it(nothing_optional, tmp_path):
    file = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match=r"model\.gguf needs jaxis\.loading\.gguf, which is not part"):
        open_checkpoint(file)


def test_a_module_of_a_room_is_imported():
    assert room_module("engine.drafting", "make", "speculative_config").__name__ == "jaxis.engine.drafting.make"


def test_vectors_need_the_room_of_pooling(nothing_optional):
    with pytest.raises(ConfigError, match=r"^runner='pooling' needs jaxis\.pooling, which is not part"):
        kind_of(EngineArgs(), "pooling")
    assert kind_of(EngineArgs(), "auto") is GENERATION
