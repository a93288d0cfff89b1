"""The experts of a mixture: X gated feed-forward blocks whose weights stand in stacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.layers.expert_stacks import load_expert
from jaxis.layers.glu import GatedUnit
from jaxis.layers.linear import DEFAULT_INIT
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.quantization.experts import select_experts_method

if TYPE_CHECKING:
    from jaxis.quantization.config import QuantizationConfig

# The projections' names in checkpoints; Mixtral's are w1, w3, w2.
_PROJECTIONS = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj")},
    **{"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
}
_OF_ONE_EXPERT = re.compile(r"(\d+)\.(\w+)\.(\w+)")
_OF_ALL_EXPERTS = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj)(_\w+)?")


@dataclass(frozen=True)
class StackLayout:
    """How a checkpoint lays out tensors that hold all experts (`gate_up_proj`, `down_proj`).

    Attributes:
      transposed: Weights are [X, in, out], not [X, out, in]. Biases and what quantized weights consist of never are.
      interleaved: The outputs of `gate_up_proj` are gate and up in turns, not all of gate and then all of up.
    """

    transposed: bool
    interleaved: bool = False


class JaxExperts(JaxModule):
    """`down_proj(unit(gate_proj(x), up_proj(x)))` of the experts each token goes to, weighted and summed.

    Its parameters are stacks: `gate_proj` and `up_proj` [X, F, E], `down_proj` [X, E, F], and, with `use_bias`,
    `gate_proj_bias` and `up_proj_bias` [X, F] and `down_proj_bias` [X, E]. A quantized layer has what its method makes.

    Args:
      num_experts: X.
      hidden_size: E.
      intermediate_size: F of one expert.
      rngs: For the initial weights.
      gated_unit: Makes of gate and up what `down_proj` gets.
      scales_input: Whether a token's weight for an expert multiplies the expert's input rather than its output.
      use_bias: Whether the three projections have biases.
      stack_layout: Of a checkpoint whose tensors hold all experts; None where each tensor holds one.
      dtype, quant_config, prefix: As for `JaxLinear`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        rngs: nnx.Rngs,
        *,
        gated_unit: GatedUnit,
        scales_input: bool = False,
        use_bias: bool = False,
        stack_layout: StackLayout | None = None,
        dtype: Any,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.gated_unit = gated_unit
        self.scales_input = scales_input
        self.stack_layout = stack_layout
        self.kernel_init = DEFAULT_INIT
        method = quant_config.get_quant_method(self, prefix) if quant_config is not None else None
        self.quant_method = method or select_experts_method(self, None)
        self.quant_method.create_weights(self, rngs, dtype)
        self.gate_proj_bias = self.up_proj_bias = self.down_proj_bias = None
        if use_bias:

            def bias(size: int, axis: str) -> nnx.Param:
                shape = (num_experts, size)
                return make_parameter(rngs, nnx.initializers.zeros, shape, dtype, axes=("expert", axis))

            self.gate_proj_bias = bias(intermediate_size, "mlp")
            self.up_proj_bias = bias(intermediate_size, "mlp")
            self.down_proj_bias = bias(hidden_size, "embed")

    def __call__(self, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        """x [T, E], expert_ids i32 [T, k], expert_weights float32 [T, k] -> [T, E]."""
        return self.quant_method.apply(self, x, expert_ids, expert_weights)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Puts each expert's tensors into their places; experts may come in any order and in several calls.

        Args:
          weights: (name, tensor) pairs, of one expert (`3.gate_proj.weight`, `3.w1.weight`) or of all
            (`gate_up_proj`, `down_proj_bias`). What else a name ends with, the layer's method must have made a stack
            for: `3.gate_proj.weight_scale_inv` goes to `gate_proj_weight_scale_inv`.

        Returns:
          The names of the stacks that something was put into.

        Raises:
          CheckpointError: A tensor that is for no stack or no expert of this layer, has another shape, or is there
            twice.
        """
        filled = set()
        for name, tensor in weights:
            try:
                for stack_name, expert, part in self.parts(name, tensor):
                    self._load_part(stack_name, expert, part)
                    filled.add(stack_name)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name!r} {list(tensor.shape)} {error}") from None
        return filled

    def _load_part(self, stack_name: str, expert: int, part: np.ndarray) -> None:
        if not isinstance(getattr(self, stack_name, None), nnx.Param):
            raise CheckpointError(f"has no parameter {stack_name!r} in {type(self).__name__}")
        if expert >= self.num_experts:
            raise CheckpointError(f"is for expert {expert}, but the model has {self.num_experts}")
        if stack_name.endswith("_proj_bias"):
            load_expert(getattr(self, stack_name), expert, part)
        else:
            self.quant_method.load_expert(self, stack_name, expert, part)

    def parts(self, name: str, tensor: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
        """(Stack, expert, the expert's part with its outputs along the first axis)."""
        if match := _OF_ONE_EXPERT.fullmatch(name):
            expert, projection, kind = match.groups()
            if projection in _PROJECTIONS:
                yield _PROJECTIONS[projection] + ("" if kind == "weight" else f"_{kind}"), int(expert), tensor
                return
        match = _OF_ALL_EXPERTS.fullmatch(name)
        if match is None or self.stack_layout is None:
            raise CheckpointError(f"is none of the tensors of {type(self).__name__}")
        projection, suffix = match[1], match[2] or ""
        if len(tensor) != self.num_experts:
            raise CheckpointError(f"is for {len(tensor)} experts, but the model has {self.num_experts}")
        for expert, part in enumerate(tensor):
            if self.stack_layout.transposed and not suffix:
                part = part.T
            if projection != "gate_up_proj":
                yield projection + suffix, expert, part
                continue
            if len(part) % 2:
                raise CheckpointError("has an odd number of outputs, so they are not gate and up")
            half = len(part) // 2
            gate, up = (part[::2], part[1::2]) if self.stack_layout.interleaved else (part[:half], part[half:])
            yield f"gate_proj{suffix}", expert, gate
            yield f"up_proj{suffix}", expert, up
