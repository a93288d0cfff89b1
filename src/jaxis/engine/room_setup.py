"""Which features have room on the devices beside weights and caches."""

from __future__ import annotations

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.device_room import DeviceRoom
from jaxis.engine.loaded_model import LoadedModel
from jaxis.lora.room import AdapterRoom


def device_room(args: EngineArgs) -> DeviceRoom:
    """The room that an engine's arguments ask for."""
    return AdapterRoom(args) if args.enable_lora else DeviceRoom()


def cache_bytes_beside(room: DeviceRoom, args: EngineArgs, loaded: LoadedModel) -> int | None:
    """Bytes of the caches where these would take all memory of a device; None: as without room beside them."""
    platform = loaded.meshes[0].devices.flat[0].platform
    if args.kv_cache_memory_bytes is not None or platform == "cpu":
        return None
    most, dtype = loaded.most_cache_bytes, loaded.vllm_config.model_config.dtype
    nbytes = room.bytes_on(loaded.meshes, loaded.models, dtype, most)
    return most - nbytes if nbytes else None
