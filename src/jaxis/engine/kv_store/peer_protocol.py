"""The messages by which engines hand over blocks.

    producer                              consumer
    Ready(namespace)                 ->
                                     <-   Ask(digests)
    Have(which of these)             ->
                                     <-   Want(which of these)
    Block, Block, ...                ->

`Have` includes the blocks of a prompt that the producer still computes. It sends each such block as soon as it is
there, and `Coming` in between, so that the consumer knows that it is still at work.

Between machines, both sides show certificates, and TLS encrypts and authenticates all messages; see `host.tls`.
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

# Largest message of a consumer: the digests of a million tokens.
MAX_ASK_BYTES = 4 << 20
DIGEST_BYTES = hashlib.sha256().digest_size
# Largest size of a message beside the bytes of its block.
OVERHEAD_BYTES = 1 << 10
_TURN_SECONDS = 0.25
# Longest wait for a block that is being computed.
MAX_COMING_SECONDS = 120.0


class PeerError(Exception):
    """The other side has ended, does not speak this protocol, or is too slow."""


class PeerTimeoutError(PeerError):
    """The other side is too slow."""


class Ready(msgspec.Struct, tag="ready"):
    """The producer's first message: a digest of all that the bytes of its blocks depend on, besides their tokens."""

    namespace: str


class Ask(msgspec.Struct, tag="ask"):
    """The consumer's question which of these blocks are there.

    Attributes:
      digests: Digests of a prompt's blocks, one after the other.
      transfer_id: Id of the request that computes the prompt, which may arrive later; empty if it came before.
    """

    digests: bytes
    transfer_id: str


class Have(msgspec.Struct, tag="have"):
    """The blocks that are there or coming, `numpy.packbits` of bool [groups, digests]."""

    known: bytes


class Want(msgspec.Struct, tag="want"):
    """The blocks to send, in this order: int32 [n, 2], groups and indices of digests."""

    places: bytes


class Block(msgspec.Struct, tag="block"):
    """A block; without data if it is no longer there."""

    group: int
    index: int
    data: bytes | None


class Coming(msgspec.Struct, tag="coming"):
    """The next block is still being computed."""


Message = Ready | Ask | Have | Want | Block | Coming
Kind = TypeVar("Kind", Ready, Ask, Have, Want, Block)
MESSAGES = msgspec.msgpack.Decoder(Ready | Ask | Have | Want | Block | Coming)


def split_digests(data: bytes) -> list[bytes]:
    """Returns the digests of an `Ask`.

    Raises:
      ValueError: The last digest is incomplete.
    """
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes of digests")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


def pack_places(places: Sequence[tuple[int, int]]) -> bytes:
    """Encodes groups and indices as the bytes of a `Want`."""
    return np.array(places, "<i4").tobytes()


def unpack_places(data: bytes, num_groups: int, num_digests: int) -> list[tuple[int, int]]:
    """Decodes the groups and indices of a `Want`.

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
    """Encodes bool [groups, digests] as the bytes of a `Have`."""
    return np.packbits(known).tobytes()


def unpack_known(data: bytes, num_groups: int, num_digests: int) -> np.ndarray:
    """Decodes the bool [groups, digests] of a `Have`.

    Raises:
      ValueError: The message has another size.
    """
    count = num_groups * num_digests
    if len(data) != -(-count // 8):
        raise ValueError(f"{len(data)} bytes for {count} blocks")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool).reshape(num_groups, num_digests)


class PeerChannel:
    """Sends and receives messages until a deadline. For one thread.

    Args:
      connection: An open connection, with TLS or without.
      max_bytes: Largest size of a received message.
      deadline: End of the conversation. A thread that ends it early waits for a fraction of a second.
      patience: Seconds from each `Coming` to which the deadline is put off.
    """

    def __init__(self, connection: socket.socket, max_bytes: int, deadline: Deadline, patience: float = 0.0) -> None:
        self._channel = Channel(connection, MESSAGES, max_bytes)
        self._deadline, self._patience = deadline, patience

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          PeerError: The other side has ended, or does not read.
        """
        try:
            self._channel.send(message, self._time_left(self._deadline))
        except TimeoutError as error:
            raise PeerTimeoutError(str(error)) from None
        except ChannelClosedError as error:
            raise PeerError(str(error)) from None

    def receive(self, kind: type[Kind], seconds: float | None = None) -> Kind:
        """Receives the next message.

        Args:
          kind: Expected type of the message.
          seconds: Longest wait; None: until the deadline.

        Raises:
          PeerError: No message came in time, another one came, or the other side has ended.
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
