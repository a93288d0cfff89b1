"""The two kinds of what is trained: all weights of a model, or adapters beside them; each with either forward pass."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.expert_counts import experts_per_token
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.module import JaxModule, named_modules
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.lora.merged_checkpoint import write_merged
from jaxis.models.changed_checkpoint import write_changed
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.interfaces import DRAFT_PREFIX, has_tied_head
from jaxis.models.registry import model_class_of
from jaxis.models.tied_tables import Tables
from jaxis.training.adapters import choose_layers
from jaxis.training.base_model import BaseModel
from jaxis.training.config import ROUTER_KEYS, TrainConfig
from jaxis.training.config.training import ENGINE, TrainingParams
from jaxis.training.forward_pass import EnginePass, ForwardPass
from jaxis.training.functional_model import FunctionalModel, Values, is_array, is_float, values_of
from jaxis.training.scores import Forward, make_forward
from jaxis.training.sharding import Placement, Specs
from jaxis.training.step import Trained
from jaxis.training.tensor_places import find_places


class Trainable(ABC):
    """A model with its trained and frozen arrays.

    Args:
      progress: Display of loading; None: nothing is loaded, and arrays are shapes.

    Attributes:
      frozen: Arrays that are not trained. If the objective needs a reference, also the weights before training, under
        the names of those that are trained; then a teacher's, and the engine's packed copy of trained weights.
      initial: Trained arrays at the start, float32; none once training has begun.
      placement: Placement of both on devices.
      logical_axes: Logical axes of the weights among them, by name.
      cost: Operations of the training.

    Raises:
      ConfigError: The model cannot be trained as configured.
      CheckpointError: Weights cannot be read.
    """

    frozen: Values
    initial: Trained
    placement: Placement
    logical_axes: Mapping[str, tuple[str | None, ...]]
    cost: TrainingCost
    _pass: ForwardPass
    _head_is_frozen: bool = False

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._config, self._base = config, base
        self._pass_type = EnginePass if config.training.forward_pass == ENGINE else ForwardPass

    def _load(self, base: BaseModel, dtype: DTypeLike, progress: ProgressDisplay | None, *, packed: bool) -> JaxModule:
        if any(isinstance(module, MappedTable) for _, module in named_modules(base.construct(dtype))):
            raise ConfigError(
                f"training of {base.name} is not supported: it has a table that stays in the checkpoint's files"
            )
        is_random, seed = not self._config.model.load_pretrained_weights, self._config.training.seed
        if progress is None:
            return base.abstract(dtype)
        return base.load(dtype, progress, random=is_random, seed=seed, packed=packed)

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

    def forward(self, *, is_training: bool, recompute: bool | None = None) -> Forward:
        """Returns the forward pass: for training (with dropout as configured), or as served.

        `recompute` is True to recompute layers for their derivatives; None: as configured.
        """
        has_experts = self._pass.model.has_experts
        recompute = self._config.training.recomputes_layers if recompute is None else recompute
        return make_forward(
            self._pass.model,
            lambda values, key: self._pass.bind(self._dropping(values, key) if is_training else values),
            recompute=is_training and recompute,
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


def make_trainable(config: TrainConfig, base: BaseModel, progress: ProgressDisplay | None) -> Trainable:
    """Makes what is trained; see `Trainable`."""
    return (Adapters if config.training.use_peft else AllWeights)(config, base, progress)


class AllWeights(Trainable):
    """All float parameters of a model."""

    def __init__(self, config: TrainConfig, base: BaseModel, progress: ProgressDisplay | None) -> None:
        super().__init__(config, base)
        # A configured quantization is the engine's, which packs float weights by it.
        is_packed, dtype = self._pass_type.is_packed, base.compute_dtype
        loaded = dataclasses.replace(base, quantization=None) if is_packed else base
        model = self._load(loaded, jnp.float32, progress, packed=False)
        values = values_of(model)
        if quantized := [name for name, value in values.items() if not is_array(value)]:
            raise ConfigError(
                f"{base.name} has quantized weights, such as {quantized[0]}: set training.use_peft to train adapters"
            )
        if gguf_file(base.path) is not None:
            raise ConfigError(f"{base.name} is a GGUF file: set training.use_peft, or jaxis convert it first")
        self.initial = {name: value for name, value in values.items() if is_float(value)}
        self.frozen = {name: value for name, value in values.items() if not is_float(value)}
        self.logical_axes = FunctionalModel(model).logical_axes
        self.cost = cost_of(config.training, base.hf_config, model, self.initial)
        self._names, self._is_tied = checkpoint_names_of(model), has_tied_head(model)
        self._pass = self._pass_type(base.construct(dtype, packed=is_packed), dtype)
        if progress is not None:
            with open_checkpoint(base.path) as checkpoint:
                shapes = {name: tuple(checkpoint.info(name).shape) for name in checkpoint.names()}
                read = checkpoint.tensor if config.model.load_pretrained_weights else None
                self.places = find_places(model, lambda: base.construct(jnp.float32), shapes, base.name, read)
        del model
        if config.training.has_reference:
            make = self._reference if progress is not None else functools.partial(jax.eval_shape, self._reference)
            self.frozen = make(self.initial, self.frozen)
        if progress is not None:
            self.refresh_frozen(self.initial)
            self._place()

    def _reference(self, initial: Trained, frozen: Values) -> Values:
        """Returns the frozen weights and a copy of the others, in the type of the forward pass."""
        copies = {name: jnp.array(value, copy=True) for name, value in initial.items()}
        return self._pass.served(copies, {**frozen, **self._pass.packed(copies)})

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

    def __init__(self, config: TrainConfig, base: BaseModel, progress: ProgressDisplay | None) -> None:
        super().__init__(config, base)
        dtype = base.compute_dtype
        model = self._load(base, dtype, progress, packed=self._pass_type.is_packed)
        self._layers = choose_layers(model, config.peft, base.module_names())
        self._head_is_frozen = isinstance(model, CausalLM) and not self._layers.changes_head
        self._merges = config.peft.peft_save_mode == "merged"
        if self._merges and gguf_file(base.path) is not None:
            raise ConfigError("peft.peft_save_mode='merged' cannot be honoured for a GGUF file: give adapter_only")
        self.frozen = values_of(model)
        make = functools.partial(self._layers.initial, config.training.seed)
        self.initial = jax.eval_shape(make) if progress is None else make()
        self.cost = cost_of(config.training, base.hf_config, model, self.initial)
        self._pass = self._pass_type(model, dtype, self._layers)
        self.logical_axes = self._pass.model.logical_axes
        if progress is not None:
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


@dataclass(frozen=True)
class TrainingCost:
    """Operations of a step's products with weights, two for each multiplication and addition.

    The derivatives of a product are two more, or one beside a frozen weight. Recomputation does not count, nor does
    attention.

    Attributes:
      of_token: Operations of the layers for a token.
      of_target: Operations of the head for a learned token.
    """

    of_token: float
    of_target: float


def cost_of(
    params: TrainingParams, hf_config: HFConfig, model: JaxModule, trained: Mapping[str, jax.Array]
) -> TrainingCost:
    """Counts the operations of training a model."""
    text_config = hf_config.get_text_config()
    layers, head = 0, 0
    for name, module in named_modules(model):
        if name.startswith(DRAFT_PREFIX):
            continue
        if isinstance(module, JaxLmHead):
            head = module.input_size * module.output_size
        elif isinstance(module, JaxLinear):
            layers += module.input_size * module.output_size
        elif isinstance(module, JaxExperts):
            size = module.hidden_size * module.intermediate_size
            layers += len(module.stack_names) * size * experts_per_token(text_config)
    head = head or text_config.get("vocab_size", 0) * text_config.get("hidden_size", 0)  # tied to the embeddings
    passes = (2 if params.use_peft else 3) + params.has_reference
    adapters = 6 * sum(value.size for value in trained.values()) if params.use_peft else 0
    return TrainingCost(2 * passes * layers + adapters, 2 * passes * head)


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
