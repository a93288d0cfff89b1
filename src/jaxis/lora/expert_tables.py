from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxis.errors import ConfigError
from jaxis.lora.adaptable import AdaptableExperts
from jaxis.lora.adapter import LowRankChange
from jaxis.lora.expert_change import SQUARE, ExpertChange


class ExpertTablesOf:
    """An adapter's entries in the tables of a layer of experts, from stacks and matrices; see `ExpertsAddition`."""

    def __init__(self, path: Path, experts: AdaptableExperts, max_rank: int) -> None:
        self._path, self._layer, self._max_rank, self._sizes = path, experts.layer, max_rank, experts.sizes
        num_experts = experts.layer.num_experts
        self._entries: dict[str, np.ndarray] = {}
        for name, sizes in self._sizes.items():
            for table, size in zip("ab", sizes, strict=True):
                self._entries[f"{name}.{table}"] = np.zeros((num_experts, max_rank, size), np.float32)
            self._entries[f"{name}.ranks"] = np.zeros(num_experts, np.int32)

    @property
    def entries(self) -> Mapping[str, np.ndarray]:
        """Entries by table name: a [X, r, in], b [X, r, out] (multiplied by the scale), and ranks [X]."""
        return self._entries

    def take_stack(self, theirs: str, stack: str, change: ExpertChange) -> None:
        """Adds the change of a parameter of all experts, `theirs` in the adapter, to one of `expert_change.STACKS`.

        Raises ConfigError if the change is for another model, or its rank is too large.
        """
        names = ["down_proj"] if stack == "down_proj" else ["gate_proj", "up_proj"]
        if any(name not in self._sizes for name in names):
            raise self._fault(theirs, "is of experts with gates, which the model's do not have")
        size_in, size_out = self._sizes[names[0]]
        size_out *= len(names)
        # The parameter may be [X, out, in] or [X, in, out], and A and B may have either order.
        found = change.b.shape[1], change.a.shape[2]
        if len(change.a) != self._layer.num_experts or found not in ((size_out, size_in), (size_in, size_out)):
            raise self._fault(
                theirs,
                f"is for {len(change.a)} experts, {found[1]} features in and {found[0]} out, but the model has "
                f"{self._layer.num_experts}, {size_in} and {size_out}: the adapter was trained on another model",
            )
        layout = self._layer.stack_layout
        # For [X, in, out], every version of PEFT gives A the inputs.
        if change.is_square and not change.has_inputs_first and not (layout is not None and layout.transposed):
            raise self._fault(theirs, SQUARE)
        rank = self._checked_rank(theirs, change.a.shape[1])
        a, b = change.a.astype(np.float32), change.b.astype(np.float32).swapaxes(1, 2)
        if found != (size_out, size_in):
            a, b = b, a
        b = np.float32(change.scale) * b
        if len(names) == 1:
            parts = [b]
        elif layout is not None and layout.interleaved:
            parts = [b[..., ::2], b[..., 1::2]]
        else:
            parts = np.split(b, 2, axis=-1)
        for name, part in zip(names, parts, strict=True):
            self._entries[f"{name}.a"][:, :rank] = a
            self._entries[f"{name}.b"][:, :rank] = part
            self._entries[f"{name}.ranks"][:] = rank

    def take_matrix(self, theirs: str, expert: int, name: str, change: LowRankChange) -> None:
        """Adds the change of one expert's matrix, `theirs` in the adapter, to the projection of this name.

        Raises ConfigError if the change is for another model, its rank is too large, or it has magnitudes (DoRA).
        """
        if change.magnitude is not None:
            raise self._fault(theirs, "is of an expert, with use_dora, which requests cannot have: merge it instead")
        sizes = change.input_size, change.output_size
        if expert >= self._layer.num_experts or name not in self._sizes or sizes != self._sizes[name]:
            raise self._fault(theirs, "is of an expert that the model does not have: it was trained on another model")
        rank = self._checked_rank(theirs, change.rank)
        self._entries[f"{name}.a"][expert, :rank] = change.a
        self._entries[f"{name}.b"][expert, :rank] = np.float32(change.scale) * change.b.astype(np.float32).T
        self._entries[f"{name}.ranks"][expert] = rank

    def _checked_rank(self, theirs: str, rank: int) -> int:
        if rank > self._max_rank:
            raise self._fault(theirs, f"has rank {rank}, more than max_lora_rank={self._max_rank}")
        return rank

    def _fault(self, theirs: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {theirs!r} {what}")
