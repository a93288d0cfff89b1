"""The layers of a model that requests can change, and what an adapter's matrices of each take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.quantization import ApplyingQuantMethod
from jaxis.errors import ConfigError
from jaxis.kernels.weights import as_weight
from jaxis.layers.addition import ExpertsAddition, HeadwiseAddition, LookupAddition, LowRankAddition, StepRows
from jaxis.layers.checkpoint_names import CheckpointNames, checkpoint_names_of
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.experts import JaxExperts
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.routing import JaxRouter
from jaxis.models.common.decoder import CausalLM

ALL_LINEAR = "all-linear"
"""All that requests can change but embeddings, heads and experts, whose matrices are large; what there is room for by
default."""
_HEAD_NAME = "lm_head"
# Layers that are called with each token of a step, in its order. Others see some rows only, but for heads, which get
# the places of the rows that they see.
_KINDS = (JaxLinear, JaxRouter, LatentUpProjection, JaxEmbed, JaxLmHead)
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Adaptable:
    """A layer that requests can change.

    Attributes:
      layer: The layer; of a head that is tied to the embeddings, these.
      path: Dotted name, in the model, of what adds to it.
      is_embedding: Whether it looks up rows.
      is_head: Whether it computes logits.
      input_size: Features in; V of an embedding.
      output_size: Features out.
    """

    layer: JaxLinear | JaxEmbed
    path: str
    is_embedding: bool
    is_head: bool
    input_size: int
    output_size: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Features in, or tokens; and features out."""
        return self.input_size, self.output_size

    @property
    def is_extra(self) -> bool:
        """Whether ALL_LINEAR leaves it out."""
        return self.is_embedding or self.is_head

    @property
    def has_moved_rows(self) -> bool:
        """See `JaxLinear`."""
        return isinstance(self.layer, JaxLinear) and self.layer.has_moved_rows

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of its weight in a checkpoint."""
        return self.layer.output_size, self.layer.input_size

    def add(
        self, num_places: int, max_rank: int, rows: StepRows, dtype: DTypeLike
    ) -> LowRankAddition | LookupAddition | HeadwiseAddition:
        """Gives the layer the tables of its changes."""
        layer, sizes = self.layer, (num_places, max_rank)
        if isinstance(layer, LatentUpProjection):
            dims = layer.input_size, layer.key_dim, layer.value_dim, layer.num_heads
            layer.head_addition = HeadwiseAddition(*sizes, *dims, rows, dtype)
            return layer.head_addition
        if isinstance(layer, JaxEmbed) and self.is_embedding:
            layer.addition = lookup = LookupAddition(*sizes, *self.sizes, rows, dtype)
            return lookup
        addition = LowRankAddition(*sizes, *self.sizes, rows, dtype)
        if isinstance(layer, JaxEmbed):
            layer.head_addition = addition
        else:
            layer.addition = addition
        return addition

    def weight_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows of the weight as it is served: their numbers, and float32 [n, in], some at a time."""
        if isinstance(self.layer, LatentUpProjection):
            yield np.arange(self.output_size), np.asarray(self.layer.dequantized())
            return
        num_rows, num_columns = self.weight_shape
        weight, size = as_weight(self.layer.weight.get_value()), max(1, _ELEMENTS_AT_ONCE // num_columns)
        for first in range(0, num_rows, size):
            ids = np.arange(first, min(first + size, num_rows), dtype=np.int32)
            yield ids, np.asarray(weight.lookup(jnp.asarray(ids), jnp.float32))


@dataclass(frozen=True)
class AdaptableExperts:
    """A layer of experts that requests can change.

    Attributes:
      layer: The layer.
      path: Dotted name, in the model, of what adds to it.
    """

    layer: JaxExperts
    path: str

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Features in and out of each projection."""
        hidden, own = self.layer.hidden_size, self.layer.intermediate_size
        return {name: (own, hidden) if name == "down_proj" else (hidden, own) for name in self.layer.stack_names}

    def add(self, num_places: int, max_rank: int, rows: StepRows, dtype: DTypeLike) -> None:
        """Gives the layer the tables of its changes."""
        self.layer.addition = ExpertsAddition(num_places, max_rank, self.layer.num_experts, self.sizes, rows, dtype)


class Adaptables(NamedTuple):
    """Layers that requests can change, by their names."""

    layers: dict[str, Adaptable]
    experts: dict[str, AdaptableExperts]

    def bytes_of_place(self, dtype: DTypeLike, max_rank: int) -> int:
        """Bytes of one adapter's matrices of these layers.

        Args:
          dtype: The type that the model computes in.
          max_rank: Of an adapter.
        """
        sizes = [layer.sizes for layer in self.layers.values()]
        elements = max_rank * sum(map(sum, sizes))
        for each in self.experts.values():
            elements += max_rank * each.layer.num_experts * sum(map(sum, each.sizes.values()))
        factors = sum(size_out for _, size_out in sizes)
        return elements * jnp.dtype(table_type(dtype)).itemsize + factors * jnp.dtype(jnp.float32).itemsize


def adaptable(model: JaxModule, targets: Sequence[str] | None = None) -> Adaptables:
    """The layers that these name, or all that requests can change.

    Args:
      model: The model; it may be one without weights.
      targets: Ends of names, and ALL_LINEAR.

    Raises:
      ConfigError: No layer has such a name.
    """
    found = Adaptables({}, {})
    missing, names = set(targets or ()) - {ALL_LINEAR}, checkpoint_names_of(model)
    for name, each in _every(model):
        named = {target for target in targets or () if _ends(name, target, names)}
        missing -= named
        if targets is None or named or (ALL_LINEAR in targets and not each.is_extra):
            found.layers[name] = each
    for name, layer in named_modules(model):
        if not isinstance(layer, JaxExperts) or name.startswith("draft."):
            continue
        named = {target for target in targets or () if _ends(name, target, names)}
        missing -= named
        if targets is None or named:
            found.experts[name] = AdaptableExperts(layer, f"{name}.addition")
    if missing:
        raise ConfigError(
            f"lora_target_modules: no layer that requests can change has a name that ends in {min(missing)!r}: give "
            "such names as q_proj, embed_tokens, lm_head, experts or all-linear"
        )
    return found


def _every(model: JaxModule) -> Iterator[tuple[str, Adaptable]]:
    tied = model.decoder.embed_tokens if isinstance(model, CausalLM) and model.lm_head is None else None
    for name, layer in named_modules(model):
        if not isinstance(layer, JaxLinear | JaxEmbed) or type(layer) not in _KINDS or name.startswith("draft."):
            continue
        if isinstance(layer.quant_method, ApplyingQuantMethod):
            continue
        sizes = layer.input_size, layer.output_size
        if isinstance(layer, JaxEmbed):  # whose sizes are those of a head
            yield name, Adaptable(layer, f"{name}.addition", True, False, sizes[1], sizes[0])
            if layer is tied:
                yield _HEAD_NAME, Adaptable(layer, f"{name}.head_addition", False, True, *sizes)
            continue
        attribute = "head_addition" if isinstance(layer, LatentUpProjection) else "addition"
        yield name, Adaptable(layer, f"{name}.{attribute}", False, isinstance(layer, JaxLmHead), *sizes)


def _ends(name: str, target: str, names: CheckpointNames) -> bool:
    """Whether a layer's name, here or in the checkpoint, ends in a target."""
    paths = [f".{each}" for each in (name, names.name_in_checkpoint(name))]
    return any(path.endswith((f".{target}", f".{names.name_here(target)}")) for path in paths)


def table_type(dtype: DTypeLike) -> DTypeLike:
    """The type of adapters' matrices beside a model that computes in some type: bfloat16 with bfloat16, or float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def place_bytes(model: JaxModule, dtype: DTypeLike, max_rank: int, targets: Sequence[str] = (ALL_LINEAR,)) -> int:
    """Bytes of one adapter's matrices beside a model, which may be one without weights."""
    return adaptable(model, targets).bytes_of_place(dtype, max_rank)
