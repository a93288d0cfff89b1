"""Changes of a running engine's weights: replacement, sleep and waking up."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax

from jaxis.config.quantization_files import CONFIG
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.engine_config import make_vllm_config
from jaxis.engine.fingerprint import checkpoint_digest
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.opened_model import OpenedModel
from jaxis.engine.output_processor import Request
from jaxis.errors import CheckpointError, ConfigError, EngineError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import huge_pages
from jaxis.layers.module import JaxModule
from jaxis.loading.given_tensors import GivenTensors, GivenWeights
from jaxis.loading.open_checkpoint import TensorListing, open_checkpoint, read_config_values

Weights: TypeAlias = str | os.PathLike[str] | GivenWeights | JaxModule
"""Folder of a checkpoint; tensors by their names in a checkpoint; or a model with loaded weights.

Such a model must be as the engine itself would load it. Its arrays are not copied.
"""

PARTS = ("weights", "kv_cache")
# Keys of config.json that do not change a model's results.
_IRRELEVANT = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


@dataclass(frozen=True)
class NewWeights:
    """Weights that were read and checked, and are on the devices.

    Attributes:
      loaded: The model with these weights.
      digest: Digest of the files of a folder; a unique name for other weights.
      folder: Folder of the weights; None if they came from the caller's memory.
    """

    loaded: LoadedModel
    digest: bytes
    folder: Path | None


class LiveWeights:
    """Changes the weights of an engine, between two steps.

    Attributes:
      fingerprint: Current fingerprint of the engine, as from `engine_fingerprint`; it changes with the weights.

    Args:
      engine: The engine.
      args: Arguments of the engine.
      opened: Checkpoint of the engine's start.
      meshes: Meshes of its pipeline stages.
      first: Weights of the engine's start; None: those of the checkpoint.
      fingerprint: Fingerprint of the engine with the weights of its checkpoint.
    """

    def __init__(
        self,
        engine: LLMEngine,
        args: EngineArgs,
        opened: OpenedModel,
        meshes: Sequence[jax.sharding.Mesh],
        first: NewWeights | None,
        fingerprint: str,
    ) -> None:
        self._engine, self._args, self._opened, self._meshes = engine, args, opened, meshes
        self._folder = opened.path if first is None else first.folder
        self._first_fingerprint = self.fingerprint = fingerprint
        self._num_updates = 0
        if first is not None:
            self._put(first, engine.weights_version)

    def update(self, weights: Weights, version: str | int | None = None) -> list[Request]:
        """Reads weights and gives them to the engine, as `read` and `put` do."""
        return self.put(self.read(weights), version)

    def read(self, weights: Weights) -> NewWeights:
        """Puts weights on the devices beside the current ones. May be called from any thread.

        Raises:
          ConfigError: The engine's weights cannot be changed, or the folder is of another model.
          CheckpointError: A tensor is missing, unknown, or of another shape or type.
        """
        check_can_change(self._args)
        huge_pages.begin_pages()  # the old weights' memory is to be free when they are dropped
        return read_weights(weights, self._args, self._opened, self._meshes, ProgressDisplay(enabled=False))

    def put(self, new: NewWeights, version: str | int | None = None) -> list[Request]:
        """Gives the engine other weights. Unfinished requests go on with them, as `LLMEngine.set_models` says.

        Args:
          new: The weights.
          version: Version of the tokens that are sampled from now on; None: one more than there were updates.

        Returns:
          The requests that got tokens of the steps that were in flight.

        Raises:
          RequestError: The version is neither a string nor a positive integer.
          ConfigError: The weights are of other shapes or types. Nothing has changed then.
          EngineError: A step in flight failed.
        """
        version = self._num_updates + 1 if version is None else version
        if not (isinstance(version, str) and version) and not (type(version) is int and version > 0):
            raise RequestError(f"version={version!r} must be a positive integer or a string")
        requests = self._engine.settle()
        self._put(new, version)
        self._num_updates += 1
        return requests

    def sleep(self, level: int = 1) -> list[Request]:
        """Frees the caches, and moves the weights to host memory or drops them, until `wake_up`.

        Args:
          level: 1 keeps the weights in host memory, 2 drops them.

        Returns:
          The requests that got tokens of the steps that were in flight.

        Raises:
          RequestError: There is no such level.
          ConfigError: The engine's weights cannot be changed, or it has adapters by request.
          EngineError: A step in flight failed.
        """
        if level not in (1, 2):
            raise RequestError(f"level={level!r} must be 1 or 2")
        check_can_change(self._args)
        if self._engine.runner.adapters is not None:
            raise ConfigError("an engine with enable_lora cannot sleep: its adapters lie beside its weights")
        requests = self._engine.settle() if not self._engine.asleep else []
        self._engine.sleep(level)
        return requests

    def wake_up(self, parts: Collection[str] | None = None) -> None:
        """Restores the parts that sleep. Weights that were dropped are read again from their folder.

        Args:
          parts: Members of PARTS; None: all.

        Raises:
          RequestError: There is no such part.
          EngineError: The weights were given by the caller, and dropped: `update` gives others, and wakes them up. Or
            there is no memory for the caches.
        """
        wanted = PARTS if parts is None else tuple(parts)
        if unknown := set(wanted) - set(PARTS):
            raise RequestError(f"there is no part {min(unknown)!r} to wake up: {', '.join(PARTS)}")
        for part in PARTS:
            if part not in wanted or part not in self._engine.asleep:
                continue
            if part == "weights" and self._engine.runner.executor.stages[0].context.model.is_dropped:
                if self._folder is None:
                    raise EngineError("the weights were given by the caller and dropped: give others by update_weights")
                self._put(self.read(self._folder), self._engine.weights_version)
            self._engine.wake_up(part)

    def _put(self, new: NewWeights, version: str | int) -> None:
        self._engine.set_models(new.loaded.models, new.digest, version)
        # Flax leaves reference cycles that hold the old arrays. Without a collection, these could outlive the next
        # update.
        gc.collect(1)
        self._folder = new.folder
        name = hashlib.sha256(self._first_fingerprint.encode() + new.digest).hexdigest()
        self.fingerprint = f"fp_{name[:20]}"


def read_weights(
    weights: Weights,
    args: EngineArgs,
    opened: OpenedModel,
    meshes: Sequence[jax.sharding.Mesh],
    progress: ProgressDisplay,
) -> NewWeights:
    """Puts weights on the devices of the pipeline stages, stored as the engine's arguments say.

    Raises:
      ConfigError: The folder is of another model.
      CheckpointError: A tensor is missing, unknown, or of another shape or type.
    """
    if isinstance(weights, JaxModule):
        config = make_vllm_config(args, opened.path, opened.hf_config, meshes[0].devices.flat[0].platform, stored={})
        return NewWeights(LoadedModel(config, meshes, [weights]), _new_digest(), None)
    args = dataclasses.replace(args, load_format="auto")  # the new weights are real even if the first were random
    stored = _stored(opened.path)
    if isinstance(weights, str | os.PathLike):
        folder = Path(weights)
        _check_same_model(folder, opened.config.values)
        digest = hashlib.sha256(checkpoint_digest(folder).encode()).digest()
        with open_checkpoint(folder) as checkpoint:
            tensors = GivenTensors(checkpoint, stored)
            return NewWeights(opened.load(args, meshes, progress, tensors), digest, folder)
    if not isinstance(weights, Mapping):
        if not isinstance(weights, Iterable):
            raise CheckpointError("the weights must be a folder, a mapping of names to arrays, or pairs of both")
        weights = dict(weights) if len(meshes) > 1 else weights
    tensors = GivenTensors(weights, stored)
    return NewWeights(opened.load(args, meshes, progress, tensors), _new_digest(), None)


def check_can_change(args: EngineArgs) -> None:
    """Raises a ConfigError for an engine whose weights cannot be changed."""
    if args.nnodes > 1:
        raise ConfigError(f"weights cannot be changed with nnodes={args.nnodes}: the other hosts would keep theirs")
    if args.adapter is not None:
        raise ConfigError("weights cannot be changed where --adapter merges an adapter into them: merge it beforehand")


def _stored(path: Path) -> Mapping[str, Any]:
    try:
        return TensorListing(path).infos
    except CheckpointError:
        return {}


def _new_digest() -> bytes:
    return hashlib.sha256(uuid.uuid4().bytes).digest()


def _check_same_model(folder: Path, values: Mapping[str, Any]) -> None:
    """Raises a ConfigError if a folder's config.json differs from the engine's."""
    if not (folder / CONFIG).exists():
        return
    found = read_config_values(folder).values
    for key in sorted(found.keys() & values.keys() | {"quantization_config"}):
        if key in _IRRELEVANT or key.startswith("_") or key.endswith("_token_id"):
            continue
        if found.get(key) != values.get(key):
            raise ConfigError(
                f"{folder / CONFIG} has {key}={found.get(key)!r}, and the engine's model {values.get(key)!r}: only "
                "weights of the same model can take the place of its own"
            )
