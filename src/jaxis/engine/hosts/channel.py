"""A connection between two hosts of a group: whole messages, in order."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from jaxis.engine.hosts import messages
from jaxis.host.frames import FrameReader, FrameTooLargeError, frame

Message = TypeVar("Message")

RECEIVE_BYTES = 1 << 18
# A machine that has gone without a word (no power, no network) is noticed by the system after about 15 seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}


class ChannelClosedError(ConnectionError):
    """The other host has ended, cannot be reached, or does not speak this protocol."""


class Channel(Generic[Message]):
    """Sends and receives messages. Several threads may send, one receives.

    Args:
      connection: Connected.
      decode: From a frame's data to a message; raises ValueError for anything else.
      max_bytes: Of a message that is received.
    """

    def __init__(
        self, connection: socket.socket, decode: Callable[[bytes], Message], max_bytes: int = messages.MAX_BYTES
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._decode = connection, decode
        self._frames, self._received = FrameReader(max_bytes), deque[bytes]()
        self._lock = threading.Lock()

    def send(self, message: messages.Call | messages.Setup | messages.Report) -> None:
        """Sends a message.

        Raises:
          ChannelClosedError: The other host has ended.
        """
        self.send_data(frame(messages.encode(message)))

    def send_data(self, data: bytes) -> None:
        """As `send`, of a message that is a frame already."""
        try:
            with self._lock:
                self._connection.sendall(data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, timeout_seconds: float | None = None) -> Message:
        """The next message.

        Args:
          timeout_seconds: How long a wait for more bytes may take; None is any time.

        Raises:
          TimeoutError: Nothing came in time.
          ChannelClosedError: No more messages will come.
        """
        while not self._received:
            try:
                self._connection.settimeout(timeout_seconds)
                data = self._connection.recv(RECEIVE_BYTES)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            finally:
                self._set_blocking()
            if not data:
                raise ChannelClosedError("the connection was closed")
            try:
                self._received.extend(self._frames.feed(data))
            except FrameTooLargeError as error:
                raise ChannelClosedError(str(error)) from None
        try:
            return self._decode(self._received.popleft())
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise ChannelClosedError(f"a message that is none of ours ({error})") from None

    def admit(self) -> None:
        """Receives messages of all sizes that the group has, from now on: the other host belongs to it."""
        self._frames.max_bytes = messages.MAX_BYTES

    def finish(self) -> None:
        """Ends what is sent; what was sent before still arrives."""
        with contextlib.suppress(OSError):  # it was closed
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the connection: a receiver on either side wakes up."""
        with contextlib.suppress(OSError):  # it was closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _set_blocking(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            self._connection.settimeout(None)
