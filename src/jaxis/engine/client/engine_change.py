"""What may be done with a running engine beside giving it requests, as messages. No JAX here."""

from __future__ import annotations

from typing import Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]


class Pause(msgspec.Struct, tag="pause", frozen=True):
    """Let no request run until a `Resume`; those that come meanwhile wait.

    Attributes:
      mode: What becomes of those that run: "abort" ends them, "wait" pauses when they have ended, "keep" lets them go
        on after the pause.
    """

    mode: PauseMode


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Let requests run again."""


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Free the caches, and the devices of the weights; see `LiveWeights.sleep`."""

    level: int


class WakeUp(msgspec.Struct, tag="wake_up", frozen=True):
    """Have back what went to sleep; see `LiveWeights.wake_up`."""

    parts: tuple[str, ...] | None


class UpdateWeights(msgspec.Struct, tag="update_weights", frozen=True):
    """Give the model the weights of a folder; see `LiveWeights.update`."""

    folder: str
    version: str | int | None


EngineChange = Pause | Resume | Sleep | WakeUp | UpdateWeights
