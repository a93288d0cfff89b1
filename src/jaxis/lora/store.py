"""The adapters that an engine knows, and which of them have a place in the model."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxis.engine.execution.adapters import VariantsInUseError
from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.engine.scheduling.places import PlaceUse
from jaxis.errors import CheckpointError, RequestError
from jaxis.lora.adaptable import ALL_LINEAR
from jaxis.lora.adapted_model import AdaptedModel, Changes, parts_of
from jaxis.lora.adapter import digest_of, read_adapter
from jaxis.lora.root import check_files_inside, find_adapter
from jaxis.tokenizer.config import TEMPLATE_FILES
from jaxis.tokenizer.template_choice import adapter_template


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in memory.

    Attributes:
      digest: SHA-256 of its files.
      changes: By the names of the model's modules.
      parts: See `Adapters.parts_of`.
      generation: Of the model's weights that they were read for; see `AdaptedModel`.
    """

    digest: bytes
    changes: Changes
    parts: frozenset[str]
    generation: int


class AdapterStore:
    """The `Adapters` that adapters make of a model. An adapter is known by the digest of its files.

    Attributes:
      named: Name, folder and digest of each adapter that was loaded at the start.

    Args:
      base: The model.
      max_loras: Adapters in a step.
      max_lora_rank: Of an adapter.
      max_cpu_loras: Adapters that are known; None is as many as fit into memory.
      root: The folder outside of which no adapter is read; None is any.
      targets: See `AdaptedModel`.
    """

    def __init__(
        self,
        base: ModelArrays,
        max_loras: int,
        max_lora_rank: int,
        max_cpu_loras: int | None = None,
        root: Path | None = None,
        targets: Sequence[str] = (ALL_LINEAR,),
    ) -> None:
        self._model = AdaptedModel(base, max_loras, max_lora_rank, targets)
        self._max_known, self._root = max_cpu_loras, root
        self._known: OrderedDict[bytes, LoadedAdapter] = OrderedDict()  # least recently added first
        self._kept: set[bytes] = set()  # of those, the ones that stay until they are removed
        self._removed: set[bytes] = set()  # those that go once the last sequence has ended
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently taken first
        self._free = list(reversed(range(max_loras)))
        self._running: Counter[bytes] = Counter()
        self._unfinished: Counter[bytes] = Counter()
        self.named: list[tuple[str, str, bytes]] = []

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one adapter in the model."""
        return self._model.bytes_per_place

    def load_named(self, folders: Mapping[str, str]) -> None:
        """Loads adapters under names, for good.

        Args:
          folders: Name -> folder.

        Raises:
          CheckpointError, ConfigError: See `read`.
        """
        for name, folder in folders.items():
            self.named.append((name, folder, self.add(self.read(folder), keep=True)))

    def read(self, source: str | os.PathLike[str]) -> LoadedAdapter:
        """See `Adapters`; the source is a folder.

        Raises:
          CheckpointError, ConfigError: See `find_adapter` and `read_adapter`; or the adapter does not fit the model.
        """
        folder = find_adapter(source, self._root, most_bytes=self._model.most_file_bytes)
        adapter, generation = read_adapter(folder), self._model.generation
        changes = self._model.changes_of(adapter)
        if digest_of(folder) != adapter.digest:
            raise CheckpointError(f"{folder} changed while it was read: try again")
        return LoadedAdapter(adapter.digest, changes, parts_of(changes), generation)

    def chat_template_of(self, source: str | os.PathLike[str]) -> str | None:
        """See `Adapters`. Raises CheckpointError, ConfigError: see `find_adapter` and `adapter_template`."""
        folder = find_adapter(source, self._root, most_bytes=self._model.most_file_bytes)
        if self._root is not None:
            check_files_inside(folder, self._root, TEMPLATE_FILES)
        return adapter_template(folder)

    def add(self, read: LoadedAdapter, *, keep: bool = False) -> bytes:
        """See `Adapters`."""
        if read.digest not in self._known:
            if self._max_known is not None and len(self._known) >= self._max_known:
                self._forget_one()
            self._known[read.digest] = self._current(read)
        self._known.move_to_end(read.digest)
        self._removed.discard(read.digest)
        if keep:
            self._kept.add(read.digest)
        return read.digest

    def _current(self, read: LoadedAdapter) -> LoadedAdapter:
        """The adapter for the weights that there are now."""
        if not read.parts or read.generation == self._model.generation:
            return read
        return dataclasses.replace(read, changes=self._model.rebased(read.changes), generation=self._model.generation)

    def remove(self, adapter: bytes) -> None:
        """See `Adapters`."""
        self._kept.discard(adapter)
        if self._unfinished[adapter]:
            self._removed.add(adapter)
        else:
            self._removed.discard(adapter)
            self._known.pop(adapter, None)

    def _forget_one(self) -> None:
        unused = next((each for each in self._known if not self._unfinished[each] and each not in self._kept), None)
        if unused is None:
            raise VariantsInUseError(
                f"all of max_cpu_loras={self._max_known} adapters are in use: raise it, or unload one"
            )
        self.remove(unused)

    @property
    def arrays(self) -> list[jax.Array]:
        """See `Adapters`."""
        return self._model.arrays

    def merge(self, arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """See `Adapters`."""
        return self._model.merge(arrays, places, parts)

    @property
    def head_arrays(self) -> list[jax.Array]:
        """See `Adapters`."""
        return self._model.head_arrays

    def merge_head(self, head_arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """See `Adapters`."""
        return self._model.merge_head(head_arrays, places, parts)

    def parts_of(self, adapter: bytes) -> frozenset[str]:
        """See `Adapters`."""
        return self._known[adapter].parts

    def check(self, adapter: bytes) -> None:
        """See `Adapters`."""
        if adapter not in self._known:
            raise RequestError("the request's adapter is not loaded any more: load it again")

    def rebase(self, base: ModelArrays) -> None:
        """See `Adapters`."""
        self._model.rebase(base)
        for digest, adapter in self._known.items():
            if adapter.parts:
                self._known[digest] = adapter = self._current(adapter)
                if digest in self._places:
                    self._model.put(adapter.changes, self._places[digest])

    @property
    def use(self) -> PlaceUse:
        """See `Adapters`."""
        waiting = tuple(each for each in self._unfinished if self._unfinished[each] > self._running[each])
        return PlaceUse(self._model.num_places, tuple(self._running), waiting)

    def place_of(self, adapter: bytes) -> int:
        """See `Adapters`."""
        return 1 + self._places[adapter] if adapter else 0

    def begin(self) -> None:
        """See `Places`."""
        self._running.clear()
        self._unfinished.clear()

    def join(self, adapter: bytes) -> None:
        """See `Places`."""
        if adapter:
            self._unfinished[adapter] += 1

    def leave(self, adapter: bytes) -> None:
        """See `Places`."""
        if adapter:
            self._unfinished[adapter] -= 1
            if not self._unfinished[adapter]:
                del self._unfinished[adapter]
                if adapter in self._removed:
                    self.remove(adapter)

    def has_place(self, adapter: bytes) -> bool:
        """See `Places`."""
        return not adapter or adapter in self._places or bool(self._free) or self._unused() is not None

    def take(self, adapter: bytes) -> None:
        """See `Places`."""
        if not adapter:
            return
        if adapter not in self._places:
            if not self._free and (unused := self._unused()) is not None:
                self._free.append(self._places.pop(unused))
            self._places[adapter] = self._free.pop()
            self._model.put(self._known[adapter].changes, self._places[adapter])
        self._places.move_to_end(adapter)
        self._running[adapter] += 1

    def give_back(self, adapter: bytes) -> None:
        """See `Places`."""
        if adapter:
            self._running[adapter] -= 1
            if not self._running[adapter]:
                del self._running[adapter]

    def _unused(self) -> bytes | None:
        """The adapter that has a place, needs none, and was used least recently."""
        return next((adapter for adapter in self._places if not self._running[adapter]), None)
