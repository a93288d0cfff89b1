"""Adapters that are trained: which layers get them, how they begin, and PEFT's files of them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames, checkpoint_names_of
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.loading.safetensors_writer import write_tensors
from jaxis.lora.adapter import WEIGHTS_FILE
from jaxis.lora.peft_config import CONFIG_FILE
from jaxis.training.adapted_weight import AdaptedWeight
from jaxis.training.config import PeftParams
from jaxis.training.functional_model import Values

_A, _B = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True)
class AdaptedLayers:
    """The layers that get adapters.

    Attributes:
      params: How the user asked for them.
      sizes: Name of a layer here -> its features in and out.
      names: What checkpoints call them.
      modules: The modules of the checkpoint.
    """

    params: PeftParams
    sizes: Mapping[str, tuple[int, int]]
    names: CheckpointNames
    modules: Collection[str] = ()

    @property
    def scale(self) -> float:
        """Of the product of a layer's two matrices."""
        rank, alpha = self.params.lora_r, float(self.params.lora_alpha)
        return alpha / math.sqrt(rank) if self.params.use_rslora else alpha / rank

    def initial(self, seed: int) -> dict[str, jax.Array]:
        """The matrices at the start, as PEFT's: A uniform within 1 / sqrt(in), B zero; by layer and part."""
        trained: dict[str, jax.Array] = {}
        for number, (name, (size_in, size_out)) in enumerate(self.sizes.items()):
            key, bound = jax.random.fold_in(jax.random.key(seed), number), 1 / math.sqrt(size_in)
            shape = (self.params.lora_r, size_in)
            trained[f"{name}.{_A}"] = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
            trained[f"{name}.{_B}"] = jnp.zeros((size_out, self.params.lora_r), jnp.float32)
        return trained

    def matrices(self, name: str, trained: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """A [r, in] and B [out, r] of a layer."""
        return trained[f"{name}.{_A}"], trained[f"{name}.{_B}"]

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """The model's weights, with the adapters beside those of their layers."""
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
        """The weights with a key for what each adapter drops; without dropout, as they are."""
        if not self.params.lora_dropout:
            return values
        keyed = dict(values)
        for number, name in enumerate(f"{each}.weight" for each in self.sizes):
            if isinstance(weight := values[name], AdaptedWeight):
                keyed[name] = weight.with_key(jax.random.fold_in(key, number))
        return keyed

    def write(self, folder: Path, trained: Mapping[str, np.ndarray], base_model: str) -> None:
        """Writes the two files that PEFT reads.

        Args:
          folder: Where to.
          trained: The matrices.
          base_model: The model that they are for.
        """
        tensors = {}
        for name in sorted(self.sizes, key=self.names.name_in_checkpoint):
            for part in (_A, _B):
                theirs = f"base_model.model.{self.names.name_in_checkpoint(name)}.{part}"
                tensors[theirs] = np.asarray(trained[f"{name}.{part}"])
        write_tensors(folder / WEIGHTS_FILE, tensors)
        config = {
            "base_model_name_or_path": base_model,
            "bias": "none",
            "fan_in_fan_out": False,
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
        """Removes the two files again."""
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (folder / name).unlink()

    def _target_modules(self) -> list[str]:
        """Ends of the layers' names if those name nothing else, else whole names."""
        theirs = {self.names.name_in_checkpoint(name) for name in self.sizes}
        ends = {name.rpartition(".")[2] for name in theirs}
        if any(name.rpartition(".")[2] in ends for name in self.modules if name not in theirs):
            return sorted(theirs)
        return sorted(ends)


def choose_layers(model: JaxModule, params: PeftParams, modules: Collection[str]) -> AdaptedLayers:
    """The layers of a model that get adapters.

    Args:
      model: The model.
      params: Which layers are asked for.
      modules: Names of the checkpoint's modules, of which a layer is to be one: else PEFT could not find it.

    Raises:
      ConfigError: There is no such layer, or PEFT could not find one that was named.
    """
    names = checkpoint_names_of(model)
    layers = {
        name: layer
        for name, layer in {id(m): (n, m) for n, m in named_modules(model)}.values()
        if isinstance(layer, JaxLinear) and not name.startswith("draft.")
    }
    chosen: dict[str, tuple[int, int]] = {}
    for name, layer in layers.items():
        theirs = names.name_in_checkpoint(name)
        wanted = _is_named(theirs, params.targets) if params.targets else not isinstance(layer, JaxLmHead)
        if not wanted or _is_named(theirs, params.lora_exclude_modules):
            continue
        if theirs in modules:
            chosen[name] = (layer.input_size, layer.output_size)
        elif params.targets:
            raise ConfigError(
                f"peft.lora_target_modules names {theirs!r}, which the checkpoint has fused or otherwise, so that PEFT "
                "could not find it: leave it out"
            )
    for end in params.targets or ():
        if not any(_is_named(names.name_in_checkpoint(name), (end,)) for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ConfigError(f"peft.lora_target_modules has {end!r}, which no linear layer is called; known: {known}")
    if not chosen:
        raise ConfigError("peft.lora_target_modules and peft.lora_exclude_modules leave no layer to train")
    return AdaptedLayers(params, chosen, names, modules)


def _is_named(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
