"""Messages between the leader of a group of hosts and its followers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey, LogitsKey, SampleKey, WholeKey

# Limit of a message. The largest ones hold a step's vector or its token masks.
MAX_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 16

# Programs that run on several hosts.
_KEYS: dict[str, Any] = {key.__name__: key for key in (ForwardKey, SampleKey, GreedyStepKey, LogitsKey, WholeKey)}


class Hello(msgspec.Struct, tag=True):
    """A follower's first message: it asks to join the group.

    Attributes:
      rank: The follower's rank in the group, from 1.
      num_hosts: Size of the group, as this host was configured.
      name: Host name of the machine.
      facts: Versions and settings that must be equal on all hosts, by name.
    """

    rank: int
    num_hosts: int
    name: str
    facts: dict[str, str]


class ModelFound(msgspec.Struct, tag=True):
    """A follower has found the files of the model.

    Attributes:
      facts: Properties that must be equal on all hosts, such as the files' digest, by name.
    """

    facts: dict[str, str]


class WeightsLoaded(msgspec.Struct, tag=True):
    """A follower has loaded its part of the weights.

    Attributes:
      cache_bytes: Largest size of all hosts' caches together for which this host has memory for its part.
      num_parameters: Parameters of the pipeline stages that no host of a lower rank has.
      weight_bytes: Size of these stages' weights, on all devices together.
    """

    cache_bytes: int
    num_parameters: int = 0
    weight_bytes: int = 0


class ProgramCompiled(msgspec.Struct, tag=True):
    """A follower has compiled a program, or failed to.

    Attributes:
      number: The program's number in `CompileProgram`.
      error: Reason of the failure; None on success.
    """

    number: int
    error: str | None


class CallsMade(msgspec.Struct, tag=True):
    """A follower's heartbeat, sent twice a second.

    Attributes:
      num_calls: Number of the leader's calls that this host has made since the start.
    """

    num_calls: int


class Array(msgspec.Struct):
    """A NumPy array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Array:
        """Encodes an array."""
        return cls(array.dtype.name, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """Decodes the array.

        Raises:
          ValueError: The size of `data` does not fit the shape.
        """
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class CallResult(msgspec.Struct, tag=True):
    """The result of a call, sent to a leader that has no part of the last pipeline stage.

    Attributes:
      call: Number of the call; all hosts count calls from 1.
      arrays: Leaves of the result.
    """

    call: int
    arrays: list[Array]


class HostFailed(msgspec.Struct, tag=True):
    """A follower ends because of an exception.

    Attributes:
      kind: Name of the exception's class.
      message: First line of the exception's message.
    """

    kind: str
    message: str


class GroupRefused(msgspec.Struct, tag=True):
    """The leader's refusal to start the group."""

    reason: str


class JoinGroup(msgspec.Struct, tag=True):
    """The leader's order to meet, once all hosts have connected.

    Attributes:
      coordinator: Address of JAX's coordination service.
    """

    coordinator: str


class LoadModel(msgspec.Struct, tag=True):
    """The leader's order to load the model.

    Attributes:
      arguments: Arguments of the engine, except those that each host sets for itself.
    """

    arguments: dict[str, Any]


class AllocateCaches(msgspec.Struct, tag=True):
    """The leader's order to allocate the caches.

    Attributes:
      cache_bytes: Size of all hosts' caches together.
    """

    cache_bytes: int


class CompileProgram(msgspec.Struct, tag=True):
    """The leader's order to compile a program.

    Attributes:
      number: Number that later messages use for the program.
      kind: Class name of the program's key.
      key: Fields of the key.
    """

    number: int
    kind: str
    key: msgspec.Raw

    @classmethod
    def of(cls, number: int, key: ProgramKey) -> CompileProgram:
        """Encodes a program's key."""
        return cls(number, type(key).__name__, msgspec.Raw(msgspec.msgpack.encode(key)))

    def program_key(self) -> ProgramKey:
        """Decodes the program's key.

        Raises:
          msgspec.ValidationError: The message holds no key of a known kind.
        """
        if self.kind not in _KEYS:
            raise msgspec.ValidationError(f"there are no programs of kind {self.kind!r}")
        return msgspec.msgpack.decode(self.key, type=_KEYS[self.kind])


class Vector(msgspec.Struct, tag=True):
    """An int32 vector among the operands of a call, encoded by `operands.SentOperands`.

    Attributes:
      values: Bytes of all elements, or of those that changed since the program's last call.
      changed: Bytes of the changed elements' int32 indices; None if `values` has all elements.
    """

    values: bytes
    changed: bytes | None = None


Operand = Vector | int | None


class Run(msgspec.Struct, tag=True):
    """The leader's order to call a compiled program (`Executor.run`).

    Attributes:
      number: The program's number in `CompileProgram`.
      operands: Operands, encoded by `operands.SentOperands`.
    """

    number: int
    operands: list[Operand]


class Alive(msgspec.Struct, tag=True):
    """The leader's heartbeat in a training, whose followers have no other orders to wait for."""


class Recover(msgspec.Struct, tag=True):
    """The leader's order to recover from a failed step (`Executor.recover`)."""


class Close(msgspec.Struct, tag=True):
    """The leader's order to end."""


Call = Run | Recover | Close
Setup = GroupRefused | JoinGroup | LoadModel | AllocateCaches | CompileProgram | Alive
Report = Hello | ModelFound | WeightsLoaded | ProgramCompiled | CallsMade | CallResult | HostFailed

ORDERS = msgspec.msgpack.Decoder(Call | Setup)
"""Decoder of the leader's messages."""
REPORTS = msgspec.msgpack.Decoder(Report)
"""Decoder of the followers' messages."""
