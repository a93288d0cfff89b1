"""The trained part of a model: all of its weights, or adapters beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

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
from jaxis.training.config import DPO, ENGINE, ROUTER_KEYS, TrainConfig
from jaxis.training.engine_forward import EngineAdapters, EngineWeights, check_engine_forward
from jaxis.training.export import replaced_by
from jaxis.training.functional_model import FunctionalModel, Values, cast_floats, is_float, values_of
from jaxis.training.objectives import Forward, make_forward
from jaxis.training.sharding import Devices, Placement
from jaxis.training.step import Trained
from jaxis.training.tensor_places import find_places


class Trainable(Protocol):
    """A model with its trained and frozen arrays.

    Attributes:
      frozen: Arrays that are not trained; if the objective needs them, also the trained weights before training.
      initial: Trained arrays at the start, float32.
      placement: Placement of both on devices.
      logical_axes: Logical axes of the weights among them, by name.
    """

    frozen: Values
    initial: Trained
    placement: Placement
    logical_axes: Mapping[str, tuple[str | None, ...]]

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """Returns the values of the model's parameters."""
        ...

    def refresh_frozen(self, trained: Mapping[str, jax.Array]) -> None:
        """Updates the values in `frozen` that are derived from `trained`: the engine's packed copy of the weights.

        Called once before the first step and after every step. Does nothing without the engine.
        """
        ...

    def forward(self, *, is_training: bool) -> Forward:
        """Returns the forward pass: for training (with dropout and recomputation as configured), or as served."""
        ...

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        """Returns the model with these trained arrays. It shares them and is valid while they exist."""
        ...

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        """Writes the finished model into an empty folder."""
        ...


def make_trainable(config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> Trainable:
    """Loads the model. Raises ConfigError if it cannot be trained, and CheckpointError if weights cannot be read."""
    if config.training.forward_pass == ENGINE:
        check_engine_forward(config)
        return (_AdaptersInEngine if config.training.use_peft else _AllWeightsInEngine)(config, base, progress)
    return (_Adapters if config.training.use_peft else _AllWeights)(config, base, progress)


class _AllWeights:
    """All float parameters, in plain JAX."""

    def __init__(self, config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> None:
        self._config, self._base = config, base
        model = self._floats().load(
            jnp.float32, progress, random=not config.model.load_pretrained_weights, seed=config.training.seed
        )
        values = values_of(model)
        if quantized := [name for name, value in values.items() if not isinstance(value, jax.Array)]:
            raise ConfigError(
                f"{base.name} has quantized weights, such as {quantized[0]}: set training.use_peft to train adapters"
            )
        if gguf_file(base.path) is not None:
            raise ConfigError(f"{base.name} is a GGUF file: set training.use_peft, or jaxis convert it first")
        with open_checkpoint(base.path) as checkpoint:
            shapes = {name: tuple(checkpoint.info(name).shape) for name in checkpoint.names()}
            read = checkpoint.tensor if config.model.load_pretrained_weights else None
            self.places = find_places(model, lambda: base.construct(jnp.float32), shapes, base.name, read)
        self._names, self._is_tied = checkpoint_names_of(model), has_tied_head(model)
        self.initial = {name: value for name, value in values.items() if is_float(value)}
        self.frozen: Values = {name: value for name, value in values.items() if not is_float(value)}
        self.logical_axes = self._prepare(model)
        self.placement = _placement(self.initial, self.frozen, base.devices, self.logical_axes)
        self.initial = base.devices.put(self.initial, self.placement.trained)
        self.frozen = base.devices.put(self.frozen, self.placement.frozen)

    def _floats(self) -> BaseModel:
        return self._base

    def _prepare(self, model: JaxModule) -> Mapping[str, tuple[str | None, ...]]:
        """Prepares the forward pass; returns the logical axes of the weights."""
        dtype = self._base.compute_dtype
        if self._config.training.trainer_type == DPO:
            copies = {name: jnp.array(value, copy=True) for name, value in self.initial.items()}
            self.frozen = {**self.frozen, **cast_floats(copies, dtype)}
        self._model = FunctionalModel(model if dtype == jnp.float32 else self._base.construct(dtype))
        self._observes_routers = self._model.has_experts and router_coefficient(self._config, self._base) > 0
        return self._model.logical_axes

    def refresh_frozen(self, trained: Mapping[str, jax.Array]) -> None:
        """Does nothing: no frozen value depends on trained ones."""

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return {**frozen, **cast_floats(trained, self._base.compute_dtype)}

    def forward(self, *, is_training: bool) -> Forward:
        return make_forward(
            self._model,
            lambda values, _: self._model.bind(values),
            recompute=is_training and self._config.training.enable_gradient_checkpointing,
            observes_routers=is_training and self._observes_routers,
        )

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._model.bind(self.placement.devices.on_one(self.combine(trained, self.frozen)))

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        change, tables = replaced_by(self.places, trained), Tables(self._base.hf_config)
        write_changed(self._base.path, folder, change, self._names, tables, is_tied=self._is_tied)


class _AllWeightsInEngine(_AllWeights):
    """All float parameters, beside the engine's packed copy of them."""

    frozen: Values

    def _floats(self) -> BaseModel:
        # A configured quantization is the engine's.
        return dataclasses.replace(self._base, quantization=None)

    def _prepare(self, model: JaxModule) -> Mapping[str, tuple[str | None, ...]]:
        logical_axes = FunctionalModel(model).logical_axes
        del model
        dtype = self._base.compute_dtype
        self._engine_model = EngineWeights(self._base.construct(dtype, packed=True), dtype)
        self._observes_routers = self._engine_model.has_experts and router_coefficient(self._config, self._base) > 0
        if self._config.training.trainer_type == DPO:
            copies = {name: jnp.array(value, copy=True) for name, value in self.initial.items()}
            self.frozen = {**self.frozen, **self._engine_model.served(copies, self._engine_model.packed(copies))}
        self.refresh_frozen(self.initial)
        return logical_axes

    def refresh_frozen(self, trained: Mapping[str, jax.Array]) -> None:
        self.frozen = {**self.frozen, **self._engine_model.packed(trained)}

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._engine_model.combine(trained, frozen)

    def forward(self, *, is_training: bool) -> Forward:
        return self._engine_model.forward(
            recompute=is_training and self._config.training.enable_gradient_checkpointing,
            observes_routers=is_training and self._observes_routers,
        )

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._engine_model.bind(self._engine_model.served(trained, self.frozen))


class _Adapters:
    """Adapters beside frozen weights, in plain JAX."""

    is_packed = False

    def __init__(self, config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> None:
        self._config, self._base = config, base
        is_random = not config.model.load_pretrained_weights
        model = base.load(
            base.compute_dtype, progress, random=is_random, seed=config.training.seed, packed=self.is_packed
        )
        with open_checkpoint(base.path) as checkpoint:
            modules = {name.rpartition(".")[0] for name in checkpoint.names()}
        self._layers: AdaptedLayers = choose_layers(model, config.peft, modules)
        # A reference needs no derivatives, which would be computed along with its log-probabilities.
        self._head_is_frozen = (
            isinstance(model, CausalLM) and not self._layers.changes_head and config.training.trainer_type != DPO
        )
        self._merges = config.peft.peft_save_mode == "merged"
        if self._merges and gguf_file(base.path) is not None:
            raise ConfigError("peft.peft_save_mode='merged' cannot be honoured for a GGUF file: give adapter_only")
        self.frozen: Values = values_of(model)
        self.initial = self._layers.initial(config.training.seed)
        self.logical_axes = self._prepare(model)
        self.placement = _placement(self.initial, self.frozen, base.devices, self.logical_axes)
        self.initial = base.devices.put(self.initial, self.placement.trained)
        self.frozen = base.devices.put(self.frozen, self.placement.frozen)

    def _prepare(self, model: JaxModule) -> Mapping[str, tuple[str | None, ...]]:
        self._model = FunctionalModel(model)
        self._observes_routers = self._model.has_experts and router_coefficient(self._config, self._base) > 0
        return self._model.logical_axes

    def refresh_frozen(self, trained: Mapping[str, jax.Array]) -> None:
        """Does nothing: no frozen value depends on trained ones."""

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._layers.combine(trained, frozen)

    def forward(self, *, is_training: bool) -> Forward:
        def bound(values: Values, key: jax.Array) -> JaxModule:
            return self._model.bind(self._layers.with_keys(values, key) if is_training else values)

        return make_forward(
            self._model,
            bound,
            recompute=is_training and self._config.training.enable_gradient_checkpointing,
            observes_routers=is_training and self._observes_routers,
            head_is_frozen=is_training and self._head_is_frozen,
        )

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._model.bind(self.placement.devices.on_one(self.combine(trained, self.frozen)))

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        self._layers.write(folder, trained, self._config.model.model_name or "")
        if self._merges:
            write_merged(self._base.path, folder, folder)
            self._layers.remove(folder)


class _AdaptersInEngine(_Adapters):
    """Adapters beside frozen weights, as the engine computes them."""

    is_packed = True

    def _prepare(self, model: JaxModule) -> Mapping[str, tuple[str | None, ...]]:
        self._engine_model = EngineAdapters(model, self._layers, self._base.compute_dtype)
        self._observes_routers = self._engine_model.has_experts and router_coefficient(self._config, self._base) > 0
        return {}

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._engine_model.combine(trained, frozen)

    def forward(self, *, is_training: bool) -> Forward:
        return self._engine_model.forward(
            recompute=is_training and self._config.training.enable_gradient_checkpointing,
            observes_routers=is_training and self._observes_routers,
            head_is_frozen=is_training and self._head_is_frozen,
        )

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._engine_model.bind(self.combine(trained, self.frozen))


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


def _placement(
    initial: Trained, frozen: Values, devices: Devices, logical: Mapping[str, tuple[str | None, ...]]
) -> Placement:
    return Placement(devices, devices.axes(initial, logical), devices.axes(frozen, logical))
