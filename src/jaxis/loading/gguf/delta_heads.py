"""Heads of gated delta networks, whose values llama.cpp's converter reorders.

In checkpoints, the value heads that share a key head are neighbours. In the file, with G key heads, value heads 0, G, 2
G, ... share key head 0. The old order is restored where heads are at least as large as quantized blocks. It cannot be
restored where a block of `ssm_out` has columns of two heads. Then the values keep the file's order, and each key head
is repeated for each of its value heads, which is the same model with more key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of the layers: G key heads in the file, and a multiple of G value heads.

    If `keeps_order`, values keep the file's order, and keys are repeated. `key_dim` is the size of a query and of a
    key.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    keeps_order: bool

    @property
    def model_key_heads(self) -> int:
        """Key heads of the model that the tensors are for."""
        return self.num_value_heads if self.keeps_order else self.num_key_heads

    def rows_of(self, base: str) -> np.ndarray | None:
        """Returns the rows of the file's tensor in the model's order; None if they stay as they are."""
        if base in ("attn_qkv", "ssm_conv1d"):
            return self._rows_of_qkv()
        if self.keeps_order:
            return None
        if base == "attn_gate":
            return _rows(self._values(), self.value_dim)
        return self._values() if base in ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a") else None

    def columns_of(self, base: str) -> np.ndarray | None:
        """Returns the groups of columns of the file's tensor in the model's order; None if they stay as they are."""
        return None if self.keeps_order or base != "ssm_out" else self._values()

    def _rows_of_qkv(self) -> np.ndarray:
        copies = self.num_value_heads // self.num_key_heads if self.keeps_order else 1
        keys = _rows(np.tile(np.arange(self.num_key_heads), copies), self.key_dim)
        values = np.arange(self.num_value_heads) if self.keeps_order else self._values()
        keys_size = self.num_key_heads * self.key_dim
        return np.concatenate([keys, keys_size + keys, 2 * keys_size + _rows(values, self.value_dim)])

    def _values(self) -> np.ndarray:
        return np.arange(self.num_value_heads).reshape(-1, self.num_key_heads).T.reshape(-1)


@dataclass(frozen=True)
class PackedDeltaHeads:
    """Heads of Qwen3-Next's layers, as in `DeltaHeads`, whose projections have the rows of each key head together."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    def rows_of(self, base: str) -> dict[str, np.ndarray] | None:
        """Returns projection -> its rows in a packed tensor of the file; None for other tensors."""
        shared_by = self.num_value_heads // self.num_key_heads
        if base == "ssm_ba":
            b, a = self._split([shared_by, shared_by])
            return {"in_proj_b": b, "in_proj_a": a}
        if base == "ssm_in":  # of older files; newer ones have its parts
            values_dim = shared_by * self.value_dim
            q, k, v, z = self._split([self.key_dim, self.key_dim, values_dim, values_dim])
            return {"in_proj_qkv": np.concatenate([q, k, v]), "in_proj_z": z}
        return None

    def _split(self, sizes: list[int]) -> list[np.ndarray]:
        """Returns the rows of each part; every key head has the parts one after the other."""
        rows = np.arange(self.num_key_heads * sum(sizes)).reshape(self.num_key_heads, -1)
        return [part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def _rows(heads: np.ndarray, head_dim: int) -> np.ndarray:
    return (heads[:, None] * head_dim + np.arange(head_dim)).reshape(-1)
