"""The adapters that an engine knows, and which of them have a place in the model."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict

import jax

from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.errors import CheckpointError, ConfigError, RequestError
from jaxis.lora.adapted_model import AdaptedModel
from jaxis.lora.adapter import LowRankChange, digest_of, read_adapter


class AdapterStore:
    """The `Variants` that adapters make of a model. An adapter is known by the digest of its files.

    `load` and `unload` may be called from any thread, all else from the engine's.

    Args:
      base: The model.
      max_loras: Adapters in a step.
      max_lora_rank: Of an adapter.
      max_cpu_loras: Adapters that are known; None is as many as fit into memory.
    """

    def __init__(self, base: ModelArrays, max_loras: int, max_lora_rank: int, max_cpu_loras: int | None) -> None:
        self._model = AdaptedModel(base, max_loras, max_lora_rank)
        self._max_known = max_cpu_loras
        self._lock = threading.Lock()
        self._known: dict[bytes, dict[str, LowRankChange]] = {}
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently taken first
        self._free = list(reversed(range(max_loras)))
        self._running: Counter[bytes] = Counter()
        self._unfinished: Counter[bytes] = Counter()

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one adapter in the model."""
        return self._model.bytes_per_place

    def load(self, path: str | os.PathLike[str]) -> bytes:
        """Reads an adapter, unless one with the same files is known; returns its digest.

        Raises:
          CheckpointError, ConfigError: See `read_adapter`; or the adapter does not fit the model.
        """
        adapter = read_adapter(path)
        changes = self._model.changes_of(adapter)
        if digest_of(adapter.path) != adapter.digest:
            raise CheckpointError(f"{adapter.path} changed while it was read: try again")
        with self._lock:
            if adapter.digest not in self._known:
                if self._max_known is not None and len(self._known) >= self._max_known:
                    self._forget_one()
                self._known[adapter.digest] = changes
        return adapter.digest

    def unload(self, digest: bytes) -> None:
        """Forgets an adapter.

        Raises:
          RequestError: Requests use it.
        """
        with self._lock:
            if self._unfinished[digest]:
                raise RequestError(f"the adapter is in use by {self._unfinished[digest]} sequences: wait for them")
            self._known.pop(digest, None)

    def _forget_one(self) -> None:
        unused = next((digest for digest in self._known if not self._unfinished[digest]), None)
        if unused is None:
            raise ConfigError(f"all of max_cpu_loras={self._max_known} adapters are in use: raise it, or wait")
        del self._known[unused]

    @property
    def arrays(self) -> list[jax.Array]:
        """See `Variants`."""
        return self._model.arrays

    def merge(self, arrays: list[jax.Array], places: jax.Array) -> GenerativeModel:
        """See `Variants`."""
        return self._model.merge(arrays, places)

    def check(self, variant: bytes) -> None:
        """See `Variants`."""
        if variant not in self._known:
            raise RequestError("the request's adapter is not loaded any more: load it again")

    def place_of(self, variant: bytes) -> int:
        """See `Variants`."""
        return 1 + self._places[variant] if variant else 0

    def begin(self) -> None:
        """See `Places`."""
        self._running.clear()
        self._unfinished.clear()

    def join(self, variant: bytes) -> None:
        """See `Places`."""
        self._unfinished[variant] += bool(variant)

    def leave(self, variant: bytes) -> None:
        """See `Places`."""
        self._unfinished[variant] -= bool(variant)

    def take(self, variant: bytes) -> bool:
        """See `Places`."""
        if not variant:
            return True
        if variant not in self._places:
            if not self._free and not self._free_a_place():
                return False
            self._places[variant] = self._free.pop()
            self._model.put(self._known[variant], self._places[variant])
        self._places.move_to_end(variant)
        self._running[variant] += 1
        return True

    def give_back(self, variant: bytes) -> None:
        """See `Places`."""
        if variant:
            self._running[variant] -= 1

    def _free_a_place(self) -> bool:
        unused = next((variant for variant in self._places if not self._running[variant]), None)
        if unused is not None:
            self._free.append(self._places.pop(unused))
        return unused is not None
