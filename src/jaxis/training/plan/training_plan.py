from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxis.compilation.targets import Target
from jaxis.engine.execution.cache_memory import machine_memory, usable_bytes
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.training.base_model import open_base_model
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import DISTILLATION, ENGINE, GRPO, TrainConfig
from jaxis.training.data import load_split
from jaxis.training.plan.memory import TrainingMemory, training_memory

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
    base = open_base_model(config, "accelerator" if targets else None)
    batch = load_split(config, config.data.train, base).batches.longest()
    micro_batch = _of_one_device(batch, base.devices.num_devices)
    places = {str(target): (_num_devices(target), target.accelerator.usable_bytes) for target in targets}
    if not places:
        _, sizes = machine_memory()
        places = {"this machine": (len(sizes), min(sizes))}
    memory = {}
    for name, (num_devices, there) in places.items():
        used = num_devices if config.fsdp.enable_fsdp else 1
        memory[name] = (training_memory(config, base, micro_batch, used), usable_bytes(there))
    return TrainingPlan(batch.ids.shape[2], micro_batch.ids.shape[1], memory)


def _of_one_device(batch: TrainingBatch, num_devices: int) -> TrainingBatch:
    """Returns a batch with as many batch rows as one device has. Their values do not matter."""
    return jax.tree.map(lambda array: np.asarray(array)[:, : array.shape[1] // num_devices], batch)


def _num_devices(target: Target) -> int:
    if target.num_devices > target.devices_per_host:
        raise ConfigError(
            f"--on {target}: a training is shared by the devices of one host, which has {target.devices_per_host}"
        )
    return target.num_devices
