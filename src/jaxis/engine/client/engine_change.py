"""Changes of a running engine, as messages. Imports no JAX."""

from __future__ import annotations

from typing import Literal

import msgspec

PAUSED = "paused"
"""Reason among an engine's `holds` while it is paused."""

PauseMode = Literal["abort", "wait", "keep"]


class Pause(msgspec.Struct, tag="pause", frozen=True):
    """Stops running requests until a `Resume`; new requests wait.

    Attributes:
      mode: Treatment of running requests. "abort" ends them, "wait" pauses when they have ended, "keep" lets them go on
        after the pause.
    """

    mode: PauseMode


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Lets requests run again."""


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Frees the caches and the device memory of the weights, as `LiveWeights.sleep` does."""

    level: int


class WakeUp(msgspec.Struct, tag="wake_up", frozen=True):
    """Restores weights and caches after `Sleep`, as `LiveWeights.wake_up` does."""

    parts: tuple[str, ...] | None


class UpdateWeights(msgspec.Struct, tag="update_weights", frozen=True):
    """Gives the model the weights of a folder, as `LiveWeights.update` does."""

    folder: str
    version: str | int | None


EngineChange = Pause | Resume | Sleep | WakeUp | UpdateWeights
