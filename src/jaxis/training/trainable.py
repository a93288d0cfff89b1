"""What of a model is trained: all of its weights, or adapters beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.checkpoint_names import CheckpointNames, checkpoint_names_of
from jaxis.layers.module import JaxModule
from jaxis.loading.gguf.shards import gguf_file
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.training.adapters import AdaptedLayers, choose_layers
from jaxis.training.base_model import BaseModel
from jaxis.training.config import DPO, ENGINE, TrainConfig
from jaxis.training.engine_forward import EngineAdapters, check_engine_forward
from jaxis.training.export import merged_with, replaced_by, write_model
from jaxis.training.functional_model import FunctionalModel, Values, cast_floats, is_float, values_of
from jaxis.training.objectives import Forward, batch_logprobs
from jaxis.training.step import Trained
from jaxis.training.tensor_places import find_places


class Trainable(Protocol):
    """A model and what of it is trained.

    Attributes:
      frozen: What is not, and the rest as it was before training if the objective needs it.
      initial: What is trained, at the start: float32.
    """

    frozen: Values
    initial: Trained

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        """What the model's parameters hold."""
        ...

    def forward(self, *, is_training: bool) -> Forward:
        """The model: with dropout and with layers computed again as asked for, or as it is served."""
        ...

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        """The model with what is trained, for as long as those arrays are there."""
        ...

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        """Writes the finished model into an empty folder."""
        ...


def make_trainable(config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> Trainable:
    """Loads the model.

    Raises:
      ConfigError: What is asked for cannot be trained.
      CheckpointError: The weights cannot be read.
    """
    if config.training.forward_pass == ENGINE:
        check_engine_forward(config)
        return _AdaptersInEngine(config, base, progress)
    return (_Adapters if config.training.use_peft else _AllWeights)(config, base, progress)


class _AllWeights:
    """All float parameters; see `Trainable`."""

    def __init__(self, config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> None:
        self._config, self._base = config, base
        model = base.load(
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
        self._is_tied = getattr(model, "lm_head", None) is None
        self.initial = {name: value for name, value in values.items() if is_float(value)}
        self.frozen: Values = {name: value for name, value in values.items() if not is_float(value)}
        if config.training.trainer_type == DPO:
            copies = {name: jnp.array(value, copy=True) for name, value in self.initial.items()}
            self.frozen = {**self.frozen, **cast_floats(copies, base.compute_dtype)}
        is_same = base.compute_dtype == jnp.float32
        self._model = FunctionalModel(model if is_same else base.construct(base.compute_dtype))

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return {**frozen, **cast_floats(trained, self._base.compute_dtype)}

    def forward(self, *, is_training: bool) -> Forward:
        recompute = is_training and self._config.training.enable_gradient_checkpointing
        return batch_logprobs(
            lambda values, _: self._model.bind(values), recompute=recompute, row_by_row=self._model.has_experts
        )

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._model.bind(self.combine(trained, self.frozen))

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        write_model(self._base.path, folder, replaced_by(self.places, trained), is_tied=self._is_tied)


class _Adapters:
    """Adapters beside frozen weights, in plain JAX; see `Trainable`."""

    is_packed = False

    def __init__(self, config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> None:
        self._config, self._base = config, base
        is_random = not config.model.load_pretrained_weights
        model = base.load(
            base.compute_dtype, progress, random=is_random, seed=config.training.seed, packed=self.is_packed
        )
        with open_checkpoint(base.path) as checkpoint:
            modules = {name.rpartition(".")[0] for name in checkpoint.names()}
        self._names: CheckpointNames = checkpoint_names_of(model)
        self._is_tied = getattr(model, "lm_head", None) is None
        self._layers: AdaptedLayers = choose_layers(model, config.peft, modules)
        self._merges = config.peft.peft_save_mode == "merged"
        if self._merges and gguf_file(base.path) is not None:
            raise ConfigError("peft.peft_save_mode='merged' cannot be honoured for a GGUF file: give adapter_only")
        self.frozen: Values = values_of(model)
        self.initial = self._layers.initial(config.training.seed)
        self._prepare(model)

    def _prepare(self, model: JaxModule) -> None:
        self._model = FunctionalModel(model)

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._layers.combine(trained, frozen)

    def forward(self, *, is_training: bool) -> Forward:
        recompute = is_training and self._config.training.enable_gradient_checkpointing

        def bind(values: Values, key: jax.Array) -> JaxModule:
            return self._model.bind(self._layers.with_keys(values, key) if is_training else values)

        return batch_logprobs(bind, recompute=recompute, row_by_row=self._model.has_experts)

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._model.bind(self.combine(trained, self.frozen))

    def write(self, folder: Path, trained: Mapping[str, np.ndarray]) -> None:
        self._layers.write(folder, trained, self._config.model.model_name or "")
        if self._merges:
            write_model(self._base.path, folder, merged_with(folder, self._names), is_tied=self._is_tied)
            self._layers.remove(folder)


class _AdaptersInEngine(_Adapters):
    """Adapters beside frozen weights, as the engine computes them; see `Trainable`."""

    is_packed = True

    def _prepare(self, model: JaxModule) -> None:
        self._engine_model = EngineAdapters(model, self._layers, self._base.compute_dtype)

    def combine(self, trained: Mapping[str, jax.Array], frozen: Values) -> Values:
        return self._engine_model.combine(trained, frozen)

    def forward(self, *, is_training: bool) -> Forward:
        recompute = is_training and self._config.training.enable_gradient_checkpointing
        return self._engine_model.forward(recompute=recompute)

    def bind(self, trained: Mapping[str, jax.Array]) -> JaxModule:
        return self._engine_model.bind(self.combine(trained, self.frozen))
