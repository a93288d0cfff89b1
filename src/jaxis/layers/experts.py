from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import CheckpointError
from jaxis.kernels.host_threads import BackgroundJobs
from jaxis.kernels.weights import ExpertStacks, GatedUnit, experts
from jaxis.layers.addition import ExpertsAddition
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.linear import DEFAULT_INIT
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.partial_weight import WeightLoader, finish_experts, take_expert
from jaxis.layers.weight_format import InvalidWeightError, WeightSlot
from jaxis.layers.weight_method import create_weights
from jaxis.parallel.mesh import SPREAD_EXPERT

PROJECTION_NAMES = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
"""Map from a stack to the names of an expert's projection in checkpoints; the second are Mixtral's."""
_PROJECTIONS = {name: stack for stack, names in PROJECTION_NAMES.items() for name in names}
# Logical axes of the (out, in) of each stack's weights.
STACK_AXES = {"gate_proj": ("mlp", "embed"), "up_proj": ("mlp", "embed"), "down_proj": ("embed", "mlp")}
_OF_ONE_EXPERT = re.compile(r"(\d+)\.(\w+)\.([\w.]+)")
_OF_ALL_EXPERTS = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj)(_\w+)?")
# Stacked tensors by MLX's names; `StackLayout` does not apply.
_STACKED = re.compile(r"(gate_proj|up_proj|down_proj)\.([\w.]+)")


@dataclass(frozen=True)
class StackLayout:
    """Layout of a checkpoint's tensors that hold all experts (`gate_up_proj`, `down_proj`).

    Attributes:
      transposed: True if weights are [X, in, out], False if [X, out, in]; scales of quantized weights are either way.
        None: weights may be either way, too; if their shape does not tell, they are [X, out, in] as in transformers.
      interleaved: True if the outputs of `gate_up_proj` alternate between gate and up; False if all gates come first.
    """

    transposed: bool | None
    interleaved: bool = False


class JaxExperts(JaxModule):
    """`down_proj(unit(gate_proj(x), up_proj(x)))` of the experts of each token, weighted and summed.

    Its parameters are stacks: `gate_proj`, unless the unit has no gate, and `up_proj` [X, F, E], `down_proj` [X, E, F],
    and, with `use_bias`, `gate_proj_bias` and `up_proj_bias` [X, F] and `down_proj_bias` [X, E].

    Args:
      gated_unit: Function that computes the input of `down_proj` from gate and up, or from up alone.
      stack_layout: Layout of tensors that hold all experts; None if each tensor holds one.
      are_spread: True if each device of the mesh has whole experts, equally many; False if it has a part of each.

    Attributes:
      addition: Addition of adapters to the experts' products; None for none.
      scales_input: True if a token's weight for an expert multiplies the expert's input rather than its output, which a
        family sets.
    """

    scales_input: bool = False

    addition: ExpertsAddition | None = None
    gate_proj: nnx.Param | None = None
    up_proj: nnx.Param
    down_proj: nnx.Param

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        rngs: nnx.Rngs,
        *,
        gated_unit: GatedUnit,
        use_bias: bool = False,
        stack_layout: StackLayout | None = None,
        are_spread: bool = False,
        dtype: DTypeLike,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.gated_unit = gated_unit
        self.stack_layout = stack_layout
        self.are_spread = are_spread
        self.kernel_init = DEFAULT_INIT
        self.quant_method = create_weights(self, quant_config, prefix, rngs, dtype)
        self.gate_proj_bias = self.up_proj_bias = self.down_proj_bias = None
        if use_bias:

            def bias(size: int, axis: str) -> nnx.Param:
                shape = (num_experts, size)
                return make_parameter(rngs, nnx.initializers.zeros, shape, dtype, axes=self._axes(axis))

            self.gate_proj_bias = bias(intermediate_size, "mlp") if gated_unit.has_gate else None
            self.up_proj_bias = bias(intermediate_size, "mlp")
            self.down_proj_bias = bias(hidden_size, "embed")

    @property
    def weight_slots(self) -> Sequence[WeightSlot]:
        sizes = {"embed": self.hidden_size, "mlp": self.intermediate_size}
        return [
            WeightSlot(name, (sizes[axes[0]], sizes[axes[1]]), self._axes(*axes), self.num_experts)
            for name, axes in STACK_AXES.items()
            if name in self.stack_names
        ]

    def _axes(self, *axes: str) -> tuple[str | None, ...]:
        if self.are_spread:
            return SPREAD_EXPERT, *(None if axis == "mlp" else axis for axis in axes)
        return "expert", *axes

    @property
    def stack_names(self) -> list[str]:
        return [name for name in STACK_AXES if name != "gate_proj" or self.gated_unit.has_gate]

    @property
    def can_be_packed(self) -> bool:
        return self.gated_unit.kernel_arguments is not None

    def __call__(
        self,
        x: jax.Array,
        expert_ids: jax.Array,
        expert_weights: jax.Array,
        metadata: AttentionMetadata | None = None,
    ) -> jax.Array:
        """Applies experts i32 [T, k], with weights float32 [T, k], to x [T, E]. No metadata: no row is padding."""
        if self.are_spread and metadata is not None and jax.sharding.get_abstract_mesh().size > 1:
            # Padding goes to no expert: it would all go to the same ones, and their devices keep the others waiting.
            is_real = jnp.arange(len(expert_ids)) < metadata.num_tokens
            expert_ids = jnp.where(is_real[:, None], expert_ids, self.num_experts)
        biases = (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias)
        stacks = ExpertStacks(
            None if self.gate_proj is None else self.gate_proj.get_value(),
            self.up_proj.get_value(),
            self.down_proj.get_value(),
            *(None if bias is None else bias[...] for bias in biases),
            num_experts=self.num_experts,
            gated_unit=self.gated_unit,
            scales_input=self.scales_input,
            are_spread=self.are_spread,
            additions=None if self.addition is None else self.addition.of(expert_ids),
        )
        return experts(x, expert_ids, expert_weights, stacks)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Loads the experts' tensors, in any order and over any number of calls; returns the stacks that received one.

        Args:
          weights: (name, tensor) pairs, of one expert (`3.gate_proj.weight`, `3.w1.weight`) or of all (`gate_up_proj`,
            `down_proj_bias`; `gate_proj.weight` as MLX names and lays them out). Other suffixes name tensors of the
            weights' format: `3.gate_proj.weight_scale_inv`, `gate_up_proj_scales`.

        Raises:
          CheckpointError: A tensor belongs to no stack or expert of this layer, has the wrong shape, or occurs twice.
        """
        filled: set[str] = set()
        # A layer has hundreds of weights that are too small to share between threads: each is one thread's.
        with BackgroundJobs() as background:
            for name, tensor in weights:
                with _errors_name(name, tensor.shape):
                    jobs = [self._take_part(*part, filled) for part in self.parts(name, tensor)]
                for job in jobs:
                    if job is not None:
                        background.submit(_errors_name(name, tensor.shape)(job))
        for name in filled:
            finish_experts(getattr(self, name))
        return filled

    def _take_part(self, stack_name: str, expert: int, part: np.ndarray, filled: set[str]) -> Callable[[], None] | None:
        name, tensor_name = self._parameter_of(stack_name)
        if expert >= self.num_experts:
            raise CheckpointError(f"is for expert {expert}, but the model has {self.num_experts}")
        job = take_expert(getattr(self, name), expert, part, tensor_name)
        filled.add(name)
        return job

    def _parameter_of(self, stack_name: str) -> tuple[str, str]:
        """Returns the parameter of a stack's name in the file, and the tensor's name in the weights' format."""
        if isinstance(getattr(self, stack_name, None), nnx.Param):
            return stack_name, "weight"
        for name in self.stack_names:
            tensor_name = stack_name.removeprefix(f"{name}_")
            loader = getattr(self, name).get_metadata().get("weight_loader")
            if tensor_name != stack_name and isinstance(loader, WeightLoader) and loader.takes(tensor_name):
                return name, tensor_name
        raise CheckpointError(f"has no parameter {stack_name!r} in {type(self).__name__}")

    def parts(self, name: str, tensor: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields (stack, expert, part): parts have their outputs along the first axis."""
        if match := _OF_ONE_EXPERT.fullmatch(name):
            expert, projection, kind = match.groups()
            if projection in _PROJECTIONS:
                yield _PROJECTIONS[projection] + _suffix(kind), int(expert), tensor
                return
        stacked, match = _STACKED.fullmatch(name), _OF_ALL_EXPERTS.fullmatch(name)
        if stacked is None and (match is None or self.stack_layout is None):
            raise CheckpointError(f"is not one of the tensors of {type(self).__name__}")
        projection, suffix = (match[1], match[2] or "") if match is not None else ("", "")
        if match is not None and suffix and tensor.size == 1 < self.num_experts:  # one scale for all
            tensor = np.broadcast_to(tensor.reshape(1), (self.num_experts,))
        if len(tensor) != self.num_experts:
            raise CheckpointError(f"is for {len(tensor)} experts, but the model has {self.num_experts}")
        if stacked is not None:
            for expert, part in enumerate(tensor):
                yield stacked[1] + _suffix(stacked[2]), expert, part
        else:
            yield from self._laid_out_parts(projection, suffix, tensor)

    def _laid_out_parts(
        self, projection: str, suffix: str, tensor: np.ndarray
    ) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields the parts of a tensor of all experts in the family's own layout."""
        assert self.stack_layout is not None
        for expert in range(self.num_experts):
            part = tensor[expert] if tensor.ndim > 1 else tensor[expert : expert + 1]
            if self.stack_layout.transposed is not False and self._is_transposed(projection, suffix, part):
                part = part.T
            if projection == "gate_up_proj":
                gate, up = self._gate_and_up(part, self.stack_layout)
                yield f"gate_proj{suffix}", expert, gate
                yield f"up_proj{suffix}", expert, up
            else:
                yield projection + suffix, expert, part

    def _is_transposed(self, projection: str, suffix: str, part: np.ndarray) -> bool:
        """Returns whether an expert's part of a tensor has its outputs along the second axis."""
        if not suffix and self.stack_layout is not None and self.stack_layout.transposed:
            return True
        sizes = {"gate_up_proj": 2 * self.intermediate_size, "down_proj": self.hidden_size}
        num_outputs = sizes.get(projection, self.intermediate_size)
        return part.ndim == 2 and part.shape[1] == num_outputs != part.shape[0]

    @staticmethod
    def _gate_and_up(part: np.ndarray, layout: StackLayout) -> tuple[np.ndarray, np.ndarray]:
        """Returns the two halves of an expert's part of `gate_up_proj`; one scale belongs to both."""
        if part.size == 1:
            return part, part
        if len(part) % 2:
            raise CheckpointError("has an odd number of outputs, so they are not gate and up")
        half = len(part) // 2
        return (part[::2], part[1::2]) if layout.interleaved else (part[:half], part[half:])


@contextmanager
def _errors_name(name: str, shape: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except InvalidWeightError as error:
        raise CheckpointError(f"after tensor {name!r}, an expert {error}", tensor=name) from None
    except CheckpointError as error:
        raise CheckpointError(f"tensor {name!r} {list(shape)} {error}", tensor=name) from None


def _suffix(tensor_name: str) -> str:
    return "" if tensor_name == "weight" else f"_{tensor_name}"
