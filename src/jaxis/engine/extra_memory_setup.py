"""Which features have room on the devices beside weights and caches."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config import VllmConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.extra_memory import ExtraMemory, JoinedMemory
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.opened_model import OpenedModel
from jaxis.lora.adapter_memory import AdapterMemory
from jaxis.tokenizer import Tokenizer
from jaxis.vision.encoder_memory import encoder_memory


def extra_memory(
    args: EngineArgs, opened: OpenedModel, tokenizer: Tokenizer | None, make_config: Callable[[EngineArgs], VllmConfig]
) -> tuple[ExtraMemory, list[str]]:
    """The room that an engine's arguments and its checkpoint ask for, and what to say of that which they get none for.

    Args:
      args: The engine's.
      opened: The checkpoint.
      tokenizer: The checkpoint's.
      make_config: Makes the engine's configuration, with a config.json that no model has read.

    Raises:
      ConfigError: A part of the checkpoint asks for something that is not supported.
    """
    rooms, notes = list[ExtraMemory](), list[str]()
    if args.enable_lora:
        rooms.append(AdapterMemory(args))
    vision = encoder_memory(args, opened.path, opened.hf_config, tokenizer, make_config)
    if isinstance(vision, str):
        notes.append(vision)
    elif vision is not None:
        rooms.append(vision)
    return JoinedMemory(rooms) if len(rooms) > 1 else rooms[0] if rooms else ExtraMemory(), notes


def cache_bytes_beside(room: ExtraMemory, args: EngineArgs, loaded: LoadedModel) -> int | None:
    """Bytes of the caches where these would take all memory of a device; None: as without room beside them."""
    platform = loaded.meshes[0].devices.flat[0].platform
    if args.kv_cache_memory_bytes is not None or platform == "cpu":
        return None
    most, dtype = loaded.most_cache_bytes, loaded.vllm_config.model_config.dtype
    nbytes = room.bytes_on(loaded.meshes, loaded.models, dtype, most)
    return most - nbytes if nbytes else None
