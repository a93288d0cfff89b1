"""A model with places for the changes of several adapters, each row of a step with its own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.quantization import ApplyingQuantMethod
from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.errors import ConfigError
from jaxis.kernels.weights import as_weight
from jaxis.layers.addition import HeadwiseAddition, LookupAddition, LowRankAddition, StepRows
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.routing import JaxRouter
from jaxis.lora.adapter import Adapter, LowRankChange

# Layers that are called with each token of a step, in its order. Others see some rows only.
_KINDS = (JaxLinear, JaxRouter, LatentUpProjection, JaxEmbed)
ALL_LINEAR = "all-linear"
"""All that requests can change but embeddings, whose matrices are large; what there is room for by default."""
_Layer = JaxLinear | JaxEmbed
_Addition = LowRankAddition | LookupAddition | HeadwiseAddition
_MOST_HEADER_BYTES = 64 << 20
_SCALES = "scales"
"""The part of a model that adapters change whose outputs have factors; see `Variants.parts_of`."""
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class LayerChange:
    """A change as a layer computes it.

    Attributes:
      change: The matrices.
      factors: float32 [out], by which the outputs are multiplied before the bias is added (DoRA); None: they are not.
    """

    change: LowRankChange
    factors: np.ndarray | None = None


class AdaptedModel:
    """The arrays of a model and, beside them, the matrices of adapters.

    Attributes:
      bytes_per_place: Bytes of one adapter's matrices.
      generation: How often the weights have changed.

    Args:
      base: The model.
      num_places: Adapters whose matrices there is room for.
      max_rank: Of an adapter.
      targets: The layers that there is room for: ends of their names, and ALL_LINEAR.

    Raises:
      ConfigError: No layer has such a name.
    """

    def __init__(
        self, base: ModelArrays, num_places: int, max_rank: int, targets: Sequence[str] = (ALL_LINEAR,)
    ) -> None:
        model = base.model
        self.num_places, self.max_rank = num_places, max_rank
        self._names = checkpoint_names_of(model)
        found = dict(_adaptable(model, targets))
        every = dict(_adaptable(model))
        self._without_room = every.keys() - found.keys()
        self._embeddings = {name: layer for name, layer in every.items() if isinstance(layer, JaxEmbed)}
        self._layers = {
            name: layer for name, layer in found.items() if isinstance(layer, JaxEmbed) or not layer.has_moved_rows
        }
        self._moved = found.keys() - self._layers.keys()
        rows, dtype = StepRows(), table_type(base.hidden_states.dtype)
        self.bytes_per_place = _place_bytes(self._layers.values(), dtype, max_rank)
        self._additions = {name: self._add(layer, rows, dtype) for name, layer in self._layers.items()}
        self._with_factors: set[int] = set()  # places
        setattr(model, _ROWS, rows)
        self._split = ModelArrays(model, base.hidden_states, has_head=False)
        self._index = {name: i for i, name in enumerate(self._split.bytes_by_name())}
        self.generation = 0

    def _add(self, layer: _Layer, rows: StepRows, dtype: DTypeLike) -> _Addition:
        """Gives a layer the tables of its changes."""
        sizes = self.num_places, self.max_rank
        if isinstance(layer, LatentUpProjection):
            dims = layer.input_size, layer.key_dim, layer.value_dim, layer.num_heads
            layer.head_addition = HeadwiseAddition(*sizes, *dims, rows, dtype)
            return layer.head_addition
        if isinstance(layer, JaxEmbed):
            layer.addition = lookup = LookupAddition(*sizes, *_sizes(layer), rows, dtype)
            return lookup
        layer.addition = addition = LowRankAddition(*sizes, *_sizes(layer), rows, dtype)
        return addition

    @property
    def arrays(self) -> list[jax.Array]:
        """All arrays, the model's own among them."""
        return self._split.arrays

    @property
    def most_file_bytes(self) -> int:
        """Bytes of a file that can be an adapter of the model: what has a place, in float32, twice, and a header.

        Of embeddings, PEFT also saves the base's weight.
        """
        tables = sum(math.prod(_sizes(layer)) for layer in self._embeddings.values())
        return 4 * (self.bytes_per_place + tables) + _MOST_HEADER_BYTES

    def rebase(self, base: ModelArrays) -> None:
        """See `Variants`; changes that were read before have to be `rebased`."""
        for name, array in base.named_arrays():
            self._split.arrays[self._index[name]] = array
        self.generation += 1
        layers = {name: layer for name, layer in named_modules(base.model) if isinstance(layer, _Layer)}
        self._layers = {name: layers[name] for name in self._layers}
        self._embeddings = {name: cast(JaxEmbed, layers[name]) for name in self._embeddings}

    def rebased(self, changes: Mapping[str, LayerChange]) -> dict[str, LayerChange]:
        """Changes that were read for other weights, for those that there are now: factors depend on them."""
        return {name: _of_layer(each.change, self._layers[name]) for name, each in changes.items()}

    def merge(self, arrays: list[jax.Array], places: jax.Array, parts: frozenset[str]) -> GenerativeModel:
        """See `Variants`."""
        model = self._split.merge(arrays)
        rows = cast(StepRows, getattr(model, _ROWS))
        rows.slots.set_value(places)
        rows.are_scaled = _SCALES in parts
        return model

    def changes_of(self, adapter: Adapter) -> dict[str, LayerChange]:
        """The changes of an adapter by the names that modules have here; independent of its file.

        Raises:
          ConfigError: The adapter changes what requests cannot change one by one, or was made for another model.
        """
        replaced = {
            name for name, tensor in adapter.replaced.items() if not self._is_base_of_change(adapter, name, tensor)
        }
        if replaced:
            raise ConfigError(
                f"{adapter.path} replaces {min(replaced)!r}, which is the same for all requests: merge it "
                "while loading (--adapter FOLDER --merge)"
            )
        if adapter.experts:
            raise ConfigError(
                f"{adapter.path} changes {min(adapter.experts)!r}, experts, which cannot be changed for some requests "
                "only: merge it while loading (--adapter FOLDER --merge)"
            )
        changes: dict[str, LayerChange] = {}
        for theirs, change in adapter.changes.items():
            name = self._names.name_here(theirs)
            layer = self._layers.get(name)
            if name in self._without_room:
                raise ConfigError(
                    f"{adapter.path} changes {theirs!r}, for which requests have no room: name it among "
                    "lora_target_modules"
                )
            if layer is None or change.is_embedding != isinstance(layer, JaxEmbed):
                what = "which is not a layer that can be changed for some requests only"
                if name in self._moved:
                    what = "of which several devices have the outputs in another order"
                raise ConfigError(
                    f"{adapter.path} changes {theirs!r}, {what}: merge it while loading (--adapter FOLDER --merge)"
                )
            if (sizes := (change.input_size, change.output_size)) != _sizes(layer):
                kinds = "tokens", "features" if change.is_embedding else "features in", "features out"
                raise ConfigError(
                    f"{adapter.path}: {theirs!r} is for {sizes[0]} {kinds[0]} and {sizes[1]} {kinds[1]}, but the "
                    f"model's has {' and '.join(map(str, _sizes(layer)))}: the adapter was trained on another model"
                )
            if change.rank > self.max_rank:
                raise ConfigError(
                    f"{adapter.path}: {theirs!r} has rank {change.rank}, more than max_lora_rank={self.max_rank}"
                )
            # Copies: the file may be replaced while requests use what it held.
            magnitude = None if change.magnitude is None else np.array(change.magnitude)
            copied = dataclasses.replace(change, a=np.array(change.a), b=np.array(change.b), magnitude=magnitude)
            changes[name] = _of_layer(copied, layer)
        return changes

    def _is_base_of_change(self, adapter: Adapter, name: str, tensor: np.ndarray) -> bool:
        """Whether a tensor is the table that an embedding's change was trained on, which PEFT never trains with it."""
        module = name.removesuffix(".weight")
        change, layer = adapter.changes.get(module), self._embeddings.get(self._names.name_here(module))
        return change is not None and change.is_embedding and layer is not None and tensor.shape == _sizes(layer)

    def put(self, changes: Mapping[str, LayerChange], place: int) -> None:
        """Puts an adapter's matrices into a place, from 0 on; steps that were dispatched before do not see them."""
        arrays = self._split.arrays
        had_factors, has_factors = place in self._with_factors, bool(parts_of(changes))
        self._with_factors ^= {place} if had_factors != has_factors else set()
        for name, layer in self._layers.items():
            given, kind = changes.get(name), "head_addition" if isinstance(layer, LatentUpProjection) else "addition"
            # What is not changed has rank 0, and its matrices stay what they were.
            entries = {} if given is None else self._additions[name].entries(*_padded(given.change, self.max_rank))
            entries["ranks"] = np.asarray(0 if given is None else given.change.rank, np.int32)
            if had_factors or has_factors:
                factors = None if given is None else given.factors
                entries["factors"] = np.ones(_sizes(layer)[1], np.float32) if factors is None else factors
            for table, entry in entries.items():
                index = self._index[f"{name}.{kind}.{table}.value"]
                arrays[index] = _write(arrays[index], entry.reshape(arrays[index].shape[1:]), place)


_ROWS = "step_rows"


def parts_of(changes: Mapping[str, LayerChange]) -> frozenset[str]:
    """See `Variants`."""
    return frozenset({_SCALES} if any(each.factors is not None for each in changes.values()) else ())


def _of_layer(change: LowRankChange, layer: _Layer) -> LayerChange:
    return LayerChange(change, None if change.magnitude is None else _factors(change, layer))


def _factors(change: LowRankChange, layer: _Layer) -> np.ndarray:
    """DoRA's (arXiv:2402.09353): each output's magnitude by the norm of its changed weights, float32 [out]."""
    assert change.magnitude is not None
    a, scaled_b = change.a.astype(np.float32), np.float32(change.scale) * change.b.astype(np.float32)
    squares = np.zeros(change.output_size, np.float64)
    for ids, rows in _rows_of(layer):
        if change.is_embedding:
            squares += np.square(rows + (scaled_b @ a[:, ids]).T).sum(0, dtype=np.float64)
        else:
            squares[ids] = np.square(rows + scaled_b[ids] @ a).sum(1, dtype=np.float64)
    return (change.magnitude.astype(np.float64) / np.sqrt(squares)).astype(np.float32)


def _rows_of(layer: _Layer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of a layer's weight as it is served: their numbers, and float32 [n, in], some at a time."""
    if isinstance(layer, LatentUpProjection):
        yield np.arange(layer.output_size), np.asarray(layer.dequantized())
        return
    weight, size = as_weight(layer.weight.get_value()), max(1, _ELEMENTS_AT_ONCE // layer.input_size)
    for first in range(0, layer.output_size, size):
        ids = np.arange(first, min(first + size, layer.output_size), dtype=np.int32)
        yield ids, np.asarray(weight.lookup(jnp.asarray(ids), jnp.float32))


def place_bytes(model: JaxModule, dtype: DTypeLike, max_rank: int, targets: Sequence[str] = (ALL_LINEAR,)) -> int:
    """Bytes of one adapter's matrices beside a model that computes in some type; it may be one without weights."""
    return _place_bytes([layer for _, layer in _adaptable(model, targets)], table_type(dtype), max_rank)


def _place_bytes(layers: Iterable[_Layer], table_type: DTypeLike, max_rank: int) -> int:
    layers = list(layers)
    elements = max_rank * sum(sum(_sizes(layer)) for layer in layers)
    factors = sum(_sizes(layer)[1] for layer in layers)
    return elements * jnp.dtype(table_type).itemsize + factors * jnp.dtype(jnp.float32).itemsize


def _sizes(layer: _Layer) -> tuple[int, int]:
    """Features in, or tokens; and features out."""
    if isinstance(layer, JaxEmbed):  # whose sizes are those of a head
        return layer.output_size, layer.input_size
    return layer.input_size, layer.output_size


def table_type(dtype: DTypeLike) -> DTypeLike:
    """The type of adapters' matrices beside a model that computes in some type: bfloat16 with bfloat16, or float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def _adaptable(model: JaxModule, targets: Sequence[str] | None = None) -> list[tuple[str, _Layer]]:
    """The layers that these name, or all that requests can change."""
    found: list[tuple[str, _Layer]] = []
    missing, names = set(targets or ()) - {ALL_LINEAR}, checkpoint_names_of(model)
    for name, layer in named_modules(model):
        if not isinstance(layer, _Layer) or type(layer) not in _KINDS or name.startswith("draft."):
            continue
        if isinstance(layer.quant_method, ApplyingQuantMethod):
            continue
        paths = [f".{each}" for each in (name, names.name_in_checkpoint(name))]
        named = {
            target
            for target in targets or ()
            if any(path.endswith((f".{target}", f".{names.name_here(target)}")) for path in paths)
        }
        missing -= named
        if targets is None or named or (ALL_LINEAR in targets and not isinstance(layer, JaxEmbed)):
            found.append((name, layer))
    if missing:
        raise ConfigError(
            f"lora_target_modules: no layer that requests can change has a name that ends in {min(missing)!r}: give "
            "such names as q_proj, embed_tokens or all-linear"
        )
    return found


def _padded(change: LowRankChange, max_rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of a change, float32 [max_rank, in] and, multiplied by its scale, [max_rank, out]."""
    a, b = (np.zeros((max_rank, size), np.float32) for size in (change.input_size, change.output_size))
    a[: change.rank] = change.a
    b[: change.rank] = (np.float32(change.scale) * change.b.astype(np.float32)).T
    return a, b


@functools.partial(jax.jit, donate_argnums=0)
def _write(table: jax.Array, entry: jax.Array, place: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(table, jnp.asarray(entry, table.dtype), place, 0)
