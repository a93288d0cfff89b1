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
from jaxis.models.common.interfaces import DRAFT_PREFIX

ALL_LINEAR = "all-linear"
"""Default target: all adaptable layers except embeddings, heads and experts, whose adapter matrices are large."""
_HEAD_NAME = "lm_head"
# Layers that are called with each token of a step, in order. Other layers see some rows only. Heads are included: they
# get the adapter places of the rows that they see.
_KINDS = (JaxLinear, JaxRouter, LatentUpProjection, JaxEmbed, JaxLmHead)
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Adaptable:
    """A layer that adapters of requests can change, and the sizes of their matrices.

    Attributes:
      layer: The layer. For a head that is tied to the embeddings, the embedding layer.
      path: Dotted name, in the model, of the module with the adapters' tables.
      is_embedding: True if the layer looks up rows.
      is_head: True if the layer computes logits.
      input_size: Size of the input; V for an embedding.
      output_size: Size of the output.
    """

    layer: JaxLinear | JaxEmbed
    path: str
    is_embedding: bool
    is_head: bool
    input_size: int
    output_size: int

    @property
    def sizes(self) -> tuple[int, int]:
        return self.input_size, self.output_size

    @property
    def is_extra(self) -> bool:
        """True if ALL_LINEAR leaves the layer out."""
        return self.is_embedding or self.is_head

    @property
    def has_moved_rows(self) -> bool:
        return isinstance(self.layer, JaxLinear) and self.layer.has_moved_rows

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the layer's weight in a checkpoint."""
        return self.layer.output_size, self.layer.input_size

    def add(
        self, num_places: int, max_rank: int, rows: StepRows, dtype: DTypeLike
    ) -> LowRankAddition | LookupAddition | HeadwiseAddition:
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
        """Yields rows of the weight as it is served, in pieces: their indices, and float32 [n, in]."""
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
    """A layer of experts that adapters of requests can change; `path` is as in `Adaptable`."""

    layer: JaxExperts
    path: str

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        hidden, own = self.layer.hidden_size, self.layer.intermediate_size
        return {name: (own, hidden) if name == "down_proj" else (hidden, own) for name in self.layer.stack_names}

    def add(self, num_places: int, max_rank: int, rows: StepRows, dtype: DTypeLike) -> None:
        self.layer.addition = ExpertsAddition(num_places, max_rank, self.layer.num_experts, self.sizes, rows, dtype)


class Adaptables(NamedTuple):
    """Layers that adapters of requests can change, by name."""

    layers: dict[str, Adaptable]
    experts: dict[str, AdaptableExperts]

    def bytes_of_place(self, dtype: DTypeLike, max_rank: int) -> int:
        """Returns the bytes of one adapter's matrices, for the model's compute type and the largest rank."""
        sizes = [layer.sizes for layer in self.layers.values()]
        elements = max_rank * sum(map(sum, sizes))
        for each in self.experts.values():
            elements += max_rank * each.layer.num_experts * sum(map(sum, each.sizes.values()))
        factors = sum(size_out for _, size_out in sizes)
        return elements * jnp.dtype(table_type(dtype)).itemsize + factors * jnp.dtype(jnp.float32).itemsize


def adaptable(model: JaxModule, targets: Sequence[str] | None = None) -> Adaptables:
    """Finds the layers that the targets name (last parts of names, ALL_LINEAR), or all that adapters can change.

    Raises ConfigError if a target matches no layer.
    """
    found = Adaptables({}, {})
    missing, names = set(targets or ()) - {ALL_LINEAR}, checkpoint_names_of(model)
    for name, each in _every(model):
        named = {target for target in targets or () if _ends(name, target, names)}
        missing -= named
        if targets is None or named or (ALL_LINEAR in targets and not each.is_extra):
            found.layers[name] = each
    for name, layer in named_modules(model):
        if not isinstance(layer, JaxExperts) or name.startswith(DRAFT_PREFIX):
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
        if not isinstance(layer, JaxLinear | JaxEmbed) or type(layer) not in _KINDS or name.startswith(DRAFT_PREFIX):
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
    """Returns whether a layer's name, in jaxis or in the checkpoint, ends in a target."""
    paths = [f".{each}" for each in (name, names.name_in_checkpoint(name))]
    return any(path.endswith((f".{target}", f".{names.name_here(target)}")) for path in paths)


def table_type(dtype: DTypeLike) -> DTypeLike:
    """Returns the type of adapter matrices for a compute type: bfloat16 for bfloat16, otherwise float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def place_bytes(model: JaxModule, dtype: DTypeLike, max_rank: int, targets: Sequence[str] = (ALL_LINEAR,)) -> int:
    """Returns the bytes of one adapter's matrices for a model, with or without weights."""
    return adaptable(model, targets).bytes_of_place(dtype, max_rank)
