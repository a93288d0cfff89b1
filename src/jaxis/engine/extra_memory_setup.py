"""Construction of the extra memory that an engine's features need."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config import VllmConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.extra_memory import ExtraMemory, JoinedMemory
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.opened_model import OpenedModel
from jaxis.rooms import has_room, room_module
from jaxis.tokenizer import Tokenizer

MAKERS = {"lora": "adapter_memory", "image_encoder": "encoder_memory"}
"""Modules of the features that need extra memory, by their rooms, any of which may not be installed.

Each has a function `make_memory(args, path, hf_config, tokenizer, make_config) -> ExtraMemory`.
"""


def make_extra_memory(
    args: EngineArgs, opened: OpenedModel, tokenizer: Tokenizer | None, make_config: Callable[[EngineArgs], VllmConfig]
) -> ExtraMemory:
    """Returns the extra memory that arguments and checkpoint require.

    The function `make_config` must use a config.json that no model has read.

    Raises:
      ConfigError: A part of the checkpoint requires something that is not supported.
    """
    modules = [room_module(room, module, room) for room, module in MAKERS.items() if has_room(room)]
    return JoinedMemory(
        [module.make_memory(args, opened.path, opened.hf_config, tokenizer, make_config) for module in modules]
    )


def cache_bytes_beside(extra_memory: ExtraMemory, args: EngineArgs, loaded: LoadedModel) -> int | None:
    """Returns the size of caches that leave extra memory on a device; None if nothing limits them.

    On CPU, and with a requested cache size, the caches do not take all memory, so nothing limits them.
    """
    platform = loaded.meshes[0].devices.flat[0].platform
    if args.kv_cache_memory_bytes is not None or platform == "cpu":
        return None
    most, dtype = loaded.most_cache_bytes, loaded.vllm_config.model_config.dtype
    nbytes = extra_memory.bytes_on(loaded.meshes, loaded.models, dtype, most)
    return most - nbytes if nbytes else None
