"""The two tables of a decoder, embeddings and head, which are one if the head is tied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.loading.given_tensors import BorrowedArray
from jaxis.loading.headers import HeaderTensor

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Parameter names of the two weights; a tied model has only the first."""


def other_table(name: str) -> str:
    return EMBEDDINGS if name == HEAD else HEAD


def with_both_tables(
    tensors: Iterable[tuple[str, np.ndarray]], names: CheckpointNames
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a checkpoint's tensors; a single table comes under the names of both."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if (here := names.name_here(name)) in (EMBEDDINGS, HEAD):
            found[here] = lasting(tensor)
        yield name, tensor
    if len(found) == 1:
        [(here, tensor)] = found.items()
        yield names.name_in_checkpoint(other_table(here)), tensor


def lasting(tensor: np.ndarray) -> np.ndarray:
    """Returns a tensor that may be kept while others are read."""
    return np.array(tensor) if isinstance(tensor, BorrowedArray) else tensor


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two tensors are equal bit for bit; with headers only, True if they can be."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if isinstance(a, HeaderTensor):
        return True
    # Row by row, so that comparing two large mapped tensors allocates no memory.
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))
