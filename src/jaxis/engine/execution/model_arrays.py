"""A model as a flat list of arrays, the form in which compiled programs take it as an argument."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.config import VllmConfig
from jaxis.engine.execution.weight_layout import laid_out
from jaxis.errors import ConfigError
from jaxis.kernels.platform import target_platform
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.module import JaxModule
from jaxis.parallel.mesh import put


@runtime_checkable
class GenerativeModel(Protocol):
    """The methods that the engine calls on a model."""

    def __call__(
        self, kv_caches: list[Any] | None, input_ids: jax.Array, attention_metadata: AttentionMetadata, **others: Any
    ) -> tuple[list[Any], jax.Array, Any]:
        """Returns the updated caches, hidden states [T, E], and any further outputs of the model."""
        ...

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """Returns the logits [R, V] of hidden states [R, E]."""
        ...


class ModelArrays:
    """A model split into its arrays, which can be rebuilt from them or from tracers.

    Programs can also be lowered from the arrays of a model without weights, ShapeDtypeStructs with shardings.

    Attributes:
      hidden_states: One row of `compute_logits`'s input, [1, E].
      arrays: All of the model's arrays.
      head_arrays: The arrays that `compute_logits` reads; empty while there are no arrays. Calling a program takes
        longer with every array passed to it, so the sampler's gets only these.
    """

    def __init__(self, model: JaxModule, hidden_states: jax.ShapeDtypeStruct, *, has_head: bool = True) -> None:
        """Splits a loaded model, in the context of its mesh.

        On TPU its arrays are moved to the layout that programs read. Of pipeline stages, only the last has the head,
        `compute_logits`.
        """
        self.hidden_states = hidden_states
        self._graphdef, state = nnx.split(model)
        self.arrays: list[jax.Array]
        self.arrays, self._treedef = jax.tree.flatten(laid_out(state) if target_platform() == "tpu" else state)
        self.arrays = [_shared(array, hidden_states.sharding) for array in self.arrays]
        self._head_indices: list[int] = []
        if has_head:
            self._head_indices = indices_read(
                lambda arrays, hidden: self.merge(arrays).compute_logits(hidden), self.arrays, hidden_states
            )
        self._on_host: list[tuple[np.ndarray | jax.Array, Any]] = []

    @property
    def head_arrays(self) -> list[jax.Array]:
        return [self.arrays[i] for i in self._head_indices] if self.arrays else []

    @property
    def model(self) -> JaxModule:
        """The model, rebuilt."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, self.arrays))

    def merge(self, arrays: Sequence[Any]) -> GenerativeModel:
        """Returns the model rebuilt from these arrays, in the order of `arrays`."""
        return cast(GenerativeModel, nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, arrays)))

    def merge_head(self, head_arrays: Sequence[Any]) -> GenerativeModel:
        """Returns the model rebuilt from `head_arrays`; only its `compute_logits` can be called."""
        given = dict(zip(self._head_indices, head_arrays, strict=True))
        return self.merge([given.get(i) for i in range(self._treedef.num_leaves)])

    @property
    def num_bytes(self) -> int:
        """The bytes of the arrays on all devices together."""
        return bytes_on_devices(self.arrays)

    def bytes_by_name(self) -> dict[str, int]:
        """Returns the bytes of each array in memory, by its dotted name."""
        return {name: array.nbytes for name, array in self.named_arrays()}

    def named_arrays(self) -> list[tuple[str, jax.Array]]:
        """Returns each array and its dotted name, in the order of `arrays`."""
        arrays, _ = jax.tree.flatten_with_path(jax.tree.unflatten(self._treedef, self.arrays))
        return [(jax.tree_util.keystr(path, simple=True, separator="."), array) for path, array in arrays]

    def check_alike(self, other: ModelArrays) -> None:
        """Raises a ConfigError if another model's arrays cannot take the place of these in compiled programs."""
        here, there = self._kinds, other._kinds
        for name in sorted(here.keys() | there.keys()):
            if (mine := here.get(name)) != (theirs := there.get(name)):
                raise ConfigError(
                    f"the weight {name!r} is {theirs or 'missing'}, and {mine or 'unknown'} in the engine"
                )

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """The type and shape of each array by its name, dropped arrays included."""
        return {name: f"{array.dtype} {list(array.shape)}" for name, array in self.named_arrays()}

    @property
    def is_dropped(self) -> bool:
        """True if there are no arrays, on the devices or the host."""
        return not self.arrays and not self._on_host

    def unload(self, *, keep: bool) -> None:
        """Moves the arrays to the host's memory to `keep` them (a CPU's are there already), or drops them."""
        _ = self._kinds
        if not keep:
            self.release()
        elif any(device.platform != "cpu" for array in self.arrays[:1] for device in array.devices()):
            self._to_host()

    def restore(self) -> None:
        """Moves the arrays back to where they were before `unload`."""
        if self._on_host:
            self.arrays = [jax.device_put(array, place) for array, place in self._on_host]
            self._on_host = []

    def _to_host(self) -> None:
        moved = [not jnp.issubdtype(array.dtype, jax.dtypes.extended) for array in self.arrays]
        self._on_host = [
            (np.asarray(array) if moves else array, cast(Any, array).format)
            for array, moves in zip(self.arrays, moved, strict=True)
        ]
        self.arrays = []

    def release(self) -> None:
        self.arrays, self._on_host = [], []


def bytes_on_devices(arrays: Iterable[jax.Array]) -> int:
    """Returns the bytes of arrays on all devices together, those of other processes included."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize * len(array.sharding.device_set)
        for array in arrays
    )


def _shared(array: jax.Array, whole: NamedSharding) -> jax.Array:
    """Returns the array, or a copy on the mesh's devices of a constant that this process made elsewhere."""
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return array
    is_there = whole.is_fully_addressable and array.sharding.device_set <= whole.device_set
    return array if is_there else put(array, whole)


def hidden_state_struct(vllm_config: VllmConfig, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """Returns the struct of one hidden state, [1, E], as programs hand it on: whole on every device."""
    shape = (1, vllm_config.model_config.hf_config.get_text_config()["hidden_size"])
    return jax.ShapeDtypeStruct(shape, vllm_config.model_config.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def indices_read(function: Callable[..., Any], arrays: Sequence[Any], *operands: Any) -> list[int]:
    """Returns the indices of the `arrays` that the result of `function(arrays, *operands)` may depend on."""
    jaxpr = jax.make_jaxpr(function)(list(arrays), *operands).jaxpr
    used = {v for equation in jaxpr.eqns for v in equation.invars if isinstance(v, Var)}
    used.update(v for v in jaxpr.outvars if isinstance(v, Var))
    return [i for i, variable in enumerate(jaxpr.invars[: len(arrays)]) if variable in used]
