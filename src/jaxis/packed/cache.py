"""A cache of packed folders: a model's first start packs its weights, and later ones map them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from flax import nnx

from jaxis.errors import CheckpointError, JaxisError
from jaxis.host.byte_size import human_bytes
from jaxis.layers.module import JaxModule
from jaxis.loading.checkpoint_files import new_folder
from jaxis.packed.cached_folders import MODEL, evict, remove, root, writing_alone
from jaxis.packed.folder import PackedFolder
from jaxis.packed.write import write_packed


@dataclass(frozen=True)
class PackCache:
    """The place of a model's weights in the cache.

    Attributes:
      digest: Digest of all that the weights depend on, as they lie in memory.
      model: Name of the model, for `packed_models`.
      max_bytes: Most bytes of all packed folders.
    """

    digest: str
    model: str
    max_bytes: int

    @property
    def folder(self) -> Path:
        return root() / self.digest

    def find(self) -> PackedFolder | None:
        """Returns the weights if they are here; their bytes are being checked."""
        packed = self._opened()
        if packed is not None:
            _ = packed.digests
        return packed

    def keep(self, model: JaxModule, dtype: str) -> str:
        """Writes a loaded model into the cache, from which the least recently used go; returns what became of it."""
        size = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
        if size > self.max_bytes:
            return f"not packed: {human_bytes(size)} are more than pack_cache_size={human_bytes(self.max_bytes)}"
        try:
            root().mkdir(parents=True, exist_ok=True)
            with writing_alone() as is_alone:
                if not is_alone:
                    return "not packed: another process is writing to the pack cache"
                if self._opened() is None:
                    self.remove()
                    evict(self.max_bytes - size)
                    with new_folder(self.folder) as partial:
                        (partial / MODEL).write_text(json.dumps(self.model))
                        write_packed(partial, {type(model).__name__: model}, dtype)
        except (CheckpointError, OSError) as error:
            return f"not packed: {error}"
        return f"packed for the next start: {human_bytes(size)} in {self.folder}"

    def remove(self) -> None:
        remove(self.folder)

    def _opened(self) -> PackedFolder | None:
        """Returns the weights if they are here, and marks them as used; their bytes are not checked."""
        try:
            packed = PackedFolder(self.folder)
            os.utime(self.folder)
        except (JaxisError, OSError):
            return None
        return packed
