"""The two kinds of what is trained: all weights of a model, or adapters beside them; each with either forward pass."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import JaxModule
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.lora.merged_checkpoint import write_merged
from jaxis.models.changed_checkpoint import write_changed
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.interfaces import has_tied_head
from jaxis.models.registry import model_class_of
from jaxis.models.tied_tables import Tables
from jaxis.training.adapters import AdaptedLayers, choose_layers
from jaxis.training.base_model import BaseModel
from jaxis.training.config import ROUTER_KEYS, TrainConfig
from jaxis.training.forward_pass import ForwardPass, forward_pass_of
from jaxis.training.functional_model import FunctionalModel, Values, is_float, values_of
from jaxis.training.scores import Forward, make_forward
from jaxis.training.sharding import Placement, Specs
from jaxis.training.step import Trained
from jaxis.training.tensor_places import find_places


class Trainable(ABC):
    """A model with its trained and frozen arrays.

    Attributes:
      frozen: Arrays that are not trained. If the objective needs a reference, also the weights before training, under
        the names of those that are trained; then a teacher's, and the engine's packed copy of trained weights.
      initial: Trained arrays at the start, float32; none once training has begun.
      placement: Placement of both on devices.
      logical_axes: Logical axes of the weights among them, by name.
    """

    frozen: Values
    initial: Trained
    placement: Placement
    logical_axes: Mapping[str, tuple[str | None, ...]]
    _pass: ForwardPass
    _head_is_frozen: bool = False

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._config, self._base = config, base

    @abstractmethod
    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the values of the model's parameters."""

    @abstractmethod
    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        """Writes the finished model into an empty folder."""

    def refresh_frozen(self, trained: Mapping[str, jax.Array]) -> None:
        """Updates the values in `frozen` that are derived from `trained`: the engine's packed copy of the weights.

        Called whenever trained weights are others. Does nothing without the engine, or for adapters.
        """
        self.frozen = {**self.frozen, **self._pass.packed(trained)}

    def forward(self, *, is_training: bool) -> Forward:
        """Returns the forward pass: for training (with dropout and recomputation as configured), or as served."""
        has_experts = self._pass.model.has_experts
        return make_forward(
            self._pass.model,
            lambda values, key: self._pass.bind(self._dropping(values, key) if is_training else values),
            recompute=is_training and self._config.training.recomputes_layers,
            observes_routers=is_training and has_experts and router_coefficient(self._config, self._base) > 0,
            head_is_frozen=is_training and self._head_is_frozen,
            scratch=self._pass.scratch,
        )

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        """Returns the model with these trained arrays. It shares them and is valid while they exist."""
        return self._pass.bind(self.placement.devices.on_one(self._served(trained)))

    def _served(self, trained: Mapping[str, jax.Array]) -> Values:
        return self.combine(trained, self.frozen)

    def _dropping(self, values: Values, key: jax.Array) -> Values:
        """Returns the values from `combine` with what dropout needs; `key` is the random key of a batch row."""
        del key
        return values

    def _place(self) -> None:
        """Puts the arrays on the devices."""
        devices = self._base.devices

        def specs(values: Values) -> Specs:
            return devices.specs(values, self.logical_axes)

        self.placement = Placement(devices, specs(self.initial), specs(self.frozen))
        self.initial = devices.put(self.initial, self.placement.trained)
        self.frozen = devices.put(self.frozen, self.placement.frozen)


def make_trainable(config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> Trainable:
    """Loads the model. Raises ConfigError if it cannot be trained, and CheckpointError if weights cannot be read."""
    kind = Adapters if config.training.use_peft else AllWeights
    return kind(config, base, forward_pass_of(config), progress)


class AllWeights(Trainable):
    """All float parameters of a model."""

    def __init__(
        self, config: TrainConfig, base: BaseModel, forward_pass: type[ForwardPass], progress: ProgressDisplay
    ) -> None:
        super().__init__(config, base)
        # A configured quantization is the engine's, which packs float weights by it.
        loaded = dataclasses.replace(base, quantization=None) if forward_pass.is_packed else base
        is_random = not config.model.load_pretrained_weights
        model = loaded.load(jnp.float32, progress, random=is_random, seed=config.training.seed)
        values = values_of(model)
        if quantized := [name for name, value in values.items() if not isinstance(value, jax.Array)]:
            raise ConfigError(
                f"{base.name} has quantized weights, such as {quantized[0]}: set training.use_peft to train adapters"
            )
        if gguf_file(base.path) is not None:
            raise ConfigError(f"{base.name} is a GGUF file: set training.use_peft, or jaxis convert it first")
        with open_checkpoint(base.path) as checkpoint:
            shapes = {name: tuple(checkpoint.info(name).shape) for name in checkpoint.names()}
            read = None if is_random else checkpoint.tensor
            self.places = find_places(model, lambda: base.construct(jnp.float32), shapes, base.name, read)
        self._names, self._is_tied = checkpoint_names_of(model), has_tied_head(model)
        self.logical_axes = FunctionalModel(model).logical_axes
        del model
        self.initial = {name: value for name, value in values.items() if is_float(value)}
        self.frozen = {name: value for name, value in values.items() if not is_float(value)}
        dtype = base.compute_dtype
        self._pass = forward_pass(base.construct(dtype, packed=forward_pass.is_packed), dtype)
        if config.training.has_reference:
            copies = {name: jnp.array(value, copy=True) for name, value in self.initial.items()}
            self.frozen = self._pass.served(copies, {**self.frozen, **self._pass.packed(copies)})
        self.refresh_frozen(self.initial)
        self._place()

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._pass.with_weights(trained, frozen)

    def _served(self, trained: Mapping[str, jax.Array]) -> Values:
        return self._pass.served(trained, self.frozen)

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        def changed(name: str, tensor: np.ndarray) -> np.ndarray:
            value = self.places.tensor_of(name, trained)
            return tensor if value is None else value.astype(tensor.dtype)

        tables = Tables(self._base.hf_config)
        write_changed(self._base.path, folder, changed, self._names, tables, is_tied=self._is_tied)


class Adapters(Trainable):
    """Adapters beside frozen weights."""

    def __init__(
        self, config: TrainConfig, base: BaseModel, forward_pass: type[ForwardPass], progress: ProgressDisplay
    ) -> None:
        super().__init__(config, base)
        is_random, dtype = not config.model.load_pretrained_weights, base.compute_dtype
        model = base.load(dtype, progress, random=is_random, seed=config.training.seed, packed=forward_pass.is_packed)
        with open_checkpoint(base.path) as checkpoint:
            modules = {name.rpartition(".")[0] for name in checkpoint.names()}
        self._layers: AdaptedLayers = choose_layers(model, config.peft, modules)
        self._head_is_frozen = isinstance(model, CausalLM) and not self._layers.changes_head
        self._merges = config.peft.peft_save_mode == "merged"
        if self._merges and gguf_file(base.path) is not None:
            raise ConfigError("peft.peft_save_mode='merged' cannot be honoured for a GGUF file: give adapter_only")
        self.frozen = values_of(model)
        self.initial = self._layers.initial(config.training.seed)
        self._pass = forward_pass(model, dtype, self._layers)
        self.logical_axes = self._pass.model.logical_axes
        self._place()

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._pass.with_adapters(trained, frozen)

    def _dropping(self, values: Values, key: jax.Array) -> Values:
        return self._layers.with_keys(values, key)

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        self._layers.write(folder, trained, self._config.model.model_name or "")
        if self._merges:
            write_merged(self._base.path, folder, folder)
            self._layers.remove(folder)


def router_coefficient(config: TrainConfig, base: BaseModel) -> float:
    """Returns the factor of the routers' load-balancing loss; 0: no such loss.

    As in transformers, the loss is used if config.json, or `model.model_kwargs`, sets `output_router_logits`. Raises
    ConfigError if the model's family has no such loss.
    """
    asked = {name: value for name, value in config.model.model_kwargs.items() if name in ROUTER_KEYS}
    text_config = base.hf_config.get_text_config()
    default = getattr(model_class_of(base.hf_config), "router_aux_loss_coef", None)
    if default is None:
        if asked:
            raise ConfigError(
                f"model.model_kwargs.{min(asked)} cannot be honoured: {base.name} has no loss that balances routers; "
                "leave it out"
            )
        return 0.0
    if not asked.get("output_router_logits", text_config.get("output_router_logits", False)):
        return 0.0
    return float(asked.get("router_aux_loss_coef", text_config.get("router_aux_loss_coef", default)) or 0.0)
