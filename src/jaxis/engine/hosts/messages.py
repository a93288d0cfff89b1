"""What the leader of a group of hosts and its followers say to each other: MessagePack of fixed types, no pickle."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec
import numpy as np

from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey, LogitsKey, SampleKey, WholeKey

# A step's vector, or token masks of a step, at most. Nobody who belongs here sends more.
MAX_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 16

_KEYS: dict[str, type] = {key.__name__: key for key in (ForwardKey, SampleKey, GreedyStepKey, LogitsKey, WholeKey)}


# From a follower.


class Hello(msgspec.Struct, tag="hello"):
    """The first message.

    Attributes:
      rank: Which host of the group this is, from 1.
      num_hosts: Of the group, as this host was told.
      name: The machine's.
      facts: What must be the same on all hosts, by name.
    """

    rank: int
    num_hosts: int
    name: str
    facts: dict[str, str]


class Found(msgspec.Struct, tag="found"):
    """What must be the same on all hosts once the model's files were found; see `Hello.facts`."""

    facts: dict[str, str]


class Loaded(msgspec.Struct, tag="loaded"):
    """The weights are loaded.

    Attributes:
      cache_bytes: That the caches of all hosts together may take, for what this one has for its part of them.
      num_parameters: Of the pipeline stages that no host of a lower rank has.
      weight_bytes: Of these stages, on all devices together.
    """

    cache_bytes: int
    num_parameters: int = 0
    weight_bytes: int = 0


class Prepared(msgspec.Struct, tag="prepared"):
    """A program was compiled, or why not."""

    number: int
    error: str | None


class Alive(msgspec.Struct, tag="alive"):
    """Sent twice a second: how many calls this host has made."""

    num_calls: int


class Array(msgspec.Struct):
    """An array of numbers."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        """The message for an array."""
        return cls(array.dtype.name, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """The array again.

        Raises:
          ValueError: The bytes are not those of such an array.
        """
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Computed(msgspec.Struct, tag="computed"):
    """What a call has computed that the leader, which has no part of the last pipeline stage, wants to know.

    Attributes:
      call: Its number; all hosts count calls from 1.
      arrays: The leaves of its result.
    """

    call: int
    arrays: list[Array]


class Failed(msgspec.Struct, tag="failed"):
    """This host cannot go on."""

    kind: str
    message: str


# From the leader.


class Refused(msgspec.Struct, tag="refused"):
    """The group does not start."""

    reason: str


class Join(msgspec.Struct, tag="join"):
    """All hosts are there: where JAX's processes meet."""

    coordinator: str


class Build(msgspec.Struct, tag="build"):
    """The arguments of the engine, without those of a place."""

    arguments: dict[str, Any]


class Allocate(msgspec.Struct, tag="allocate"):
    """How many bytes the caches of all hosts together may take."""

    cache_bytes: int


class Prepare(msgspec.Struct, tag="prepare"):
    """Compile a program, which later messages call by its number."""

    number: int
    kind: str
    key: msgspec.Raw

    @classmethod
    def of(cls, number: int, key: Hashable) -> Prepare:
        """The message for a program's key."""
        return cls(number, type(key).__name__, msgspec.Raw(_encoder.encode(key)))

    def program_key(self) -> Hashable:
        """The key again.

        Raises:
          msgspec.ValidationError: It is no key.
        """
        if self.kind not in _KEYS:
            raise msgspec.ValidationError(f"there are no programs of kind {self.kind!r}")
        return msgspec.msgpack.decode(self.key, type=_KEYS[self.kind])


class Vector(msgspec.Struct):
    """An int32 vector of a program's call; see `vectors`.

    Attributes:
      values: Its bytes, or those of the elements that have changed since the last call of the program.
      changed: The bytes of these elements' int32 indices; None if all values are here.
    """

    values: bytes
    changed: bytes | None = None


class Forward(msgspec.Struct, tag="forward"):
    """`Executor.forward`."""

    number: int
    packed: Vector


class GreedyStep(msgspec.Struct, tag="greedy"):
    """`Executor.greedy_step`."""

    number: int
    packed: Vector


class Sample(msgspec.Struct, tag="sample"):
    """`Executor.sample`."""

    number: int
    parameters: Vector | None


class Whole(msgspec.Struct, tag="whole"):
    """`Executor.whole`."""

    number: int
    input_ids: bytes
    num_tokens: int


class Logits(msgspec.Struct, tag="logits"):
    """`Executor.logits`."""

    number: int
    rows: bytes
    targets: bytes | None


class Recover(msgspec.Struct, tag="recover"):
    """`Executor.recover`."""


class Close(msgspec.Struct, tag="close"):
    """The end."""


Call = Forward | GreedyStep | Sample | Whole | Logits | Recover | Close
Setup = Refused | Join | Build | Allocate | Prepare
Report = Hello | Found | Loaded | Prepared | Alive | Computed | Failed

_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(Call | Setup)
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Call | Setup | Report) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_order(data: bytes) -> Call | Setup:
    """A message of the leader.

    Raises:
      msgspec.DecodeError: It is none.
    """
    return _order_decoder.decode(data)


def decode_report(data: bytes) -> Report:
    """A message of a follower.

    Raises:
      msgspec.DecodeError: It is none.
    """
    return _report_decoder.decode(data)


def vector(data: bytes) -> np.ndarray:
    """The int32 vector whose bytes these are."""
    return np.frombuffer(data, np.int32)
