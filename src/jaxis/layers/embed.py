"""Token embeddings and the output head."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import QuantizationConfig
from jaxis.kernels.weights import lookup, matmul
from jaxis.layers.addition import LookupAddition, LowRankAddition
from jaxis.layers.linear import DEFAULT_INIT, JaxLinear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scale import scaled
from jaxis.layers.weight_format import WeightSlot
from jaxis.layers.weight_method import create_weights


class JaxEmbed(JaxModule):
    """Token embeddings `weight` [V, E]; `decode` uses the same table as the output head (tied heads).

    Args:
      scale: Multiplies the embeddings that are looked up; rounded to their type first (Gemma).

    Attributes:
      addition: Addition of adapters to looked-up embeddings, before `scale`; None for none.
      head_addition: Addition of adapters to the result of `decode`; None for none.
    """

    weight: nnx.Param
    addition: LookupAddition | None = None
    head_addition: LowRankAddition | None = None
    can_be_packed = True

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        rngs: nnx.Rngs,
        *,
        scale: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "embed_tokens",
    ) -> None:
        # `decode` is a linear layer from E features to V logits.
        self.input_size = features
        self.output_size = num_embeddings
        self.kernel_axes = ("vocab", "embed")
        self.kernel_init = DEFAULT_INIT
        self.dtype = dtype
        self.scale = float(np.asarray(scale, dtype))
        self.quant_method = create_weights(self, quant_config, prefix, rngs, dtype)

    @property
    def weight_slots(self) -> Sequence[WeightSlot]:
        return [WeightSlot("weight", (self.output_size, self.input_size), self.kernel_axes)]

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Returns the embeddings [T, E] of input_ids [T]."""
        rows = lookup(input_ids, self.weight.get_value(), self.dtype, axes=self.kernel_axes)
        if self.addition is not None:
            rows = self.addition.change(rows, input_ids).astype(self.dtype)
        return scaled(rows, self.scale)

    def decode(self, hidden_states: jax.Array) -> jax.Array:
        """Returns float32 logits [T, V] of hidden_states [T, E]."""
        weight, axes = self.weight.get_value(), self.kernel_axes
        if self.head_addition is not None:
            return self.head_addition.changed_product(hidden_states, weight, jnp.float32, axes)
        logits = matmul(hidden_states, weight, preferred_element_type=jnp.float32, axes=axes)
        return _without_padding(logits, self.output_size)


class PositionEmbedding(JaxModule):
    """Learned embeddings of positions, `weight` [P + offset, E]; position p has row p + offset (OPT's offset is 2).

    P is the most tokens of a sequence.
    """

    def __init__(
        self, num_positions: int, features: int, rngs: nnx.Rngs, *, offset: int = 0, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.offset = offset
        self.weight = make_parameter(rngs, DEFAULT_INIT, (num_positions + offset, features), dtype, axes=(None, None))

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Returns [T, E] for positions i32 [T]. Positions past the table, which only padding has, get the last row."""
        return jnp.take(self.weight[...], positions + self.offset, axis=0, mode="clip")


class JaxLmHead(JaxLinear):
    """An output head that is not tied to the embeddings: `weight` [V, E], and with `use_bias` a `bias` [V]."""

    def __init__(
        self,
        features: int,
        vocab_size: int,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "lm_head",
    ) -> None:
        super().__init__(
            features,
            vocab_size,
            rngs,
            use_bias=use_bias,
            dtype=dtype,
            kernel_axes=("vocab", "embed"),
            quant_config=quant_config,
            prefix=prefix,
        )

    def __call__(self, hidden_states: jax.Array) -> jax.Array:
        """Returns float32 logits [T, V] of hidden_states [T, E]."""
        # Not rounded to the weights' type, in which the top tokens would often tie.
        logits = _without_padding(self.product(hidden_states, preferred_element_type=jnp.float32), self.output_size)
        return logits if self.bias is None else logits + self.bias[...]


def _without_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Cuts logits to the vocabulary, [T, V]: of devices that share a table, the last one's has rows of zeros."""
    return logits if logits.shape[-1] == vocab_size else logits[..., :vocab_size]
