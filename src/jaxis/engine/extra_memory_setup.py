"""Construction of the extra memory that an engine's features need: adapters and the image encoder."""

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
from jaxis.vision.tower_source import LeftOut


def make_extra_memory(
    args: EngineArgs, opened: OpenedModel, tokenizer: Tokenizer | None, make_config: Callable[[EngineArgs], VllmConfig]
) -> tuple[ExtraMemory, LeftOut | None]:
    """Returns the extra memory that arguments and checkpoint require; and the image encoder, if it is left out.

    The function `make_config` must use a config.json that no model has read.

    Raises:
      ConfigError: A part of the checkpoint requires something that is not supported.
    """
    parts: list[ExtraMemory] = [AdapterMemory(args)] if args.enable_lora else []
    vision = encoder_memory(args, opened.path, opened.hf_config, tokenizer, make_config)
    left_out = vision if isinstance(vision, LeftOut) else None
    if not isinstance(vision, LeftOut):
        parts.append(vision)
    return JoinedMemory(parts) if len(parts) > 1 else parts[0] if parts else ExtraMemory(), left_out


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
