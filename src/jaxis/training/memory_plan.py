"""Device memory of a training, from the shapes of its arrays.

The sizes of weights and optimizer state are exact: the code that runs a training computes their shapes. The other
arrays of a step are counted in its derivative as JAX traces it. Only compiling would show how XLA places them and which
of them it never creates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from jaxis.host.json_object import json_object_text
from jaxis.host.progress import ProgressDisplay
from jaxis.models.common.decoder import CausalLM
from jaxis.parallel.mesh import MESH_AXES
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import FSDPParams, TrainConfig
from jaxis.training.config.training import DISTILLATION, ENGINE, GRPO
from jaxis.training.data import load_split
from jaxis.training.functional_model import Values, bytes_of, values_of
from jaxis.training.optimizer import make_optimizer
from jaxis.training.scores import CHUNK_TOKENS
from jaxis.training.sharding import check_devices, spec_of
from jaxis.training.step import Trained
from jaxis.training.trainable import Trainable, make_trainable
from jaxis.training.trainer import method_of

SCHEMA = 1
"""Version of the JSON that `TrainingPlan.to_json` writes; incremented when a field changes or loses its meaning."""


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
      working: Logits of the tokens that are computed together, or derivatives of a layer's activations, if more.
    """

    num_devices: int
    trained: int
    frozen: int
    moments: int
    gradients: int
    copies: int
    gathered: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self)[1:])


def training_memory(config: TrainConfig, base: BaseModel, batch: TrainingBatch, num_devices: int) -> TrainingMemory:
    """Estimates the device memory of a training, for the shapes of one device's batch of a step.

    Raises ConfigError if the configuration cannot be trained.
    """
    model, size = make_trainable(config, base, None), config.fsdp.tensor_parallel_size
    mesh = AbstractMesh((num_devices // size, size), MESH_AXES)

    def held(tree: Mapping[str, Any]) -> int:
        """Returns the bytes that a device holds of arrays, or of trees of arrays, by weight name."""
        total = 0
        for name, value in tree.items():
            for leaf in jax.tree.leaves(value):
                spec = spec_of(mesh, leaf.shape, model.logical_axes.get(name))
                total += bytes_of(leaf) // math.prod(mesh.shape[axis] for axis in spec if axis)
        return total

    # The state has trees like that of the trained arrays, and counters.
    optimizer = make_optimizer(config.training, lambda _: jnp.zeros(()), model.logical_axes)
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, model.initial), is_leaf=_is_by_name)
    values = jax.eval_shape(model.combine, model.initial, model.frozen)
    copies = {name: value for name, value in values.items() if name in model.initial and value.dtype != jnp.float32}
    trained, decoder = held(model.initial), cast(CausalLM, base.abstract(base.compute_dtype))
    step = _Derivative(config, base, model, batch, copies)
    activations, recomputes = step.kept_bytes(recompute=False), config.training.enable_gradient_checkpointing
    if recomputes:
        kept = step.kept_bytes(recompute=True)
        activations = kept + max(activations - kept, 0) // len(decoder.decoder.layers)
    num_tokens = math.prod(batch.ids.shape[1:])
    width = base.hf_config.get_text_config().get("hidden_size", 0)
    hidden = num_tokens * width * jnp.dtype(base.compute_dtype).itemsize
    # Logits with their derivatives, and hidden states in the order of chunks with theirs. They are no more when the
    # layers' derivatives are computed, each from one of the same size.
    logits = 3 * 4 * min(CHUNK_TOKENS, num_tokens) * decoder.vocab_size + 3 * hidden
    working = max(logits, 2 * step.largest_bytes(recompute=recomputes)) // size
    # Micro-batches add to a sum. Updates are computed when activations are no more.
    gradients = max(trained * (2 if len(batch.ids) > 1 else 1), 2 * trained - activations - working)
    return TrainingMemory(
        num_devices=num_devices,
        trained=trained,
        frozen=held(model.frozen),
        moments=sum(held(each) if _is_by_name(each) else bytes_of(each) for each in state),
        gradients=gradients,
        copies=held(copies),
        gathered=_gathered(decoder) // size if num_devices > size else 0,
        activations=activations,
        working=working,
    )


class _Derivative:
    """The derivative of a micro-batch's loss as JAX traces it; `copies` are those of trained arrays in another type."""

    def __init__(
        self, config: TrainConfig, base: BaseModel, model: Trainable, batch: TrainingBatch, copies: Values
    ) -> None:
        self._model, self._copies = model, copies
        self._objective, _ = method_of(config, base).objective(ProgressDisplay(enabled=False))
        self._batch = jax.tree.map(lambda array: jax.ShapeDtypeStruct(np.shape(array)[1:], array.dtype), batch)

    def kept_bytes(self, *, recompute: bool) -> int:
        """Returns the bytes of the arrays that are kept for the derivatives, besides weights."""

        def derive(trained: Trained, frozen: Values, batch: TrainingBatch) -> Any:
            return jax.vjp(lambda trained: self._loss(trained, frozen, batch, recompute=recompute), trained)[1]

        kept = jax.tree.leaves(jax.eval_shape(derive, self._model.initial, self._model.frozen, self._batch))
        weights = Counter((leaf.shape, leaf.dtype) for leaf in self._weights())
        num_bytes = 0
        for leaf in kept:
            weights[leaf.shape, leaf.dtype] -= 1
            if weights[leaf.shape, leaf.dtype] < 0:  # no weight itself
                num_bytes += bytes_of(leaf)
        return num_bytes

    def largest_bytes(self, *, recompute: bool) -> int:
        """Returns the bytes of the largest array that is computed, besides weights and their gradients."""
        derive = jax.grad(functools.partial(self._loss, recompute=recompute))
        computed = jax.make_jaxpr(derive)(self._model.initial, self._model.frozen, self._batch).jaxpr
        weights = {tuple(sorted(leaf.shape)) for leaf in self._weights()}
        return max(
            math.prod(each.shape) * each.dtype.itemsize
            for each in _results(computed)
            if tuple(sorted(each.shape)) not in weights
        )

    def _loss(self, trained: Trained, frozen: Values, batch: TrainingBatch, *, recompute: bool) -> jax.Array:
        forward = self._model.forward(is_training=True, recompute=recompute)
        values = self._model.combine(trained, frozen)
        return self._objective.loss(forward, values, frozen, batch, jax.random.key(0)).total

    def _weights(self) -> list[Any]:
        return jax.tree.leaves((self._model.initial, self._model.frozen, self._copies))


def _results(jaxpr: Any) -> Iterator[Any]:
    """Yields the type of each result within a traced function."""
    for equation in jaxpr.eqns:
        yield from (each.aval for each in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _results(inner)


def _gathered(model: CausalLM) -> int:
    """Returns the bytes of the largest layer and of all weights outside of layers."""
    layers = [bytes_of(values_of(layer)) for layer in model.decoder.layers]
    return bytes_of(values_of(model)) - sum(layers) + max(layers)


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
    "working": "logits, or derivatives of a layer's activations",
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
        facts = {"schema": SCHEMA, "status": "fits" if self.fits else "does_not_fit"}
        return json_object_text(facts | {"row_tokens": self.row_tokens, "rows": self.rows, "training": devices})

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
    if config.data.train.stream:
        raise ConfigError("--train cannot plan data.train.stream: plan it without, with a file of the longest rows")
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
