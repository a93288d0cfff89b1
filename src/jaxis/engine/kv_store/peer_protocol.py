"""What engines say to each other that hand over blocks: MessagePack of fixed types in frames, over TCP.

    producer                              consumer
    Challenge(nonce)                 ->
                                     <-   Ask(namespace, nonce, digests)
    Have(which of these), or Declined ->
                                     <-   Want(which of these)
    Block, Block, ...                ->

A producer that still computes the prompt has what it will have, too: it sends each block as soon as it is there, and
Coming in between, so that the consumer knows that it still computes.

Each message but Challenge, Declined and Coming has a checksum, keyed by what both sides know and both nonces: so it
also shows that its sender is one of them, and that it belongs here. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.host.deadline import Deadline
from jaxis.host.frames import FrameReader, FrameTooLargeError, frame

# Of what an engine sends that hands out no blocks: the digests of a million tokens.
MAX_ASK_BYTES = 4 << 20
NONCE_BYTES = 32
DIGEST_BYTES = hashlib.sha256().digest_size
# Of a message around the bytes of a block.
OVERHEAD_BYTES = 1 << 10
_RECEIVE_BYTES = 1 << 20
_CHECKSUM_BYTES = 32
_TURN_SECONDS = 0.25
# How long a block may be computed, at most.
MAX_COMING_SECONDS = 120.0


class PeerError(Exception):
    """The other side has ended, does not speak this protocol, or is too slow."""


class PeerTimeoutError(PeerError):
    """It is too slow."""


class Challenge(msgspec.Struct, tag="challenge"):
    """The first message, of the side that has blocks."""

    nonce: bytes


class Ask(msgspec.Struct, tag="ask"):
    """Which of these blocks are there?

    Attributes:
      namespace: What their bytes depend on, besides their tokens.
      nonce: This side's.
      digests: Of a prompt's blocks, one after the other.
      transfer_id: Of the request that computes the prompt, which may come after this; empty: it came before.
      checksum: Of all this.
    """

    namespace: str
    nonce: bytes
    digests: bytes
    transfer_id: str
    checksum: bytes

    def parts(self) -> Sequence[bytes]:
        """What the checksum is over."""
        texts = (self.namespace, self.transfer_id)
        return (*(text.encode("utf-8", "surrogatepass") for text in texts), self.digests)


class Declined(msgspec.Struct, tag="declined"):
    """There will be no blocks."""

    reason: str


class Have(msgspec.Struct, tag="have"):
    """Which blocks are there, or coming: bits for each group and digest, `numpy.packbits` of bool [groups, digests]."""

    known: bytes
    checksum: bytes


class Want(msgspec.Struct, tag="want"):
    """Which blocks to send, in this order: int32 [n, 2], of groups and indices of digests."""

    places: bytes
    checksum: bytes


class Block(msgspec.Struct, tag="block"):
    """A block; without data, if it is no longer there."""

    group: int
    index: int
    data: bytes | None
    checksum: bytes


class Coming(msgspec.Struct, tag="coming"):
    """The next block is still being computed."""


Message = Challenge | Ask | Declined | Have | Want | Block | Coming
Kind = TypeVar("Kind", Challenge, Ask, Have, Want, Block)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Challenge | Ask | Declined | Have | Want | Block | Coming)


def decode(data: bytes) -> Message:
    """A message from a frame's data.

    Raises:
      ValueError: It is none.
    """
    message = _decoder.decode(data)
    if isinstance(message, Challenge | Ask) and len(message.nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce of {len(message.nonce)} bytes")
    return message


class Seal:
    """Makes and checks the checksums of one conversation.

    Args:
      token: What both sides know.
      challenge: The producer's nonce.
      nonce: The consumer's.
    """

    def __init__(self, token: bytes, challenge: bytes, nonce: bytes) -> None:
        self._key = hashlib.blake2b(challenge + nonce, key=hashlib.blake2b(token).digest()).digest()

    def checksum(self, kind: type, *parts: bytes) -> bytes:
        """Of a message of this kind with these contents."""
        checksum = hashlib.blake2b(kind.__name__.encode(), key=self._key, digest_size=_CHECKSUM_BYTES)
        for part in parts:
            checksum.update(len(part).to_bytes(8, "little"))
            checksum.update(part)
        return checksum.digest()

    def check(self, message: Ask | Have | Want | Block, *parts: bytes) -> None:
        """Raises PeerError if a message with these contents has another checksum."""
        if not hmac.compare_digest(message.checksum, self.checksum(type(message), *parts)):
            raise PeerError(f"the checksum of {type(message).__name__} is wrong: other bytes, or another token_file")


def block_parts(key: BlockKey, data: bytes | None) -> Sequence[bytes]:
    """What the checksum of a block is over."""
    group, digest = key
    head = group.to_bytes(4, "little") + digest
    return (head,) if data is None else (head, data)


def new_nonce() -> bytes:
    """Bytes that nobody can guess, and that never come again."""
    return secrets.token_bytes(NONCE_BYTES)


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
        raise ValueError("places that are none")
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


class PeerConnection:
    """Sends and receives messages until a deadline. For one thread.

    Args:
      connection: Connected.
      max_bytes: Of a message that is received.
      deadline: When all must be over. Whoever ends it early waits for a fraction of a second.
      patience: `Coming` puts the deadline off to so many seconds from then.
    """

    def __init__(self, connection: socket.socket, max_bytes: int, deadline: Deadline, patience: float = 0.0) -> None:
        self._connection, self._deadline, self._patience = connection, deadline, patience
        self._frames = FrameReader(max_bytes)
        self._received: list[bytes] = []
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
          PeerError: The other side has ended, or takes nothing.
        """
        try:
            self._connection.settimeout(self._time_left(self._deadline))
            self._connection.sendall(frame(_encoder.encode(message)))
        except TimeoutError as error:
            raise PeerTimeoutError(str(error)) from None
        except OSError as error:
            raise PeerError(str(error)) from None

    def receive(self, kind: type[Kind], seconds: float | None = None) -> Kind:
        """The next message.

        Args:
          kind: What it must be.
          seconds: How long it may take, at most; None: until the deadline.

        Raises:
          PeerError: Nothing came in time, something else did, or the other side has ended or refuses.
        """
        until = self._deadline if seconds is None else Deadline(min(self._deadline.left, seconds))
        try:
            longest = Deadline(MAX_COMING_SECONDS)
            while isinstance(message := self._next(until), Coming) and longest.left:
                self._deadline.put_off(self._patience)
        except TimeoutError as error:
            raise PeerTimeoutError(str(error)) from None
        except (OSError, FrameTooLargeError) as error:
            raise PeerError(str(error)) from None
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise PeerError(f"a message that is none of ours ({error})") from None
        if isinstance(message, Declined):
            raise PeerError(f"declined: {message.reason[:200]}")
        if not isinstance(message, kind):
            raise PeerError(f"{type(message).__name__} in place of {kind.__name__}")
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _next(self, until: Deadline) -> Message:
        while not self._received:
            # In short turns: another thread may end the deadline.
            self._connection.settimeout(min(self._time_left(until), _TURN_SECONDS))
            try:
                data = self._connection.recv(_RECEIVE_BYTES)
            except TimeoutError:
                continue
            if not data:
                raise PeerError("the connection was closed")
            self._received += self._frames.feed(data)
        return decode(self._received.pop(0))

    def _time_left(self, until: Deadline) -> float:
        if not min(until.left, self._deadline.left):
            raise TimeoutError("timed out")
        return until.left or _TURN_SECONDS
