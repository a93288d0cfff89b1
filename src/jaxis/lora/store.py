"""The adapters that an engine has loaded, and those that have a place in the model."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxis.engine.execution.calls import Calls, EngineCall
from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.engine.scheduling.places import Places, PlaceUse
from jaxis.errors import AdaptersInUseError, CheckpointError, RequestError
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
      digest: SHA-256 of the files.
      changes: Changes by module name in the model.
      parts: Kinds of its changes; see `AdapterStore.parts_of`.
      generation: Generation of the weights that the changes were computed for; see `AdaptedModel`.
    """

    digest: bytes
    changes: Changes
    parts: frozenset[str]
    generation: int


class AdapterStore(Places):
    """The adapters of an engine, and their places in its model; each is known by the digest of its files.

    Attributes:
      named: Name, folder and digest of each adapter loaded at the start.

    Args:
      base: The model.
      max_loras: Number of adapters in a step.
      max_lora_rank: Largest rank of an adapter.
      max_cpu_loras: Number of loaded adapters; None: as many as fit into memory.
      root: Folder outside of which no adapter is read; None: any folder.
      targets: Layers with room for adapters; see `AdaptedModel`.
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
        self._kept: set[bytes] = set()  # those that stay until they are removed
        self._removed: set[bytes] = set()  # those to remove once their last sequence has ended
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently taken first
        self._free = list(reversed(range(max_loras)))
        self._running: Counter[bytes] = Counter()
        self._unfinished: Counter[bytes] = Counter()
        self.named: list[tuple[str, str, bytes]] = []

    @property
    def num_known(self) -> int:
        """Number of adapters held in the host's memory."""
        return len(self._known)

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one adapter in the model."""
        return self._model.bytes_per_place

    @property
    def calls(self) -> Calls:
        def read(source: str) -> tuple[LoadedAdapter, str | None]:
            return self.read(source), self.chat_template_of(source)

        def add(adapter: LoadedAdapter, chat_template: str | None) -> tuple[bytes, str | None]:
            return self.add(adapter, keep=True), chat_template

        return {"load_adapter": EngineCall(add, read), "unload_adapter": EngineCall(self.remove)}

    def load_named(self, folders: Mapping[str, str]) -> None:
        """Loads adapters permanently.

        Args:
          folders: Folder of each adapter, by its name.

        Raises:
          CheckpointError, ConfigError: `read` fails.
        """
        for name, folder in folders.items():
            self.named.append((name, folder, self.add(self.read(folder), keep=True)))

    def read(self, source: str | os.PathLike[str]) -> LoadedAdapter:
        """Reads an adapter from a folder.

        Raises:
          CheckpointError, ConfigError: `find_adapter` or `read_adapter` fails, or the adapter does not fit the model.
        """
        folder = find_adapter(source, self._root, most_bytes=self._model.most_file_bytes)
        adapter, generation = read_adapter(folder), self._model.generation
        changes = self._model.changes_of(adapter)
        if digest_of(folder) != adapter.digest:
            raise CheckpointError(f"{folder} changed while it was read: try again")
        return LoadedAdapter(adapter.digest, changes, parts_of(changes), generation)

    def chat_template_of(self, source: str | os.PathLike[str]) -> str | None:
        """Returns an adapter's chat template. Raises errors as `find_adapter` and `adapter_template` do."""
        folder = find_adapter(source, self._root, most_bytes=self._model.most_file_bytes)
        if self._root is not None:
            check_files_inside(folder, self._root, TEMPLATE_FILES)
        return adapter_template(folder)

    def add(self, read: LoadedAdapter, *, keep: bool = False) -> bytes:
        """Makes an adapter known, given the result of `read`; returns its digest.

        With `keep`, it stays until it is removed; otherwise it may be forgotten when there are too many.

        Raises:
          AdaptersInUseError: Too many are known, and in use.
        """
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
        """Returns the adapter with changes for the current weights."""
        if not read.parts or read.generation == self._model.generation:
            return read
        return dataclasses.replace(read, changes=self._model.rebased(read.changes), generation=self._model.generation)

    def remove(self, adapter: bytes) -> None:
        """Forgets an adapter once the last sequence that has it has ended."""
        self._kept.discard(adapter)
        if self._unfinished[adapter]:
            self._removed.add(adapter)
        else:
            self._removed.discard(adapter)
            self._known.pop(adapter, None)

    def _forget_one(self) -> None:
        unused = next((each for each in self._known if not self._unfinished[each] and each not in self._kept), None)
        if unused is None:
            raise AdaptersInUseError(
                f"all of max_cpu_loras={self._max_known} adapters are in use: raise it, or unload one"
            )
        self.remove(unused)

    @property
    def arrays(self) -> list[jax.Array]:
        """The model's arrays with the changes of the adapters that have a place."""
        return self._model.arrays

    def merge(self, arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """Returns the model of a step, in which row t has the adapter at its place.

        `arrays` are those of the attribute, or their tracers. `places` is i32 [T]; 0 for no adapter. `parts` are those
        that the step's adapters change.
        """
        return self._model.merge(arrays, places, parts)

    @property
    def head_arrays(self) -> list[jax.Array]:
        """The part of `arrays` that `compute_logits` reads, if adapters change the head."""
        return self._model.head_arrays

    def merge_head(self, head_arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """Returns the model rebuilt from `head_arrays`; its `compute_logits` can be called.

        `places`, i32 [S], are those of the rows whose logits are computed; 0 for no adapter.
        """
        return self._model.merge_head(head_arrays, places, parts)

    def parts_of(self, adapter: bytes) -> frozenset[str]:
        """Returns the parts that an adapter changes beyond those that all change, such as HEAD.

        Steps without such adapters have other programs.
        """
        return self._known[adapter].parts

    def check(self, adapter: bytes) -> None:
        """Raises a RequestError for an unknown adapter."""
        if adapter not in self._known:
            raise RequestError("the request's adapter is not loaded any more: load it again")

    def rebase(self, base: ModelArrays) -> None:
        """Gives the model other weights, of the same shapes and types."""
        self._model.rebase(base)
        for digest, adapter in self._known.items():
            if adapter.parts:
                self._known[digest] = adapter = self._current(adapter)
                if digest in self._places:
                    self._model.put(adapter.changes, self._places[digest])

    @property
    def use(self) -> PlaceUse:
        waiting = tuple(each for each in self._unfinished if self._unfinished[each] > self._running[each])
        return PlaceUse(self._model.num_places, tuple(self._running), waiting)

    def place_of(self, adapter: bytes) -> int:
        """Returns the place, from 1 on, of an adapter that has one; 0 for b""."""
        return 1 + self._places[adapter] if adapter else 0

    def begin(self) -> None:
        self._running.clear()
        self._unfinished.clear()

    def join(self, adapter: bytes) -> None:
        if adapter:
            self._unfinished[adapter] += 1

    def leave(self, adapter: bytes) -> None:
        if adapter:
            self._unfinished[adapter] -= 1
            if not self._unfinished[adapter]:
                del self._unfinished[adapter]
                if adapter in self._removed:
                    self.remove(adapter)

    def has_place(self, adapter: bytes) -> bool:
        return not adapter or adapter in self._places or bool(self._free) or self._unused() is not None

    def take(self, adapter: bytes) -> None:
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
        if adapter:
            self._running[adapter] -= 1
            if not self._running[adapter]:
                del self._running[adapter]

    def _unused(self) -> bytes | None:
        return next((adapter for adapter in self._places if not self._running[adapter]), None)
