"""vLLM's adapters (LoRA), by its ids, as adapters of jaxis' model, by the digests of their files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

from jaxis.engine.execution.adapters import Adapters
from jaxis.errors import ConfigError, EngineError, JaxisError
from jaxis.integrations.vllm.contract import ADAPTER_REFUSED

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NO_ADAPTER = b""


class _Loaded(NamedTuple):
    path: str
    adapter: bytes


class AdapterTable:
    """The adapters that vLLM knows.

    Args:
      adapters: Those that they make of the model.
      max_loaded: How many stay in memory; the ones that were used least recently are read again when they are needed.
      has_prefix_cache: Whether vLLM's scheduler keeps what was computed with an adapter, under its name and path.
    """

    def __init__(self, adapters: Adapters, max_loaded: int, *, has_prefix_cache: bool) -> None:
        self._adapters, self._max_loaded, self._has_prefix_cache = adapters, max_loaded, has_prefix_cache
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()  # least recently used first
        self._pinned: set[int] = set()
        self._computed: dict[tuple[str, str], bytes] = {}  # by name and path, what requests were computed with
        self._placed: Set[bytes] = frozenset()

    @property
    def ids(self) -> set[int]:
        """Of the adapters in memory."""
        return set(self._loaded)

    def load(self, request: LoRARequest, *, again: bool = False) -> bytes:
        """Reads an adapter unless it is in memory; returns its adapter.

        Args:
          request: vLLM's.
          again: Whether its files may have changed.

        Raises:
          CheckpointError: It cannot be read, or is of another model.
          ConfigError: It has layers or a rank that there is no room for; or the prefix cache may hold what was computed
            with other files under this name and path.
        """
        if refused := [name for name in ADAPTER_REFUSED if getattr(request, name, None)]:
            raise ConfigError(
                f"the adapter {request.lora_name!r} has {', '.join(refused)}: give a folder of PEFT's files"
            )
        adapter_id, path = request.lora_int_id, request.lora_path
        known = self._loaded.get(adapter_id)
        is_known = known is not None and known.path == path and not again
        adapter = known.adapter if known is not None and is_known else self._adapters.add(self._adapters.read(path))
        if self._computed.get((request.lora_name, path), adapter) != adapter:
            self._release(adapter)
            raise ConfigError(
                f"the adapter {request.lora_name!r} in {path} is not what requests had before, and vLLM's "
                "prefix cache knows adapters by name and path: give another of either"
            )
        if not is_known:
            self._set(adapter_id, _Loaded(path, adapter))
            unpinned = [each for each in self._loaded if each not in self._pinned and each != adapter_id]
            for oldest in unpinned[: max(0, len(self._loaded) - self._max_loaded)]:
                self._set(oldest, None)
        self._loaded.move_to_end(adapter_id)
        return adapter

    def begin(self, request: LoRARequest) -> bytes:
        """Loads the adapter of a request that begins, and keeps it until `end`; returns its adapter.

        Raises:
          CheckpointError, ConfigError: See `load`. The request goes on without the adapter.
        """
        key = request.lora_name, request.lora_path
        try:
            adapter = self.load(request)
        except JaxisError:
            self._note_computed(key, NO_ADAPTER)
            raise
        self._note_computed(key, adapter)
        self._adapters.join(adapter)
        return adapter

    def _note_computed(self, key: tuple[str, str], adapter: bytes) -> None:
        if self._has_prefix_cache:
            self._computed[key] = adapter

    def end(self, adapter: bytes) -> None:
        """A request has ended that began with this adapter."""
        self._adapters.leave(adapter)

    def remove(self, adapter_id: int) -> bool:
        """Forgets an adapter once the last request that has it has ended; returns whether it was in memory."""
        if adapter_id not in self._loaded:
            return False
        self._pinned.discard(adapter_id)
        self._set(adapter_id, None)
        return True

    def pin(self, adapter_id: int) -> bool:
        """Keeps an adapter in memory until it is removed; returns whether it is there."""
        if adapter_id not in self._loaded:
            return False
        self._pinned.add(adapter_id)
        return True

    def place(self, adapters: Set[bytes]) -> None:
        """Puts the adapters of the next step into the model.

        Args:
          adapters: At most as many as the model has places, which vLLM's scheduler sees to.
        """
        for adapter in self._placed - adapters:
            self._adapters.give_back(adapter)
        for adapter in adapters - self._placed:
            if not self._adapters.has_place(adapter):
                raise EngineError(f"vLLM's scheduler has put more than max_loras adapters into a step: {len(adapters)}")
            self._adapters.take(adapter)
        self._placed = adapters

    def _set(self, adapter_id: int, loaded: _Loaded | None) -> None:
        before = self._loaded.pop(adapter_id, None)
        if loaded is not None:
            self._loaded[adapter_id] = loaded
        if before is not None:
            self._release(before.adapter)

    def _release(self, adapter: bytes) -> None:
        """Forgets an adapter that no id has; two ids may have the same files."""
        if all(each.adapter != adapter for each in self._loaded.values()):
            self._adapters.remove(adapter)
