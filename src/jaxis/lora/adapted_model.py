"""A model with places for the changes of several adapters, each row of a step with its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.quantization import ApplyingQuantMethod
from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.errors import ConfigError
from jaxis.layers.addition import LowRankAddition, StepRows
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.routing import JaxRouter
from jaxis.lora.adapter import Adapter, LowRankChange

# Linear layers that are called with each token of a step, in its order. Others are absorbed or see some rows only.
_KINDS = (JaxLinear, JaxRouter)
_TABLES = ("a", "b", "ranks")
_MOST_HEADER_BYTES = 64 << 20


class AdaptedModel:
    """The arrays of a model and, beside them, the matrices of adapters.

    Attributes:
      bytes_per_place: Bytes of one adapter's matrices.

    Args:
      base: The model.
      num_places: Adapters whose matrices there is room for.
      max_rank: Of an adapter.
    """

    def __init__(self, base: ModelArrays, num_places: int, max_rank: int) -> None:
        model = base.model
        self.num_places, self.max_rank = num_places, max_rank
        self._names = checkpoint_names_of(model)
        found = dict(_adaptable(model))
        self._layers = {name: layer for name, layer in found.items() if not layer.has_moved_rows}
        self._moved = found.keys() - self._layers.keys()
        rows, dtype = StepRows(), _table_type(base.hidden_states.dtype)
        self.bytes_per_place = _place_bytes(self._layers.values(), dtype, max_rank)
        for layer in self._layers.values():
            sizes = layer.input_size, layer.output_size
            layer.addition = LowRankAddition(num_places, max_rank, *sizes, rows, dtype)
        setattr(model, _ROWS, rows)
        self._split = ModelArrays(model, base.hidden_states, has_head=False)
        self._index = {name: i for i, name in enumerate(self._split.bytes_by_name())}

    @property
    def arrays(self) -> list[jax.Array]:
        """All arrays, the model's own among them."""
        return self._split.arrays

    @property
    def most_file_bytes(self) -> int:
        """Bytes of a file that can be an adapter of the model: what has a place, in float32, twice, and a header."""
        return 4 * self.bytes_per_place + _MOST_HEADER_BYTES

    def merge(self, arrays: list[jax.Array], places: jax.Array) -> GenerativeModel:
        """See `Variants`."""
        model = self._split.merge(arrays)
        cast(StepRows, getattr(model, _ROWS)).slots.set_value(places)
        return model

    def changes_of(self, adapter: Adapter) -> dict[str, LowRankChange]:
        """The changes of an adapter by the names that modules have here; independent of its file.

        Raises:
          ConfigError: The adapter changes what requests cannot change one by one, or was made for another model.
        """
        if adapter.replaced:
            raise ConfigError(
                f"{adapter.path} replaces {min(adapter.replaced)!r}, which is the same for all requests: merge it "
                "while loading (--adapter FOLDER --merge)"
            )
        if adapter.experts:
            raise ConfigError(
                f"{adapter.path} changes {min(adapter.experts)!r}, experts, which cannot be changed for some requests "
                "only: merge it while loading (--adapter FOLDER --merge)"
            )
        changes: dict[str, LowRankChange] = {}
        for theirs, change in adapter.changes.items():
            name = self._names.name_here(theirs)
            layer = self._layers.get(name)
            if layer is None or change.is_embedding or change.magnitude is not None:
                what = "which is not a linear layer that can be changed for some requests only"
                if change.magnitude is not None:
                    what = "with use_dora, which cannot be for some requests only"
                if name in self._moved:
                    what = "of which several devices have the outputs in another order"
                raise ConfigError(
                    f"{adapter.path} changes {theirs!r}, {what}: merge it while loading (--adapter FOLDER --merge)"
                )
            if (change.output_size, change.input_size) != (layer.output_size, layer.input_size):
                raise ConfigError(
                    f"{adapter.path}: {theirs!r} is for {change.input_size} features in and {change.output_size} out, "
                    f"but the model's has {layer.input_size} and {layer.output_size}: the adapter was trained on "
                    "another model"
                )
            if change.rank > self.max_rank:
                raise ConfigError(
                    f"{adapter.path}: {theirs!r} has rank {change.rank}, more than max_lora_rank={self.max_rank}"
                )
            # Copies: the file may be replaced while requests use what it held.
            changes[name] = dataclasses.replace(change, a=np.array(change.a), b=np.array(change.b))
        return changes

    def put(self, changes: Mapping[str, LowRankChange], place: int) -> None:
        """Puts an adapter's matrices into a place, from 0 on; steps that were dispatched before do not see them."""
        arrays = self._split.arrays
        for name, layer in self._layers.items():
            change = changes.get(name)
            for table in _TABLES:
                if change is None and table != "ranks":
                    continue  # of rank 0
                index = self._index[f"{name}.addition.{table}.value"]
                arrays[index] = _write(arrays[index], _entry(change, layer, table, self.max_rank), place)


_ROWS = "step_rows"


def place_bytes(model: JaxModule, dtype: DTypeLike, max_rank: int) -> int:
    """Bytes of one adapter's matrices beside a model that computes in some type; it may be one without weights."""
    return _place_bytes([layer for _, layer in _adaptable(model)], _table_type(dtype), max_rank)


def _place_bytes(layers: Iterable[JaxLinear], table_type: DTypeLike, max_rank: int) -> int:
    elements = max_rank * sum(layer.input_size + layer.output_size for layer in layers)
    return elements * jnp.dtype(table_type).itemsize


def _table_type(dtype: DTypeLike) -> DTypeLike:
    """The type of adapters' matrices beside a model that computes in some type: bfloat16 with bfloat16, or float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def _adaptable(model: JaxModule) -> list[tuple[str, JaxLinear]]:
    return [
        (name, layer)
        for name, layer in named_modules(model)
        if isinstance(layer, JaxLinear) and type(layer) in _KINDS
        if not isinstance(layer.quant_method, ApplyingQuantMethod) and not name.startswith("draft.")
    ]


def _entry(change: LowRankChange | None, layer: JaxLinear, table: str, max_rank: int) -> np.ndarray:
    if table == "ranks":
        return np.asarray(0 if change is None else change.rank, np.int32)
    assert change is not None
    if table == "a":
        entry, rows = np.zeros((max_rank, layer.input_size), np.float32), change.a.astype(np.float32)
    else:
        entry = np.zeros((max_rank, layer.output_size), np.float32)
        rows = (np.float32(change.scale) * change.b.astype(np.float32)).T
    entry[: change.rank] = rows
    return entry


@functools.partial(jax.jit, donate_argnums=0)
def _write(table: jax.Array, entry: jax.Array, place: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(table, jnp.asarray(entry, table.dtype), place, 0)
