"""The context for which a model's programs are traced and lowered: arrays on a mesh, caches, limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.kv_cache import CacheStruct
from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.engine.execution.rank_programs import RankPrograms
from jaxis.engine.execution.step_inputs import StepInputs
from jaxis.engine.execution.step_part import HeadPart
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.kernels.platform import target_platform
from jaxis.parallel.mesh import MODEL_AXIS, automatic_axes
from jaxis.parallel.stages import WHOLE, Stage


@dataclass(frozen=True, eq=False)
class ProgramContext:
    """A model, or one of its pipeline stages, on a mesh.

    Programs are traced on other threads, at times when there may be no caches, so only the caches' structs are used.

    Attributes:
      model: The model's arrays, or their structs.
      mesh: The model's devices, those of other processes included.
      caches: Shapes and shardings of the layers' caches.
      layer_groups: Group of each cache, in which it shares a block table; see `CachePlan`.
      num_draft_caches: Number of caches, the last ones, that belong to draft layers.
      max_num_seqs: Most sequences in a step (max R).
      vocab_size: Size of the vocabulary (V).
      stage: This part of the model.
    """

    model: ModelArrays
    mesh: jax.sharding.Mesh
    caches: Sequence[CacheStruct]
    layer_groups: Sequence[int]
    max_num_seqs: int
    vocab_size: int
    num_draft_caches: int = 0
    stage: Stage = WHOLE

    def arrays_of(self, shape: StepShape) -> list[jax.Array]:
        """Returns the arrays that the model's program takes for a step of this shape."""
        return next((part.arrays for part in shape.parts if part.arrays is not None), self.model.arrays)

    def merge(self, arrays: list[jax.Array], shape: StepShape, step: StepInputs) -> GenerativeModel:
        """Returns, inside a program, the model of a step, rebuilt from `arrays_of`."""
        for part in shape.parts:
            if part.arrays is not None:
                return part.model(arrays, step.fields, shape)
        return self.model.merge(arrays)

    def head_arrays_of(self, head: HeadPart | None) -> list[jax.Array]:
        """Returns the arrays of a program of logits."""
        return self.model.head_arrays if head is None else head.arrays

    def merge_head(
        self, head_arrays: list[jax.Array], head: HeadPart | None, rows: Sequence[jax.Array]
    ) -> GenerativeModel:
        """Returns, inside a program, the model rebuilt from `head_arrays_of`; `rows` has the part's operand, if any."""
        return self.model.merge_head(head_arrays) if head is None else head.model(head_arrays, rows[0])

    @functools.cached_property
    def ranks(self) -> RankPrograms:
        """The maker of programs of all data ranks of the mesh from programs of one."""
        return RankPrograms(self.mesh)

    @functools.cached_property
    def num_model_caches(self) -> int:
        """The number of caches of the model's own layers, which come first."""
        return len(self.caches) - self.num_draft_caches

    @property
    def model_caches(self) -> list[CacheStruct]:
        return list(self.caches[: self.num_model_caches])

    @property
    def draft_caches(self) -> list[CacheStruct]:
        return list(self.caches[self.num_model_caches :])

    @functools.cached_property
    def is_on_host(self) -> bool:
        """True if the host can read the devices' memory, as on CPU."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of arrays that are whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def _group_layers(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for layer, group in enumerate(self.layer_groups):
            groups.setdefault(group, []).append(layer)
        return groups

    def layers_of_group(self, group: int) -> list[int]:
        """Returns the indices of a group's caches; a pipeline stage may have none of them."""
        return self._group_layers.get(group, [])

    def hidden_struct(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        """Returns the struct of hidden states of so many tokens of each data rank."""
        one = self.model.hidden_states
        return self.ranks.struct((num_tokens, *one.shape[1:]), one.dtype)

    def int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Returns the struct of an int32 array that is whole on every device."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.replicated)

    def divide(self, logits: jax.Array) -> jax.Array:
        """Keeps, inside a program, a part of the vocabulary on each device; the last one's may be smaller."""
        return _constrain(logits, PartitionSpec(None, MODEL_AXIS))

    def replicate(self, logits: jax.Array) -> jax.Array:
        """Makes logits whole on every device, inside a program, so that all devices sample the same tokens.

        Each device first computes its own part of the vocabulary. Without that hint, XLA would gather the head's weight
        and let every device multiply by all of it.
        """
        return _constrain(self.divide(logits), self.replicated.spec)


def _constrain(logits: jax.Array, spec: PartitionSpec) -> jax.Array:
    if MODEL_AXIS not in automatic_axes():
        return logits
    # A spec without a mesh: XLA may divide only one rank's part of the mesh here.
    return jax.lax.with_sharding_constraint(logits, spec)


def shardings_of(caches: Sequence[CacheStruct]) -> list[Any]:
    return jax.tree.map(lambda struct: struct.sharding, list(caches))


def jit(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """Calls `jax.jit` with the compiler options of the current mesh's platform, unless other options are given."""
    return jax.jit(function, **{"compiler_options": _compiler_options(), **options})


def _compiler_options() -> dict[str, int | bool] | None:
    platform = target_platform()
    if platform == "cpu":
        # Values rounded to bfloat16 or float16 stay rounded. Otherwise, results depend on the operations that XLA fuses
        # in steps of one shape and not of another.
        return {"xla_allow_excess_precision": False}
    if platform != "gpu":
        return None
    # XLA would merge the products of one input with several small weights (queries, keys and values; a feed-forward's
    # halves; a router), and copy these weights into one in every step.
    return {"xla_gpu_dot_merger_threshold_mb": 0}
