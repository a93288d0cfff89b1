"""Operands of program calls for other hosts: of a vector, the elements that changed since the program's last call.

A step's vector has the block tables of its requests, which are long and hardly change: a decode changes a position and
a length for each request, and an entry of its table every `block_size` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey, LogitsKey, SampleKey, WholeKey

# At most; the largest messages have a step's vector, or the token masks of a step.
MAX_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 16

# The programs that run on several hosts.
_KEYS: dict[str, type] = {key.__name__: key for key in (ForwardKey, SampleKey, GreedyStepKey, LogitsKey, WholeKey)}


# From a follower.


class Hello(msgspec.Struct, tag=True):
    """The first message: a host asks to join the group.

    Attributes:
      rank: Which host of the group this is, from 1.
      num_hosts: The size of the group that this host was told.
      name: The machine's host name.
      facts: What must be the same on all hosts, by name.
    """

    rank: int
    num_hosts: int
    name: str
    facts: dict[str, str]


class ModelFound(msgspec.Struct, tag=True):
    """This host has the files of the model.

    Attributes:
      facts: What must be the same on all hosts, such as the files' digest, by name.
    """

    facts: dict[str, str]


class WeightsLoaded(msgspec.Struct, tag=True):
    """This host has loaded its part of the weights.

    Attributes:
      cache_bytes: Bytes that the caches of all hosts together may take, given this host's memory for its part of them.
      num_parameters: Parameters of the pipeline stages that no host of a lower rank has.
      weight_bytes: Bytes of these stages' weights, on all devices together.
    """

    cache_bytes: int
    num_parameters: int = 0
    weight_bytes: int = 0


class ProgramCompiled(msgspec.Struct, tag=True):
    """A program was compiled.

    Attributes:
      number: The program's; see `CompileProgram`.
      error: Why it could not be compiled; None if it was.
    """

    number: int
    error: str | None


class CallsMade(msgspec.Struct, tag=True):
    """Sent twice a second: a sign of life, and how far the host is.

    Attributes:
      num_calls: Calls of the leader that this host has made since the start.
    """

    num_calls: int


class Array(msgspec.Struct):
    """A NumPy array."""

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
          ValueError: `data` does not have the bytes of such an array.
        """
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class CallResult(msgspec.Struct, tag=True):
    """What a call has computed, for a leader that has no part of the last pipeline stage.

    Attributes:
      call: The call's number; all hosts count calls from 1.
      arrays: The leaves of its result.
    """

    call: int
    arrays: list[Array]


class HostFailed(msgspec.Struct, tag=True):
    """A host ends because of an exception.

    Attributes:
      kind: The name of the exception's class.
      message: Its first line.
    """

    kind: str
    message: str


# From the leader.


class GroupRefused(msgspec.Struct, tag=True):
    """The group does not start."""

    reason: str


class JoinGroup(msgspec.Struct, tag=True):
    """All hosts have come.

    Attributes:
      coordinator: The address of JAX's coordination service.
    """

    coordinator: str


class LoadModel(msgspec.Struct, tag=True):
    """Load the model.

    Attributes:
      arguments: The engine's, but for those that each host has its own of.
    """

    arguments: dict[str, Any]


class AllocateCaches(msgspec.Struct, tag=True):
    """Allocate the caches.

    Attributes:
      cache_bytes: Bytes of the caches of all hosts together.
    """

    cache_bytes: int


class CompileProgram(msgspec.Struct, tag=True):
    """Compile a program.

    Attributes:
      number: By which later messages name the program.
      kind: The name of its key's class.
      key: The key's fields.
    """

    number: int
    kind: str
    key: msgspec.Raw

    @classmethod
    def of(cls, number: int, key: ProgramKey) -> CompileProgram:
        """The message for a program's key."""
        return cls(number, type(key).__name__, msgspec.Raw(msgspec.msgpack.encode(key)))

    def program_key(self) -> ProgramKey:
        """The key again.

        Raises:
          msgspec.ValidationError: It is no key.
        """
        if self.kind not in _KEYS:
            raise msgspec.ValidationError(f"there are no programs of kind {self.kind!r}")
        return msgspec.msgpack.decode(self.key, type=_KEYS[self.kind])


class Vector(msgspec.Struct, tag=True):
    """An int32 vector of a program's call; see `operands.SentOperands`.

    Attributes:
      values: Its bytes, or those of the elements that have changed since the last call of the program.
      changed: The bytes of these elements' int32 indices; None if `values` has all elements.
    """

    values: bytes
    changed: bytes | None = None


Operand = Vector | int | None


class Run(msgspec.Struct, tag=True):
    """`Executor.run` of a compiled program.

    Attributes:
      number: The program's; see `CompileProgram`.
      operands: By `operands.SentOperands`.
    """

    number: int
    operands: list[Operand]


class Recover(msgspec.Struct, tag=True):
    """`Executor.recover`."""


class Close(msgspec.Struct, tag=True):
    """The group ends."""


Call = Run | Recover | Close
Setup = GroupRefused | JoinGroup | LoadModel | AllocateCaches | CompileProgram
Report = Hello | ModelFound | WeightsLoaded | ProgramCompiled | CallsMade | CallResult | HostFailed

ORDERS = msgspec.msgpack.Decoder(Call | Setup)
"""Decodes a message of the leader."""
REPORTS = msgspec.msgpack.Decoder(Report)
"""Decodes a message of a follower."""


# Operands of program calls for other hosts: of a vector, the elements that changed since the program's last call.
#
# A step's vector has the block tables of its requests, which are long and hardly change: a decode changes a position
# and a length for each request, and an entry of its table every `block_size` steps.


HostOperand = np.ndarray | int | None


class SentOperands:
    """What the followers have of each program's last vectors; the leader's side."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], np.ndarray] = {}

    def encode(self, number: int, operands: Sequence[HostOperand]) -> list[Operand]:
        """What to send for a call's operands.

        Args:
          number: Of the program.
          operands: Integers, None, and int32 vectors. A vector is kept; the caller must not write to it before
            the next call of the program has been encoded.
        """
        return [
            self._encode((number, index), operand) if isinstance(operand, np.ndarray) else operand
            for index, operand in enumerate(operands)
        ]

    def _encode(self, place: tuple[int, int], vector: np.ndarray) -> Vector:
        last = self._last.get(place)
        self._last[place] = vector
        if last is not None and last.shape == vector.shape:
            indices = np.flatnonzero(last != vector).astype(np.int32)
            if 2 * indices.size < vector.size:
                return Vector(vector[indices].tobytes(), indices.tobytes())
        return Vector(vector.tobytes())


class ReceivedOperands:
    """Rebuilds what `SentOperands` encodes; a follower's side."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], np.ndarray] = {}

    def decode(self, number: int, operands: Sequence[Operand]) -> list[HostOperand]:
        """The operands that program `number` is called with.

        Raises:
          ValueError: A vector's changes do not fit the program's last vector.
        """
        return [
            self._decode((number, index), operand) if isinstance(operand, Vector) else operand
            for index, operand in enumerate(operands)
        ]

    def _decode(self, place: tuple[int, int], message: Vector) -> np.ndarray:
        values = np.frombuffer(message.values, np.int32)
        if message.changed is not None:
            indices, last = np.frombuffer(message.changed, np.int32), self._last.get(place)
            if last is None or indices.size != values.size or np.any((indices < 0) | (indices >= last.size)):
                raise ValueError(f"changes to a vector of program {place[0]} that do not go with its last one")
            # Devices may still read the last vector.
            changed, values = values, last.copy()
            values[indices] = changed
        self._last[place] = values
        return values
