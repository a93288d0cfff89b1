"""Device memory of a training, from the shapes of its arrays.

The sizes of weights and optimizer state are exact: the code that runs a training computes their shapes. The other
arrays of a step are counted in its derivative as JAX traces it. Only compiling would show how XLA places them and which
of them it never creates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxis.compilation.targets import Target
from jaxis.engine.execution.cache_memory import machine_memory, usable_bytes
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import named_modules
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.models.common.decoder import CausalLM
from jaxis.parallel.mesh import MESH_AXES
from jaxis.training.adapters import AdaptedLayers, choose_layers
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import FSDPParams, TrainConfig
from jaxis.training.config.training import DISTILLATION, ENGINE, GRPO
from jaxis.training.data import load_split
from jaxis.training.forward_pass import PlainPass
from jaxis.training.functional_model import Values, bytes_of, is_float, values_of
from jaxis.training.optimizer import make_optimizer
from jaxis.training.scores import CHUNK_TOKENS, make_forward
from jaxis.training.sharding import check_devices, spec_of
from jaxis.training.step import Trained
from jaxis.training.trainer import method_of


@dataclass(frozen=True)
class TrainingMemory:
    """Sizes in bytes on each of the devices that share the training.

    Attributes:
      trained: Trained arrays, float32.
      frozen: Other weights, and the reference that preferences are compared with.
      moments: State of the optimizer.
      gradients: Gradients of trained arrays, and their updates.
      copies: Copies of trained arrays in the type of the forward pass.
      gathered: Weights of other devices that a device holds at a time.
      activations: Arrays that a micro-batch keeps for its derivatives, and those for recomputing one layer.
      logits: Logits of the tokens that are computed together.
    """

    num_devices: int
    trained: int
    frozen: int
    moments: int
    gradients: int
    copies: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self)[1:])


def training_memory(config: TrainConfig, base: BaseModel, batch: TrainingBatch, num_devices: int) -> TrainingMemory:
    """Estimates the device memory of a training, for the shapes of one device's batch of a step.

    Raises ConfigError if the configuration cannot be trained.
    """
    parts, size = _Parts(config, base), config.fsdp.tensor_parallel_size
    mesh = AbstractMesh((num_devices // size, size), MESH_AXES)

    def held(tree: Mapping[str, Any]) -> int:
        """Returns the bytes that a device holds of arrays, or of trees of arrays, by weight name."""
        total = 0
        for name, value in tree.items():
            for leaf in jax.tree.leaves(value):
                spec = spec_of(mesh, leaf.shape, parts.model.logical_axes.get(name))
                total += bytes_of(leaf) // math.prod(mesh.shape[axis] for axis in spec if axis)
        return total

    # The state has trees like that of the trained arrays, and counters.
    optimizer = make_optimizer(config.training, lambda _: jnp.zeros(()), parts.model.logical_axes)
    state = jax.eval_shape(optimizer.init, parts.trained)
    by_name = [each for each in jax.tree.leaves(state, is_leaf=_is_by_name) if _is_by_name(each)]
    counters = bytes_of([each for each in jax.tree.leaves(state, is_leaf=_is_by_name) if not _is_by_name(each)])
    trained = held(parts.trained)
    recomputes = config.training.enable_gradient_checkpointing
    plain, kept = (
        parts.residual_bytes(batch, recompute=each) if each in {recomputes, False} else 0 for each in (False, True)
    )
    num_tokens = min(CHUNK_TOKENS, math.prod(batch.ids.shape[1:]))
    return TrainingMemory(
        num_devices=num_devices,
        trained=trained,
        frozen=held(parts.frozen) + held(parts.compared),
        moments=sum(map(held, by_name)) + counters,
        gradients=2 * trained,
        copies=held(parts.copies),
        gathered=parts.gathered_bytes // size if num_devices > size else 0,
        activations=kept + max(plain - kept, 0) // parts.num_layers if recomputes else plain,
        logits=3 * 4 * num_tokens * parts.vocab_size // size,
    )


class _Parts:
    """A training's model and arrays, as shapes.

    Attributes:
      trained, frozen: Arrays as in `Trainable`.
      compared: Reference that preferences are compared with; part of `frozen` in a training.
      copies: Copies of trained arrays for the forward pass, if it uses another type.
      gathered_bytes: Bytes of the largest layer and of all weights outside of layers.
    """

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._config, self._base, self._dtype = config, base, base.compute_dtype
        model = base.abstract()
        values = values_of(model)
        adapters: AdaptedLayers | None = None
        self.compared: Values = {}
        self.copies: Values = {}
        if config.training.use_peft:
            with open_checkpoint(base.path) as checkpoint:
                modules = {name.rpartition(".")[0] for name in checkpoint.names()}
            adapters = choose_layers(model, config.peft, modules)
            self.trained: Mapping[str, Any] = jax.eval_shape(functools.partial(adapters.initial, 0))
            self.frozen: Values = values
        else:
            floats = {name: value for name, value in values.items() if is_float(value)}
            self.trained = {name: jax.ShapeDtypeStruct(value.shape, jnp.float32) for name, value in floats.items()}
            self.frozen = {name: value for name, value in values.items() if name not in floats}
            self.compared = floats if config.training.has_reference else {}
            self.copies = {} if self._dtype == jnp.float32 else floats
        self._pass = PlainPass(model, self._dtype, adapters)
        self.model = self._pass.model
        self._combine = self._pass.with_adapters if adapters else self._pass.with_weights
        decoder = cast(CausalLM, model).decoder
        self.num_layers = len(decoder.layers)
        self.vocab_size = cast(CausalLM, model).vocab_size
        layers = [f"{name}." for name, module in named_modules(model) if any(module is each for each in decoder.layers)]
        sizes = [bytes_of([values[name] for name in values if name.startswith(prefix)]) for prefix in layers]
        self.gathered_bytes = bytes_of(values) - sum(sizes) + max(sizes)

    def residual_bytes(self, batch: TrainingBatch, *, recompute: bool) -> int:
        """Returns the bytes that a micro-batch keeps for its derivatives, besides weights."""
        forward = make_forward(self.model, lambda values, _: self._pass.bind(values), recompute=recompute)
        objective, _ = method_of(self._config, self._base).objective(ProgressDisplay(enabled=False))
        micro_batch = jax.tree.map(lambda array: jax.ShapeDtypeStruct(np.shape(array)[1:], array.dtype), batch)

        def derive(trained: Trained, frozen: Values, micro_batch: TrainingBatch) -> Any:
            def loss(trained: Trained) -> jax.Array:
                values = self._combine(trained, frozen)
                return objective.loss(forward, values, frozen, micro_batch, jax.random.key(0)).total

            return jax.vjp(loss, trained)[1]

        frozen = {**self.frozen, **self.compared}
        kept = jax.tree.leaves(jax.eval_shape(derive, self.trained, frozen, micro_batch))
        weights = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((self.trained, frozen, self.copies)))
        num_bytes = 0
        for leaf in kept:
            if weights[leaf.shape, leaf.dtype] > 0:
                weights[leaf.shape, leaf.dtype] -= 1  # the weight itself
            else:
                num_bytes += bytes_of(leaf)
        return num_bytes


def _is_by_name(tree: Any) -> bool:
    return isinstance(tree, dict)


_LABELS = {
    "trained": "what is trained, float32",
    "frozen": "other weights",
    "moments": "the optimizer's moments",
    "gradients": "gradients",
    "copies": "what is trained, in the type that is computed in",
    "gathered": "weights of other devices, a layer's at a time",
    "activations": "activations",
    "logits": "logits",
}


@dataclass(frozen=True)
class TrainingPlan:
    """Memory that a training needs, and the memory of devices.

    Attributes:
      row_tokens: Tokens of the longest batch row.
      rows: Batch rows of a micro-batch, on each device.
      memory: Required memory and available bytes on each device, by the name of the devices.
    """

    row_tokens: int
    rows: int
    memory: dict[str, tuple[TrainingMemory, int]]

    @property
    def fits(self) -> bool:
        return all(needed.total <= there for needed, there in self.memory.values())

    def to_json(self) -> str:
        """Returns the plan as a JSON object."""
        devices = [
            {
                "devices": name,
                **{f"{part}_bytes": size for part, size in dataclasses.asdict(needed).items() if part in _LABELS},
                "num_devices": needed.num_devices,
                "total_bytes": needed.total,
                "available_bytes": there,
                "fits": needed.total <= there,
            }
            for name, (needed, there) in self.memory.items()
        ]
        return json.dumps({"row_tokens": self.row_tokens, "rows": self.rows, "training": devices}, indent=2)

    def to_text(self) -> str:
        """Returns the plan as text for users."""
        lines = [f"{self.rows} rows of {self.row_tokens} tokens at a time on each device"]
        for name, (needed, there) in self.memory.items():
            shared = f"each of {needed.num_devices} devices" if needed.num_devices > 1 else "one device"
            lines.append(f"{name}, {shared}")
            for part, label in _LABELS.items():
                if size := getattr(needed, part):
                    lines.append(f"  {human_bytes(size):>10}  {label}")
            verdict = "fits" if needed.total <= there else "does not fit"
            lines.append(f"  {human_bytes(needed.total):>10}  together: {verdict} into {human_bytes(there)}")
        return "\n".join(lines)


def plan_training(config: TrainConfig, targets: Sequence[Target]) -> TrainingPlan:
    """Plans a training on devices, by default this machine's, from its data rows and the headers of its weights.

    Raises the ConfigError and CheckpointError of `Trainer`, or ConfigError if the memory of this kind of training is
    not known.
    """
    if (kind := config.training.trainer_type) in (GRPO, DISTILLATION):
        raise ConfigError(f"--train cannot plan training.trainer_type={kind}, whose engine needs memory as well")
    if config.training.forward_pass == ENGINE:
        raise ConfigError("--train cannot plan training.forward_pass=engine, which is for CPUs: plan it with plain")
    # As for one device, whose batch rows are those of a data rank.
    base = open_base_model(dataclasses.replace(config, fsdp=FSDPParams()), "accelerator" if targets else None)
    batch = load_split(config, config.data.train, base).batches.longest()
    places = {str(target): (target.num_devices, target.accelerator.usable_bytes) for target in targets}
    if not places:
        _, sizes = machine_memory()
        places = {"this machine": (len(sizes), min(sizes))}
    memory = {}
    for name, (num_devices, there) in places.items():
        used = num_devices if config.fsdp.enable_fsdp else 1
        check_devices(config.fsdp, used)
        memory[name] = (training_memory(config, base, batch, used), usable_bytes(there))
    return TrainingPlan(batch.ids.shape[2], batch.ids.shape[1], memory)
