from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.gguf.delta_heads import DeltaHeads, PackedDeltaHeads


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that names and changes depend on.

    Attributes:
      num_layers: Layers of the model itself, without prediction layers.
      num_heads: H.
      num_kv_heads: K.
      head_dim: D.
      num_experts: X; 0 without experts.
      delta_heads: Heads of gated delta networks whose file has the value heads in another order; None without.
      packed_delta_heads: Heads of gated delta networks whose projections are packed by key head; None without.
      table_layer: Layer of the table that files have outside layers; see `OF_TABLE`.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    delta_heads: DeltaHeads | None = None
    packed_delta_heads: PackedDeltaHeads | None = None
    table_layer: int = 0


@dataclass(frozen=True)
class StoredPart:
    """A tensor of the Hugging Face checkpoint, made of one in the file.

    Attributes:
      name: Hugging Face name.
      index: Index of this part in the stored array; empty means all of it.
      rope_heads: Heads in which the file has rows that are rotated together as neighbours; 0 means none.
      has_one_added: True if the file's numbers have 1 added.
      rows: The file's rows, in the order of this tensor; None takes them as they are.
      columns: The file's groups of columns, equally wide, in the order of this tensor; None takes them as they are.
      restore: Function that restores a small tensor from another form in the file; None if the form is the same.
      piece: Index among the tensors of the file with rows of this one; 0 for the first.
    """

    name: str
    index: tuple[int | slice, ...] = ()
    rope_heads: int = 0
    has_one_added: bool = False
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    restore: Callable[[np.ndarray], np.ndarray] | None = None
    piece: int = 0

    def shape_of(self, view: np.ndarray) -> tuple[int, ...]:
        """Returns the tensor's shape, without making a large tensor."""
        if self.restore is not None:
            return self.restore(view if self.rows is None else view[self.rows]).shape
        return view.shape if self.rows is None else (len(self.rows), *view.shape[1:])

    def made_of(self, stored: np.ndarray) -> np.ndarray:
        """Returns the tensor from the array in the file; a view of it where nothing changes.

        Raises CheckpointError if the array does not have the heads that the model has.
        """
        array = stored[(*self.index, ...)]
        if self.rope_heads:
            if len(array) % (2 * self.rope_heads):
                raise CheckpointError(f"has {len(array)} rows, which are not {self.rope_heads} heads")
            # Per head, from [D / 2, 2] to [2, D / 2]. A row is a number, or the bytes of blocks.
            pairs = array.reshape(self.rope_heads, -1, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if self.rows is not None:
            array = array[self.rows]
        if self.columns is not None:
            array = array.reshape(len(array), len(self.columns), -1)[:, self.columns].reshape(array.shape)
        if self.restore is not None:
            array = self.restore(array)
        return array.astype(np.float32) - np.float32(1) if self.has_one_added else array

    def stored_of(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the file's array of this tensor: the inverse of `made_of`, without the index.

        Raises CheckpointError if the file's form cannot be made.
        """
        if self.rows is not None or self.columns is not None or self.restore is not None:
            raise CheckpointError(f"{self.name} cannot be written to GGUF")
        if self.rope_heads:
            halves = tensor.reshape(self.rope_heads, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        return tensor.astype(np.float32) + np.float32(1) if self.has_one_added else tensor
