"""Parameters that hold a weight, or one for each of X experts, filled tensor by tensor as a checkpoint is read.

A weight is built as soon as its last tensor has arrived, so that loading needs little more memory than the model and
the tensors of one weight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import Allocate, PackedWeight, WeightValue
from jaxis.kernels.weights.shards import in_equal_parts, placement
from jaxis.kernels.weights.stack_packer import StackPacker
from jaxis.layers.expert_stack import ExpertStack, new_stack
from jaxis.layers.module import Initializer, parameter_of
from jaxis.layers.weight_format import PLAIN, InvalidWeightError, TensorSpec, WeightSlot
from jaxis.layers.weight_loader import place_array, unexpected_shard
from jaxis.layers.weight_recipe import WeightRecipe
from jaxis.loading.headers import HeaderTensor
from jaxis.loading.mapped_pages import drop_pages_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialWeight:
    """Value of a parameter some of whose tensors have not arrived.

    Attributes:
      target: Shape [out, in] or [X, out, in]. It is abstract, so that an incomplete parameter counts as not loaded.
      waiting: (Expert, tensor name) -> tensors of incomplete weights; views of the mapped file.
      stack: Weights of the complete experts; None if they are packed.
      packer: Packed weights of complete experts, some of which other threads may still be packing.
      complete: Experts with all tensors.
      first_type: Type of these experts' first tensor.
    """

    target: jax.ShapeDtypeStruct
    waiting: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    stack: ExpertStack | None = None
    packer: StackPacker | None = None
    complete: frozenset[int] = field(default=frozenset(), metadata={"static": True})
    first_type: np.dtype | None = field(default=None, metadata={"static": True})

    @property
    def missing(self) -> list[int]:
        """Experts without a weight so far."""
        present = self.complete if self.packer is None else self.packer.experts
        return [expert for expert in range(self.target.shape[0]) if expert not in present]


@dataclass(frozen=True)
class WeightLoader:
    """`weight_loader` of a parameter that holds a weight. Identical layers have equal ones."""

    recipe: WeightRecipe
    slot: WeightSlot
    dtype: np.dtype

    def make_parameter(self, rngs: nnx.Rngs, init: Initializer) -> nnx.Param:
        shape = self._target.shape

        def make(key: jax.Array) -> WeightValue:
            return self.weight_of(init(key, shape, self.dtype))

        return parameter_of(make, rngs, shape, self.dtype, logical_axes=self.slot.axes, weight_loader=self)

    def takes(self, tensor_name: str) -> bool:
        return tensor_name in self._specs

    def __call__(self, param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
        """Takes one of the weight's tensors; `shard_id` is its name in the file, None the parameter's own.

        Raises CheckpointError if the weight does not take this tensor.
        """
        name = "weight" if shard_id is None else shard_id
        if name not in self._specs:
            raise unexpected_shard(name)
        self._check(str(name), tensor, "has shape {} in the checkpoint, {} in the model")
        if name not in self._needed:
            return
        value = param.get_value()
        partial = value if isinstance(value, PartialWeight) else PartialWeight(self._target)
        tensors = self._take(partial, 0, str(name), tensor)
        if tensors is None:
            param.set_value(partial)
        elif isinstance(tensor, HeaderTensor):
            param.set_value(HeaderTensor.of(self.slot.shape, self.dtype))
        else:
            param.set_value(self._place(self._make(tensors)))

    def take_expert(
        self, param: nnx.Param, expert: int, tensor: np.ndarray, name: str = "weight"
    ) -> Callable[[], None] | None:
        """Takes one tensor, with its outputs along the first axis, of an expert's weight.

        Returns a function that packs the weight, in any thread, if this was its last tensor and it is packed; else
        None. The function raises CheckpointError. `finish_experts` must be called after the last of these functions has
        returned.

        Args:
          param: Parameter whose value is abstract [X, ...], or partly filled by this function.
          expert: Index of the expert.
          tensor: The tensor.
          name: Name of the tensor in the format.

        Raises:
          CheckpointError: The weight does not take this tensor, or already has it.
        """
        value = param.get_value()
        partial = PartialWeight(value) if isinstance(value, jax.ShapeDtypeStruct) else value
        is_taken = not isinstance(partial, PartialWeight) or expert in partial.complete
        if is_taken or (expert, name) in partial.waiting:
            raise CheckpointError(f"is a duplicate for expert {expert}")
        self._check(name, tensor, "has {} for an expert in the checkpoint, {} in the model")
        if name not in self._needed:
            return None
        tensors = self._take(partial, expert, name, tensor)
        job = None
        if tensors is not None:
            stack, packer, first_type = partial.stack, partial.packer, partial.first_type or tensor.dtype
            if isinstance(tensor, HeaderTensor):
                pass
            elif self.recipe.packs:
                packer = packer or StackPacker(partial.target.shape[0])
                if self.recipe.format is PLAIN and tensor.dtype == ml_dtypes.bfloat16 != first_type:
                    # The stack is of a wider type, so this tensor is upcast.
                    tensors = {each: array.astype(np.float32) for each, array in tensors.items()}
                job = functools.partial(self._pack_expert, packer, expert, tensors)
            else:
                stack = stack or new_stack(partial.target.shape[0], self.slot.axes)
                self._put(stack, expert, tensors)
            partial = dataclasses.replace(
                partial, stack=stack, packer=packer, complete=partial.complete | {expert}, first_type=first_type
            )
        param.set_value(partial)
        return job

    def missing(self, value: object) -> list[str]:
        """Returns the tensors that a parameter with this value lacks, by their names beside it in the file."""
        if not isinstance(value, PartialWeight):
            return [self._file_name(name) for name in self._needed]
        if self.slot.num_experts is None:
            return [name for name in self._needed if (0, name) not in value.waiting]
        missing: list[str] = []
        for name in self._needed:
            lack = [expert for expert in value.missing if (expert, name) not in value.waiting]
            if len(lack) == self.slot.num_experts:
                missing.append(self._file_name(name))
            else:
                missing += [f"{self._file_name(name)} of expert {expert}" for expert in lack]
        return missing

    @property
    def _target(self) -> jax.ShapeDtypeStruct:
        experts = self.slot.num_experts
        return jax.ShapeDtypeStruct(self.slot.shape if experts is None else (experts, *self.slot.shape), self.dtype)

    @property
    def _specs(self) -> dict[str, TensorSpec]:
        return dict(self.recipe.format.tensors(self.slot.shape))

    @property
    def _needed(self) -> dict[str, TensorSpec]:
        return {name: spec for name, spec in self._specs.items() if not spec.is_zero}

    def _file_name(self, tensor_name: str) -> str:
        if self.slot.num_experts is None:
            return tensor_name
        return self.slot.name if tensor_name == "weight" else f"{self.slot.name}_{tensor_name}"

    def _check(self, name: str, tensor: np.ndarray, shapes_differ: str) -> None:
        spec = self._specs[name]
        if not spec.fits(tuple(tensor.shape)):
            raise CheckpointError(shapes_differ.format(list(tensor.shape), list(spec.shape)))
        if spec.dtypes and tensor.dtype not in spec.dtypes:
            expected = " or ".join(map(str, spec.dtypes))
            raise CheckpointError(f"is {tensor.dtype} in the checkpoint, but must be {expected} here")
        if isinstance(tensor, HeaderTensor):
            return
        if spec.is_zero and np.any(tensor):
            raise CheckpointError("has no parameter in the model, and is not zero")
        if spec.content is not None and tensor.tolist() != list(spec.content):
            raise CheckpointError(f"is {tensor.tolist()} in the checkpoint, {list(spec.content)} in the model")

    def _take(self, partial: PartialWeight, expert: int, name: str, tensor: np.ndarray) -> dict[str, np.ndarray] | None:
        """Returns all of a weight's tensors if this is the last one; otherwise stores it and returns None."""
        partial.waiting[expert, name] = tensor
        names = self._needed
        if any((expert, each) not in partial.waiting for each in names):
            return None
        return {each: partial.waiting.pop((expert, each)) for each in names}

    def _make(self, tensors: dict[str, np.ndarray], allocate: Allocate | None = None) -> WeightValue:
        try:
            weight = self.recipe.make(tensors, self.slot.shape, self.dtype, allocate)
            return in_equal_parts(weight, self.slot.axes)
        except InvalidWeightError as error:
            raise InvalidWeightError(f"has a {self.slot.name} {error}") from None
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def _make_packed(self, tensors: dict[str, np.ndarray], allocate: Allocate) -> PackedWeight:
        weight = self._make(tensors, allocate)
        if not isinstance(weight, PackedWeight):
            raise InvalidWeightError(f"has a {self.slot.name} that is stored differently from what config.json says")
        return weight

    def _pack_expert(self, stack: StackPacker, expert: int, tensors: dict[str, np.ndarray]) -> None:
        try:
            stack.pack(expert, lambda allocate: self._make_packed(tensors, allocate))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        for tensor in tensors.values():
            # The file's reader has gone on, and may have dropped them before they were read.
            drop_pages_of(tensor)

    def _put(self, stack: ExpertStack, expert: int, tensors: dict[str, np.ndarray]) -> None:
        if stack.is_here(expert):
            weight = self._make(tensors)
            stack.put(expert, weight, self.dtype if isinstance(weight, jax.Array | np.ndarray) else None)

    def _place(self, weight: WeightValue) -> WeightValue:
        axes = placement(weight, self.slot.axes)
        if isinstance(weight, jax.Array | np.ndarray):
            return place_array(weight, axes).astype(self.dtype)
        # Packed arrays are already in place.
        return jax.tree.map(lambda a: place_array(a, axes) if isinstance(a, np.ndarray) else a, weight)

    def weight_of(self, array: jax.Array) -> WeightValue:
        """Returns the weight that these floats are quantized or packed to: [out, in], or [X, out, in] for experts."""
        recipe = self.recipe
        if recipe.scheme is None and not recipe.packs:
            return in_equal_parts(array, self.slot.axes) if self.slot.num_experts is None else array
        loader = dataclasses.replace(self, recipe=dataclasses.replace(recipe, format=PLAIN, dequantizes=False))
        if self.slot.num_experts is None:
            return loader._place(loader._make({"weight": np.asarray(array)}))
        stack, packer = new_stack(self.slot.num_experts, self.slot.axes), StackPacker(self.slot.num_experts)
        for expert, weight in enumerate(np.asarray(array)):
            if recipe.packs:
                loader._pack_expert(packer, expert, {"weight": weight})
            else:
                loader._put(stack, expert, {"weight": weight})
        return packer.stack() if recipe.packs else stack.stack()


def take_expert(param: nnx.Param, expert: int, tensor: np.ndarray, name: str = "weight") -> Callable[[], None] | None:
    """Calls `WeightLoader.take_expert` for any parameter [X, ...]; without a WeightLoader, an expert is one tensor."""
    loader = param.get_metadata().get("weight_loader")
    if not isinstance(loader, WeightLoader):
        value = param.get_value()
        target = value.target if isinstance(value, PartialWeight) else value
        axes = param.get_metadata().get("logical_axes") or (None,) * len(target.shape)
        slot = WeightSlot("weight", tuple(target.shape[1:]), axes, target.shape[0])
        loader = WeightLoader(WeightRecipe(), slot, target.dtype)
    return loader.take_expert(param, expert, tensor, name)


def finish_experts(param: nnx.Param) -> None:
    """Sets the weight of a parameter [X, ...] if `take_expert` has taken every expert; otherwise does nothing."""
    value = param.get_value()
    if not isinstance(value, PartialWeight) or value.missing:
        return
    if (filled := value.packer or value.stack) is None:  # all tensors were HeaderTensors
        param.set_value(HeaderTensor.of(value.target.shape, value.target.dtype))
    else:
        param.set_value(filled.stack())


def missing_tensors(name: str, param: nnx.Param) -> Iterable[str]:
    """Returns the names of the tensors that an unfilled parameter with this dotted name lacks."""
    loader = param.get_metadata().get("weight_loader")
    if not isinstance(loader, WeightLoader):
        value = param.get_value()
        if not isinstance(value, PartialWeight):
            return [name]
        return [f"{name} of expert {expert}" for expert in value.missing]
    prefix = name.rpartition(".")[0]
    return [f"{prefix}.{missing}" if prefix else missing for missing in loader.missing(param.get_value())]
