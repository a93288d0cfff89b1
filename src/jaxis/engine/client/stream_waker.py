"""Decides when the readers of streams run, so that they leave processor time to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from jaxis.engine.client.output_stream import OutputStream

REST_FACTOR = 9.0  # seconds of rest for each second of work


class StreamWaker:
    """Wakes the coroutines that read streams, and spends at most a tenth of the event loop's time on them.

    The readers format and send every token: with many streams and a fast model they would use as much processor time as
    the model, which computes on the same processors. After each round they rest for nine times as long as the round
    took, and outputs that arrive meanwhile are sent together. With few streams, or steps longer than the rest, nothing
    is delayed. A stream's first and last outputs never wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: dict[OutputStream, None] = {}
        self._is_resting = False

    def wake(self, streams: Iterable[OutputStream]) -> None:
        """Wakes the readers of streams with new outputs, now or after the rest."""
        for stream in streams:
            if stream.ended or not stream.begun:
                stream.wake()
            else:
                self._ready[stream] = None
        if not self._is_resting:
            self._wake_ready()

    def _wake_ready(self) -> None:
        streams, self._ready = self._ready, {}
        self._is_resting = bool(streams)
        if streams:
            start = time.monotonic()
            for stream in streams:
                stream.wake()
            self._loop.call_soon(self._rest, start)  # comes after the readers

    def _rest(self, start: float) -> None:
        self._loop.call_later(REST_FACTOR * (time.monotonic() - start), self._wake_ready)
