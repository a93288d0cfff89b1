"""Adapters of vLLM, by vLLM's ids, as adapters of jaxis, by the digests of their files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

from jaxis.errors import ConfigError, EngineError, JaxisError
from jaxis.integrations.vllm.contract import ADAPTER_REFUSED
from jaxis.lora.store import AdapterStore

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NO_ADAPTER = b""


class _Loaded(NamedTuple):
    path: str
    adapter: bytes


class AdapterTable:
    """Table of the adapters that vLLM knows.

    Args:
      adapters: The model's adapters.
      max_loaded: Number of adapters that stay in memory; the least recently used ones are read again when needed.
      has_prefix_cache: True if vLLM's scheduler caches an adapter's results, under the adapter's name and path.
    """

    def __init__(self, adapters: AdapterStore, max_loaded: int, *, has_prefix_cache: bool) -> None:
        self._adapters, self._max_loaded, self._has_prefix_cache = adapters, max_loaded, has_prefix_cache
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()  # least recently used first
        self._pinned: set[int] = set()
        self._computed: dict[tuple[str, str], bytes] = {}  # by name and path: the requests' adapter
        self._placed: Set[bytes] = frozenset()

    @property
    def ids(self) -> set[int]:
        """vLLM's ids of the adapters in memory."""
        return set(self._loaded)

    def load(self, request: LoRARequest, *, again: bool = False) -> bytes:
        """Reads an adapter unless it is in memory; returns its digest.

        Args:
          request: vLLM's request for the adapter.
          again: True if the files may have changed.

        Raises:
          CheckpointError: The adapter cannot be read, or is for another model.
          ConfigError: Its layers or rank do not fit; or the prefix cache may have results of other files under this
            name and path.
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
        """Loads the adapter of a new request and keeps it until `end`; returns its digest.

        Raises:
          CheckpointError, ConfigError: `load` fails. The request continues without the adapter.
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
        """Releases the adapter of a request that has ended."""
        self._adapters.leave(adapter)

    def remove(self, adapter_id: int) -> bool:
        """Forgets an adapter after the last request with it has ended; returns whether it was in memory."""
        if adapter_id not in self._loaded:
            return False
        self._pinned.discard(adapter_id)
        self._set(adapter_id, None)
        return True

    def pin(self, adapter_id: int) -> bool:
        """Keeps an adapter in memory until it is removed; returns whether it is in memory."""
        if adapter_id not in self._loaded:
            return False
        self._pinned.add(adapter_id)
        return True

    def place(self, adapters: Set[bytes]) -> None:
        """Puts the adapters of the next step into the model's places.

        Args:
          adapters: Digests, at most as many as the model has places. vLLM's scheduler ensures that.
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
        """Forgets an adapter unless another id has the same files."""
        if all(each.adapter != adapter for each in self._loaded.values()):
            self._adapters.remove(adapter)
