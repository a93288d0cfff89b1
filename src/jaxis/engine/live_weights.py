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
from jaxis.engine.execution.calls import Calls, EngineCall
from jaxis.engine.execution.feature import Completion, RequestFeature
from jaxis.engine.fingerprint import checkpoint_digest
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.opened_model import OpenedModel
from jaxis.engine.output_processor import Request
from jaxis.engine.scheduling import sequence as scheduling
from jaxis.engine.scheduling.sequence import SequenceId
from jaxis.errors import CheckpointError, ConfigError, EngineError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import huge_pages
from jaxis.layers.module import JaxModule
from jaxis.loading.given_tensors import GivenTensors, GivenWeights
from jaxis.loading.open_checkpoint import TensorListing, open_checkpoint, read_config_values
from jaxis.outputs import FIRST_VERSION, CompletionOutput

Weights: TypeAlias = str | os.PathLike[str] | GivenWeights | JaxModule
"""Folder of a checkpoint; tensors by their names in a checkpoint; or a model with loaded weights.

Such a model must be as the engine itself would load it. Its arrays are not copied.
"""

PARTS = ("weights", "kv_cache")
"""Parts of an engine that can sleep; one that does is among the engine's `holds`."""
PAUSED = "paused"
"""Reason among the engine's `holds` while it is paused."""
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


class TokenVersions:
    """The versions of the weights that a completion's tokens were sampled by."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, str | int]] = []

    def begin(self, version: str | int, num_tokens: int) -> None:
        """Marks tokens after the first `num_tokens` as sampled by weights of this version."""
        self._begun.append((num_tokens, version))

    def report(self, output: CompletionOutput, sequence: scheduling.Sequence, start: int) -> None:
        """Writes the versions of the output tokens from `start` on."""
        versions: list[str | int] = [FIRST_VERSION] * len(sequence.output_token_ids)
        for first, version in self._begun:
            versions[first:] = [version] * (len(versions) - first)
        output.weight_versions = versions[start:]


class WeightVersions(RequestFeature):
    """The version of an engine's weights, which completions report once it is not the first.

    Attributes:
      current: Version of the weights; FIRST_VERSION until they are updated.
    """

    def __init__(self) -> None:
        self.current: str | int = FIRST_VERSION
        self._unfinished: dict[SequenceId, Completion] = {}

    def begin(self) -> None:
        self._unfinished.clear()

    def added(self, completion: Completion) -> None:
        self._unfinished[completion.sequence.seq_id] = completion
        if self.current != FIRST_VERSION:
            self._mark(completion)

    def ended(self, completion: Completion) -> None:
        self._unfinished.pop(completion.sequence.seq_id, None)

    def change(self, version: str | int) -> None:
        """Marks the tokens that are sampled from now on."""
        self.current = version
        for completion in self._unfinished.values():
            self._mark(completion)

    def _mark(self, completion: Completion) -> None:
        record = completion.records.setdefault("versions", TokenVersions())
        assert isinstance(record, TokenVersions)
        record.begin(self.current, len(completion.sequence.output_token_ids))


class LiveWeights:
    """Changes the weights of an engine, between two steps.

    Attributes:
      fingerprint: Current fingerprint of the engine, as from `engine_fingerprint`; it changes with the weights.
      versions: Version of the weights, a feature of the engine.

    Args:
      engine: The engine.
      args: Arguments of the engine.
      opened: Checkpoint of the engine's start.
      meshes: Meshes of its pipeline stages.
      first: Weights of the engine's start; None: those of the checkpoint.
      fingerprint: Fingerprint of the engine with the weights of its checkpoint.
      versions: Version of the weights, a feature of the engine.
    """

    def __init__(
        self,
        engine: LLMEngine,
        args: EngineArgs,
        opened: OpenedModel,
        meshes: Sequence[jax.sharding.Mesh],
        first: NewWeights | None,
        fingerprint: str,
        versions: WeightVersions,
    ) -> None:
        self.versions = versions
        self._engine, self._args, self._opened, self._meshes = engine, args, opened, meshes
        self._folder = opened.path if first is None else first.folder
        self._first_fingerprint = self.fingerprint = fingerprint
        self._num_updates = 0
        if first is not None:
            self._put(first, versions.current)

    @property
    def calls(self) -> Calls:
        """Functions for the server; those that may change the fingerprint return it with the version of the weights."""

        def put(new: NewWeights, version: str | int | None) -> tuple[str, str | int]:
            self.put(new, version)
            return self.fingerprint, self.versions.current

        def wake_up(parts: Sequence[str] | None) -> tuple[str, str | int]:
            self.wake_up(parts)
            return self.fingerprint, self.versions.current

        def sleep(level: int) -> None:
            self.sleep(level)

        return {
            "sleep": EngineCall(sleep, settles=True),
            "wake_up": EngineCall(wake_up, settles=True),
            "update_weights": EngineCall(put, read=lambda folder, version: (self.read(folder), version), settles=True),
        }

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
        for feature in self._engine.runner.features:
            if feature.keeps_awake:
                raise ConfigError(feature.keeps_awake)
        requests = self._engine.settle() if not self._engine.holds & {*PARTS} else []
        self._engine.scheduler.recompute_all()
        self._engine.reset_prefix_cache()
        for stage in self._engine.runner.executor.stages:
            stage.sleep(level)
        self._engine.holds |= {*PARTS}
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
            if part in wanted and part in self._engine.holds:
                self._wake_weights() if part == "weights" else self._engine.runner.recover()
                self._engine.holds.discard(part)

    def _wake_weights(self) -> None:
        stages = self._engine.runner.executor.stages
        if stages[0].context.model.is_dropped:
            if self._folder is None:
                raise EngineError("the weights were given by the caller and dropped: give others by update_weights")
            self._put(self.read(self._folder), self.versions.current)
        for stage in stages:
            stage.context.model.wake_up()

    def _put(self, new: NewWeights, version: str | int) -> None:
        self._engine.set_models(new.loaded.models, new.digest)
        if version != FIRST_VERSION:
            self.versions.change(version)
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
