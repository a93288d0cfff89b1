"""Changes of a running engine's weights: replacement, sleep and waking up."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Collection, Sequence

import jax

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.execution.calls import Calls, EngineCall
from jaxis.engine.opened_model import OpenedModel
from jaxis.engine.output_processor import Request
from jaxis.engine.weights.new_weights import NewWeights, Weights, check_can_change, read_weights
from jaxis.engine.weights.versions import WeightVersions
from jaxis.errors import ConfigError, EngineError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import huge_pages
from jaxis.outputs import FIRST_VERSION

PARTS = ("weights", "kv_cache")
"""Parts of an engine that can sleep; one that does is among the engine's `holds`."""


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
        """Gives the engine other weights. Unfinished requests go on with them; their tokens are computed again.

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
          ConfigError: The engine's weights cannot be changed, or a feature needs them where they are.
          EngineError: A step in flight failed.
        """
        if level not in (1, 2):
            raise RequestError(f"level={level!r} must be 1 or 2")
        check_can_change(self._args)
        for feature in self._engine.runner.features:
            if feature.needs_memory:
                raise ConfigError(feature.needs_memory)
        requests = self._engine.settle() if not self._engine.holds & {*PARTS} else []
        self._engine.scheduler.recompute_all()
        self._engine.reset_prefix_cache()
        for stage in self._engine.runner.executor.stages:
            stage.unload(keep=level == 1)
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
            stage.context.model.restore()

    def _put(self, new: NewWeights, version: str | int) -> None:
        engine = self._engine
        engine.runner.set_models(new.loaded.models, new.digest)
        engine.scheduler.recompute_all()
        engine.scheduler.block_manager.set_weights(new.digest)
        engine.connector.step_done()
        if version != FIRST_VERSION:
            self.versions.change(version)
        # Flax leaves reference cycles that hold the old arrays. Without a collection, these could outlive the next
        # update.
        gc.collect(1)
        self._folder = new.folder
        name = hashlib.sha256(self._first_fingerprint.encode() + new.digest).hexdigest()
        self.fingerprint = f"fp_{name[:20]}"
