from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.layers.addition import EXPERTS, SCALES, StepRows
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.lora.adaptable import ALL_LINEAR, Adaptable, Adaptables, adaptable, table_type
from jaxis.lora.adapter import Adapter, LowRankChange
from jaxis.lora.expert_change import stack_and_part
from jaxis.lora.expert_tables import ExpertTablesOf

HEAD = "head"
"""The part of a model that is `compute_logits`. Adapters that change it have programs of their own."""
_MOST_HEADER_BYTES = 64 << 20


@dataclass(frozen=True)
class LayerChange:
    """A change in the form that a layer computes.

    `factors`, float32 [out], multiply the output before the bias is added (DoRA). `is_of_head` is True if the layer
    computes logits.
    """

    change: LowRankChange
    factors: np.ndarray | None = None
    is_of_head: bool = False


@dataclass(frozen=True)
class ExpertsChange:
    """A change of a layer of experts: an entry for each of its tables, by table name."""

    entries: Mapping[str, np.ndarray]


Changes = Mapping[str, LayerChange | ExpertsChange]
"""Changes of an adapter, by layer name."""


class AdaptedModel:
    """The arrays of a model, with the matrices of several adapters in their places: each row of a step can use another.

    Attributes:
      bytes_per_place: Bytes of one adapter's matrices.
      generation: Number of times that the weights have changed.

    Args:
      num_places, max_rank: Number of adapter places, and largest rank of an adapter.
      targets: Layers with room for adapters: last parts of their names, and ALL_LINEAR.

    Raises:
      ConfigError: A target matches no layer.
    """

    def __init__(
        self, base: ModelArrays, num_places: int, max_rank: int, targets: Sequence[str] = (ALL_LINEAR,)
    ) -> None:
        model, dtype = base.model, base.hidden_states.dtype
        self.num_places, self.max_rank = num_places, max_rank
        self._names = checkpoint_names_of(model)
        found, every = adaptable(model, targets), adaptable(model)
        self._without_room = (every.layers.keys() - found.layers.keys()) | (every.experts.keys() - found.experts.keys())
        self._tables = {name: layer for name, layer in every.layers.items() if layer.is_extra}
        self._layers = {name: layer for name, layer in found.layers.items() if not layer.has_moved_rows}
        self._experts = found.experts
        self._moved = found.layers.keys() - self._layers.keys()
        self.bytes_per_place = Adaptables(self._layers, self._experts).bytes_of_place(dtype, max_rank)
        rows = StepRows()
        self._additions = {
            name: layer.add(num_places, max_rank, rows, table_type(dtype)) for name, layer in self._layers.items()
        }
        for each in self._experts.values():
            each.add(num_places, max_rank, rows, table_type(dtype))
        self._with_factors: set[int] = set()  # places
        rows.parts = frozenset({SCALES})  # so that the head's arrays are those that it reads at most
        setattr(model, _ROWS, rows)
        has_head = any(layer.is_head for layer in self._layers.values())
        self._split = ModelArrays(model, base.hidden_states, has_head=has_head)
        self._index = {name: i for i, name in enumerate(self._split.bytes_by_name())}
        self.generation = 0

    @property
    def arrays(self) -> list[jax.Array]:
        return self._split.arrays

    @property
    def head_arrays(self) -> list[jax.Array]:
        return self._split.head_arrays

    @property
    def most_file_bytes(self) -> int:
        """Largest accepted size of an adapter file: twice all adaptable layers in float32, and a header.

        PEFT also saves the base weights of adapted embeddings and heads.
        """
        tables = sum(math.prod(layer.weight_shape) for layer in self._tables.values())
        return 4 * (self.bytes_per_place + tables) + _MOST_HEADER_BYTES

    def rebase(self, base: ModelArrays) -> None:
        """Replaces the weights. Changes that were read before must be `rebased`."""
        for name, array in base.named_arrays():
            self._split.arrays[self._index[name]] = array
        self.generation += 1
        layers = adaptable(base.model).layers
        self._layers = {name: layers[name] for name in self._layers}

    def rebased(self, changes: Changes) -> Changes:
        """Recomputes changes for the current weights, which their factors depend on."""
        return {
            name: each if isinstance(each, ExpertsChange) else _of_layer(each.change, self._layers[name])
            for name, each in changes.items()
        }

    def merge(self, arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        return _with_rows(self._split.merge(arrays), places, parts)

    def merge_head(self, head_arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        return _with_rows(self._split.merge_head(head_arrays), places, parts)

    def changes_of(self, adapter: Adapter) -> Changes:
        """Converts an adapter's tensors to changes by module names in jaxis. They do not use the adapter's file.

        Raises ConfigError if requests cannot use the adapter individually, or it was made for another model.
        """
        replaced = {
            name for name, tensor in adapter.replaced.items() if not self._is_base_of_change(adapter, name, tensor)
        }
        if whole := replaced | adapter.tokens.keys():
            each = f", {human_bytes(adapter.replaced[min(replaced)].nbytes)} for each adapter" if replaced else ""
            raise ConfigError(
                f"{adapter.path} replaces {'' if replaced else 'rows of '}{min(whole)!r}{each}, which is the same for "
                "all requests: merge it while loading (--adapter FOLDER --merge)"
            )
        changes: dict[str, LayerChange | ExpertsChange] = {}
        tables: dict[str, ExpertTablesOf] = {}
        for theirs, of_stack in adapter.experts.items():
            experts, _, stack = theirs.rpartition(".")
            self._tables_of_experts(adapter, theirs, self._names.name_here(experts), tables).take_stack(
                theirs, stack, of_stack
            )
        for theirs, change in adapter.changes.items():
            name = self._names.name_here(theirs)
            if (part := stack_and_part(self._names.name_here(f"{theirs}.weight"))) is not None:
                experts = part[0].rpartition(".")[0]
                self._tables_of_experts(adapter, theirs, experts, tables).take_matrix(theirs, *part[1:], change)
                continue
            layer = self._layers.get(name)
            self._check_room(adapter, theirs, name)
            if layer is None or change.is_embedding != layer.is_embedding:
                what = "which is not a layer that can be changed for some requests only"
                if name in self._moved:
                    what = "of which several devices have the outputs in another order"
                raise ConfigError(
                    f"{adapter.path} changes {theirs!r}, {what}: merge it while loading (--adapter FOLDER --merge)"
                )
            if (sizes := (change.input_size, change.output_size)) != layer.sizes:
                kinds = "tokens", "features" if change.is_embedding else "features in", "features out"
                raise ConfigError(
                    f"{adapter.path}: {theirs!r} is for {sizes[0]} {kinds[0]} and {sizes[1]} {kinds[1]}, but the "
                    f"model's has {' and '.join(map(str, layer.sizes))}: the adapter was trained on another model"
                )
            if change.rank > self.max_rank:
                raise ConfigError(
                    f"{adapter.path}: {theirs!r} has rank {change.rank}, more than max_lora_rank={self.max_rank}"
                )
            # Copies: the file may be replaced while requests use its content.
            magnitude = None if change.magnitude is None else np.array(change.magnitude)
            copied = dataclasses.replace(change, a=np.array(change.a), b=np.array(change.b), magnitude=magnitude)
            changes[name] = _of_layer(copied, layer)
        return changes | {name: ExpertsChange(each.entries) for name, each in tables.items()}

    def _check_room(self, adapter: Adapter, theirs: str, name: str) -> None:
        if name in self._without_room:
            raise ConfigError(
                f"{adapter.path} changes {theirs!r}, for which requests have no room: name it among lora_target_modules"
            )

    def _tables_of_experts(
        self, adapter: Adapter, theirs: str, name: str, tables: dict[str, ExpertTablesOf]
    ) -> ExpertTablesOf:
        """Returns a layer of experts' entry in `tables`, which is created empty."""
        if (experts := self._experts.get(name)) is None:
            self._check_room(adapter, theirs, name)
            raise ConfigError(
                f"{adapter.path} changes {theirs!r}, which is not a layer that can be changed for some requests only: "
                "merge it while loading (--adapter FOLDER --merge)"
            )
        return tables.setdefault(name, ExpertTablesOf(adapter.path, experts, self.max_rank))

    def _is_base_of_change(self, adapter: Adapter, name: str, tensor: np.ndarray) -> bool:
        """Returns whether a tensor is the base weight of an adapted embedding or head. PEFT does not train that."""
        module, _, kind = name.rpartition(".")
        change, layer = adapter.changes.get(module), self._tables.get(self._names.name_here(module))
        if change is None or layer is None or (kind == "bias" and adapter.config.bias != "none"):
            return False
        return tensor.shape == (layer.weight_shape if kind == "weight" else layer.weight_shape[:1])

    def put(self, changes: Changes, place: int) -> None:
        """Writes an adapter's matrices to a place, from 0. Steps that were dispatched before do not see them."""
        had_factors, has_factors = place in self._with_factors, SCALES in parts_of(changes)
        self._with_factors ^= {place} if had_factors != has_factors else set()
        for name, layer in self._layers.items():
            given = changes.get(name)
            assert not isinstance(given, ExpertsChange)
            # A layer without a change gets rank 0 and keeps its old matrices.
            entries = {} if given is None else self._additions[name].entries(*_padded(given.change, self.max_rank))
            entries["ranks"] = np.asarray(0 if given is None else given.change.rank, np.int32)
            if had_factors or has_factors:
                factors = None if given is None else given.factors
                entries["factors"] = np.ones(layer.output_size, np.float32) if factors is None else factors
            self._write_entries(layer.path, entries, place)
        for name, experts in self._experts.items():
            given = changes.get(name)
            if isinstance(given, ExpertsChange):
                self._write_entries(experts.path, given.entries, place)
            else:
                ranks = np.zeros(experts.layer.num_experts, np.int32)
                self._write_entries(experts.path, {f"{projection}.ranks": ranks for projection in experts.sizes}, place)

    def _write_entries(self, path: str, entries: Mapping[str, np.ndarray], place: int) -> None:
        arrays = self._split.arrays
        for table, entry in entries.items():
            index = self._index[f"{path}.{table}.value"]
            arrays[index] = _write(arrays[index], entry.reshape(arrays[index].shape[1:]), place)


_ROWS = "step_rows"


def _with_rows(model: GenerativeModel, places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
    """Sets the adapter place of each row, and the kinds of changes in use, on the model's layers."""
    rows = cast(StepRows, getattr(model, _ROWS))
    rows.slots.set_value(places)
    rows.parts = parts
    return model


def parts_of(changes: Changes) -> frozenset[str]:
    parts: set[str] = set()
    for each in changes.values():
        if isinstance(each, ExpertsChange):
            parts.add(EXPERTS)
        else:
            parts |= ({SCALES} if each.factors is not None else set()) | ({HEAD} if each.is_of_head else set())
    return frozenset(parts)


def _of_layer(change: LowRankChange, layer: Adaptable) -> LayerChange:
    return LayerChange(change, None if change.magnitude is None else _factors(change, layer), layer.is_head)


def _factors(change: LowRankChange, layer: Adaptable) -> np.ndarray:
    """Returns DoRA's factors (arXiv:2402.09353): magnitude / norm of the changed weights, float32 [out]."""
    assert change.magnitude is not None
    a, scaled_b = change.a.astype(np.float32), np.float32(change.scale) * change.b.astype(np.float32)
    squares = np.zeros(change.output_size, np.float64)
    for ids, rows in layer.weight_rows():
        if change.is_embedding:
            squares += np.square(rows + (scaled_b @ a[:, ids]).T).sum(0, dtype=np.float64)
        else:
            squares[ids] = np.square(rows + scaled_b[ids] @ a).sum(1, dtype=np.float64)
    return (change.magnitude.astype(np.float64) / np.sqrt(squares)).astype(np.float32)


def _padded(change: LowRankChange, max_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns A, float32 [max_rank, in], and scaled B, [max_rank, out], padded with zeros."""
    a, b = (np.zeros((max_rank, size), np.float32) for size in (change.input_size, change.output_size))
    a[: change.rank] = change.a
    b[: change.rank] = (np.float32(change.scale) * change.b.astype(np.float32)).T
    return a, b


@functools.partial(jax.jit, donate_argnums=0)
def _write(table: jax.Array, entry: jax.Array, place: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(table, jnp.asarray(entry, table.dtype), place, 0)
