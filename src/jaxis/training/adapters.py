"""Adapters in training: the choice of layers, the initial matrices, their products, and PEFT's files."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels.weights import Allocate, Weight, WeightValue, as_weight, dequantize, matmul
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.routing import JaxRouter
from jaxis.loading.safetensors_writer import write_tensors
from jaxis.lora.adapter import WEIGHTS_FILE
from jaxis.lora.peft_config import CONFIG_FILE
from jaxis.models.common.interfaces import DRAFT_PREFIX
from jaxis.training.config import PeftParams
from jaxis.training.functional_model import Values

_A, _B = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True)
class AdaptedLayers:
    """The layers that get adapters.

    Attributes:
      sizes: Input and output size of each adapted layer, by its name in jaxis.
      theirs: PEFT's name of each adapted layer, by its name in jaxis.
      others: PEFT's names of all other modules.
      is_transposed: True if PEFT's model stores these layers' weights as [in, out].
      changes_head: True if the output head gets an adapter.
    """

    params: PeftParams
    sizes: Mapping[str, tuple[int, int]]
    theirs: Mapping[str, str]
    others: Collection[str]
    is_transposed: bool
    changes_head: bool

    @property
    def scale(self) -> float:
        """Factor of the product of a layer's two matrices."""
        rank, alpha = self.params.lora_r, float(self.params.lora_alpha)
        return alpha / math.sqrt(rank) if self.params.use_rslora else alpha / rank

    def initial(self, seed: int) -> dict[str, jax.Array]:
        """Returns initial matrices, as PEFT's: A uniform within 1 / sqrt(in), B zero. Names are `layer.part`."""
        trained: dict[str, jax.Array] = {}
        for number, (name, (size_in, size_out)) in enumerate(self.sizes.items()):
            key, bound = jax.random.fold_in(jax.random.key(seed), number), 1 / math.sqrt(size_in)
            shape = (self.params.lora_r, size_in)
            trained[f"{name}.{_A}"] = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
            trained[f"{name}.{_B}"] = jnp.zeros((size_out, self.params.lora_r), jnp.float32)
        return trained

    def matrices(self, name: str, trained: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns a layer's A [r, in] and B [out, r]."""
        return trained[f"{name}.{_A}"], trained[f"{name}.{_B}"]

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the model's weights, with an `AdaptedWeight` for each adapted layer."""
        adapted = {
            f"{name}.weight": AdaptedWeight(
                frozen[f"{name}.weight"],
                *self.matrices(name, trained),
                self.scale,
                float(self.params.lora_dropout),
            )
            for name in self.sizes
        }
        return {**frozen, **adapted}

    def with_keys(self, values: Values, key: jax.Array) -> Values:
        """Returns the weights with a dropout key in each adapted layer; unchanged if there is no dropout."""
        if not self.params.lora_dropout:
            return values
        keyed = dict(values)
        for number, name in enumerate(f"{each}.weight" for each in self.sizes):
            if isinstance(weight := values[name], AdaptedWeight):
                keyed[name] = weight.with_key(jax.random.fold_in(key, number))
        return keyed

    def write(self, folder: Path, trained: Mapping[str, np.ndarray], base_model: str) -> None:
        """Writes the two files that PEFT reads, for adapters of the model `base_model`."""
        tensors = {}
        for name in sorted(self.sizes, key=self.theirs.__getitem__):
            for part in (_A, _B):
                tensors[f"base_model.model.{self.theirs[name]}.{part}"] = np.asarray(trained[f"{name}.{part}"])
        write_tensors(folder / WEIGHTS_FILE, tensors)
        config = {
            "base_model_name_or_path": base_model,
            "bias": "none",
            "fan_in_fan_out": self.is_transposed,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": self.params.lora_alpha,
            "lora_dropout": self.params.lora_dropout,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.params.lora_r,
            "target_modules": self._target_modules(),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": self.params.use_rslora,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def remove(self, folder: Path) -> None:
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (folder / name).unlink()

    def _target_modules(self) -> list[str]:
        """Returns the last parts of the layers' names if they match no other module; otherwise the whole names."""
        names = sorted(self.theirs.values())
        ends = {name.rpartition(".")[2] for name in names}
        return names if any(name.rpartition(".")[2] in ends for name in self.others) else sorted(ends)


def choose_layers(model: JaxModule, params: PeftParams, modules: Collection[str]) -> AdaptedLayers:
    """Chooses the layers of a model that get adapters.

    PEFT can only find layers among the checkpoint's `modules`. Raises ConfigError if no layer is chosen, or PEFT could
    not find a layer that the user named.
    """
    names = checkpoint_names_of(model)
    known_as = {names.name_here(module): module for module in modules}
    layers = {
        name: layer
        for name, layer in {id(m): (n, m) for n, m in named_modules(model)}.values()
        if isinstance(layer, JaxLinear) and not name.startswith(DRAFT_PREFIX)
    }
    # A merged model is written without PEFT.
    unadaptable = () if params.peft_save_mode == "merged" else names.unadaptable
    sizes: dict[str, tuple[int, int]] = {}
    found: dict[str, str] = {}
    for name, layer in layers.items():
        theirs = names.name_in_checkpoint(name)
        if theirs not in modules:
            theirs = known_as.get(name, theirs)
        found[name] = theirs
        # For PEFT, a router is no linear layer: it is adapted only if the user names it.
        wanted = _is_named(theirs, params.targets) if params.targets else not isinstance(layer, JaxLmHead | JaxRouter)
        if not wanted or _is_named(theirs, params.lora_exclude_modules):
            continue
        if theirs in modules and not _is_named(theirs, unadaptable):
            sizes[name] = (layer.input_size, layer.output_size)
        elif params.targets:
            what = "PEFT cannot adapt in transformers' model: leave it out, or give peft.peft_save_mode=merged"
            if theirs not in modules:
                what = "the checkpoint has fused or otherwise, so that PEFT could not find it: leave it out"
            raise ConfigError(f"peft.lora_target_modules names {theirs!r}, which {what}")
    for end in params.targets or ():
        if not any(_is_named(theirs, (end,)) for theirs in found.values()):
            known = ", ".join(sorted({theirs.rpartition(".")[2] for theirs in found.values()}))
            raise ConfigError(f"peft.lora_target_modules has {end!r}, which no linear layer is called; known: {known}")
    if not sizes:
        raise ConfigError("peft.lora_target_modules and peft.lora_exclude_modules leave no layer to train")
    theirs = {name: names.name_of_module(found[name]) for name in sizes}
    others = _others(map(names.name_of_module, modules), theirs)
    changes_head = any(isinstance(layers[name], JaxLmHead) for name in sizes)
    return AdaptedLayers(params, sizes, theirs, others, bool(names.transposed), changes_head)


def _others(modules: Iterable[str], chosen: Mapping[str, str]) -> set[str]:
    parts = {module[: match.start()] for module in modules for match in re.finditer(r"\.|$", module)}
    return parts - set(chosen.values())


def _is_named(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight(Weight):
    """A frozen weight [out, in] with a trained change, `base + scale * b a` (LoRA, arXiv:2106.09685).

    Attributes:
      base: Frozen weight [out, in], in any format.
      a: float32 [r, in].
      b: float32 [out, r].
      dropout: Share of the input's elements that are zeroed before `a`; the others are scaled up.
      key: Random key of the dropout; None: no dropout.
    """

    base: WeightValue
    a: jax.Array
    b: jax.Array
    scale: float = field(metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})
    key: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return as_weight(self.base).shape

    @property
    def storage(self) -> str:
        return as_weight(self.base).storage

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        seen = x.astype(jnp.float32)
        if self.key is not None and self.dropout:
            kept = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
            seen = jnp.where(kept, seen / (1 - self.dropout), 0.0)
        [change] = _changes_of([self], seen)
        return self._changed_by(x, change, preferred_element_type)

    def fused_matmul(
        self,
        x: jax.Array,
        weights: Sequence[AdaptedWeight],
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> list[jax.Array] | None:
        if addends or factors or any(weight.key is not None and weight.dropout for weight in weights):
            return None
        changes = _changes_of(weights, x.astype(jnp.float32))
        return [weight._changed_by(x, change, None) for weight, change in zip(weights, changes, strict=True)]

    def _changed_by(self, x: jax.Array, change: jax.Array, dtype: DTypeLike | None) -> jax.Array:
        y = matmul(x, self.base, preferred_element_type=jnp.float32)
        return (y + change).astype(dtype or x.dtype)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        base = dequantize(self.base, jnp.float32)
        return (base + self.scale * (self.b @ self.a)).astype(dtype)

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> None:
        """Returns None: the native kernels have no derivatives."""
        del dtype, allocate

    def with_key(self, key: jax.Array) -> AdaptedWeight:
        return dataclasses.replace(self, key=key)


def _changes_of(weights: Sequence[AdaptedWeight], x: jax.Array) -> list[jax.Array]:
    changes: Any = _changes(tuple(each.scale for each in weights), x, [w.a for w in weights], [w.b for w in weights])
    return changes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _changes(
    scales: tuple[float, ...], x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array]
) -> list[jax.Array]:
    """Multiplies x [..., in] by several pairs of low-rank matrices: one float32 [..., out] for each pair.

    JAX's own derivatives transpose the large cotangents of the products, which takes longer than the products.
    """
    return _forward(scales, x, a, b)[0]


_Kept = tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array], list[jax.Array]]


def _forward(
    scales: tuple[float, ...], x: jax.Array, a: Sequence[jax.Array], b: Sequence[jax.Array]
) -> tuple[list[jax.Array], _Kept]:
    # One product with all of them: each by itself is too thin for matrix kernels.
    hidden = jnp.split(jnp.einsum("...i,ri->...r", x, jnp.concatenate(a)), _ends(a), axis=-1)
    hidden = [scale * each for scale, each in zip(scales, hidden, strict=True)]
    changes = [jnp.einsum("...r,or->...o", each, matrix) for each, matrix in zip(hidden, b, strict=True)]
    return changes, (x, a, b, hidden)


def _backward(
    scales: tuple[float, ...], kept: _Kept, cotangents: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    x, a, b, hidden = kept
    of_b = [jnp.einsum("...r,...o->ro", each, dy).T for each, dy in zip(hidden, cotangents, strict=True)]
    of_hidden = jnp.concatenate(
        [scale * jnp.einsum("...o,or->...r", dy, each) for scale, dy, each in zip(scales, cotangents, b, strict=True)],
        axis=-1,
    )
    of_a = jnp.split(jnp.einsum("...r,...i->ri", of_hidden, x), _ends(a))
    return jnp.einsum("...r,ri->...i", of_hidden, jnp.concatenate(a)), of_a, of_b


def _ends(a: Sequence[jax.Array]) -> list[int]:
    return np.cumsum([len(each) for each in a])[:-1].tolist()


_changes.defvjp(_forward, _backward)
