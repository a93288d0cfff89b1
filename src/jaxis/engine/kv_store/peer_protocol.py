"""What engines say to each other that hand over blocks.

    producer                              consumer
    Ready(namespace)                 ->
                                     <-   Ask(digests)
    Have(which of these)             ->
                                     <-   Want(which of these)
    Block, Block, ...                ->

A producer that still computes the prompt has what it will have, too: it sends each block as soon as it is there, and
Coming in between, so that the consumer knows that it still computes.

Between machines, both sides show certificates, and TLS encrypts and checks all that they send; see `host.tls`.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from jaxis.host.channel import Channel, ChannelClosedError
from jaxis.host.threads import Deadline

# Of what an engine sends that hands out no blocks: the digests of a million tokens.
MAX_ASK_BYTES = 4 << 20
DIGEST_BYTES = hashlib.sha256().digest_size
# Of a message around the bytes of a block.
OVERHEAD_BYTES = 1 << 10
_TURN_SECONDS = 0.25
# How long a block may be computed, at most.
MAX_COMING_SECONDS = 120.0


class PeerError(Exception):
    """The other side has ended, does not speak this protocol, or is too slow."""


class PeerTimeoutError(PeerError):
    """It is too slow."""


class Ready(msgspec.Struct, tag="ready"):
    """The first message, of the side that has blocks: what their bytes depend on, besides their tokens."""

    namespace: str


class Ask(msgspec.Struct, tag="ask"):
    """Which of these blocks are there?

    Attributes:
      digests: Of a prompt's blocks, one after the other.
      transfer_id: Of the request that computes the prompt, which may come after this; empty: it came before.
    """

    digests: bytes
    transfer_id: str


class Have(msgspec.Struct, tag="have"):
    """Which blocks are there, or coming: bits for each group and digest, `numpy.packbits` of bool [groups, digests]."""

    known: bytes


class Want(msgspec.Struct, tag="want"):
    """Which blocks to send, in this order: int32 [n, 2], of groups and indices of digests."""

    places: bytes


class Block(msgspec.Struct, tag="block"):
    """A block; without data, if it is no longer there."""

    group: int
    index: int
    data: bytes | None


class Coming(msgspec.Struct, tag="coming"):
    """The next block is still being computed."""


Message = Ready | Ask | Have | Want | Block | Coming
Kind = TypeVar("Kind", Ready, Ask, Have, Want, Block)
MESSAGES = msgspec.msgpack.Decoder(Ready | Ask | Have | Want | Block | Coming)


def split_digests(data: bytes) -> list[bytes]:
    """The digests of an `Ask`.

    Raises:
      ValueError: A part is missing.
    """
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes of digests")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


def pack_places(places: Sequence[tuple[int, int]]) -> bytes:
    """Groups and indices as the bytes of a `Want`."""
    return np.array(places, "<i4").tobytes()


def unpack_places(data: bytes, num_groups: int, num_digests: int) -> list[tuple[int, int]]:
    """The groups and indices of a `Want`.

    Raises:
      ValueError: There are no such blocks, or one comes twice.
    """
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes of places")
    places = [(group, index) for group, index in np.frombuffer(data, "<i4").reshape(-1, 2).tolist()]
    if not all(0 <= group < num_groups and 0 <= index < num_digests for group, index in places):
        raise ValueError("places that do not exist")
    if len(set(places)) < len(places):
        raise ValueError("a place twice")
    return places


def pack_known(known: np.ndarray) -> bytes:
    """bool [groups, digests] as the bytes of a `Have`."""
    return np.packbits(known).tobytes()


def unpack_known(data: bytes, num_groups: int, num_digests: int) -> np.ndarray:
    """The bool [groups, digests] of a `Have`.

    Raises:
      ValueError: It is of another size.
    """
    count = num_groups * num_digests
    if len(data) != -(-count // 8):
        raise ValueError(f"{len(data)} bytes for {count} blocks")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool).reshape(num_groups, num_digests)


class PeerChannel:
    """Sends and receives messages until a deadline. For one thread.

    Args:
      connection: Connected, with TLS or without.
      max_bytes: Of a message that is received.
      deadline: When all must be over. A thread that ends it early waits for a fraction of a second.
      patience: `Coming` puts the deadline off to so many seconds from then.
    """

    def __init__(self, connection: socket.socket, max_bytes: int, deadline: Deadline, patience: float = 0.0) -> None:
        self._channel = Channel(connection, MESSAGES, max_bytes)
        self._deadline, self._patience = deadline, patience

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          PeerError: The other side has ended, or takes nothing.
        """
        try:
            self._channel.send(message, self._time_left(self._deadline))
        except TimeoutError as error:
            raise PeerTimeoutError(str(error)) from None
        except ChannelClosedError as error:
            raise PeerError(str(error)) from None

    def receive(self, kind: type[Kind], seconds: float | None = None) -> Kind:
        """The next message.

        Args:
          kind: What it must be.
          seconds: How long it may take, at most; None: until the deadline.

        Raises:
          PeerError: Nothing came in time, something else did, or the other side has ended.
        """
        until = self._deadline if seconds is None else Deadline(min(self._deadline.left, seconds))
        longest = Deadline(MAX_COMING_SECONDS)
        try:
            while isinstance(message := self._next(until), Coming) and longest.left:
                self._deadline.put_off(self._patience)
        except TimeoutError as error:
            raise PeerTimeoutError(str(error)) from None
        except ChannelClosedError as error:
            raise PeerError(str(error)) from None
        if not isinstance(message, kind):
            raise PeerError(f"{type(message).__name__} in place of {kind.__name__}")
        return message

    def _next(self, until: Deadline) -> Message:
        while True:
            # In short turns: another thread may end the deadline.
            with contextlib.suppress(TimeoutError):
                return self._channel.receive(min(self._time_left(until), _TURN_SECONDS))

    def _time_left(self, until: Deadline) -> float:
        if not min(until.left, self._deadline.left):
            raise PeerTimeoutError("timed out")
        return until.left or _TURN_SECONDS
