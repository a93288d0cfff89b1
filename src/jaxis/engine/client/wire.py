"""The protocol between the server process and the engine process: MessagePack frames of fixed types, no pickle."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from jaxis import errors
from jaxis.engine.client.engine_client import EngineStats, TokenDelta
from jaxis.engine.grammar.recipe import GrammarRecipe
from jaxis.errors import EngineError, JaxisError, RateLimitError, RequestError
from jaxis.host.channel import decode_array
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

# Errors that are made of their message alone.
_ERRORS: dict[str, type[JaxisError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, JaxisError) and not issubclass(kind, RequestError | RateLimitError)
}


class AddRequest(msgspec.Struct, tag="add"):
    """The command to queue a request. The engine's process compiles its grammar again.

    Attributes:
      request_id: An id that was never used before.
      prompt: The prompt.
      params: Parameters of sampling and stopping.
      priority: Priority; the lower value is served first.
      client: Client of the request, as in `LLMEngine.add_request`.
      final_only: True to return everything in one output at the end.
      grammar: Recipe of its grammar, which the server's process has compiled in time; None if it has none.
    """

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int = 0
    client: str | None = None
    final_only: bool = False
    grammar: GrammarRecipe | None = None


class AbortRequest(msgspec.Struct, tag="abort"):
    """The command to end a request."""

    request_id: str


class Call(msgspec.Struct, tag="call"):
    """The command to call a function of the engine's process, by its name in the table of calls.

    Attributes:
      call_id: Number that comes back with the result.
      name: Name of the function.
      arguments: Its arguments.
      waits: True if later commands wait until the function has read what it reads.
    """

    call_id: int
    name: str
    arguments: list[Any] = []
    waits: bool = False


class CancelCall(msgspec.Struct, tag="cancel"):
    """The command to drop a call whose result nobody waits for, if it has not ended."""

    call_id: int


Command = AddRequest | AbortRequest | Call | CancelCall


class LoadPlanned(msgspec.Struct, tag="planned"):
    """The bytes of memory that the engine will take. It waits for a line on stdin before it reads its weights."""

    num_bytes: int


class EngineReady(msgspec.Struct, tag="ready"):
    """The report that the engine is built. `info` is an `EngineInfo`, of the type of its `EngineKind`."""

    info: Any


class Failure(msgspec.Struct):
    """An error; `param` is that of a RequestError."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        if isinstance(error, RequestError):
            return cls(RequestError.__name__, error.message, error.param)
        return cls(type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> JaxisError:
        """Rebuilds the error; one of a type that is not jaxis's own becomes an EngineError."""
        if self.kind == RequestError.__name__:
            return RequestError(self.message, param=self.param)
        error = _ERRORS.get(self.kind)
        return EngineError(f"{self.kind}: {self.message}") if error is None else error(self.message)


class EngineFailed(Failure, tag="failed"):
    """An error of the engine as a whole."""


class CallDone(msgspec.Struct):
    """The result of a `Call`, or its failure."""

    call_id: int
    value: Any = None
    failure: Failure | None = None


class EngineOutputs(msgspec.Struct, tag="step"):
    """The results of a step or a command.

    Attributes:
      outputs: Additions to requests, without their prompts, as from `DeltaTracker.take`.
      deltas: Additions to requests that consist of text and tokens only, as from `DeltaTracker.take_tokens`.
      errors: (request id, error) for each request that failed.
      calls: Results of calls.
    """

    outputs: list[RequestOutput] = []
    deltas: list[TokenDelta] = []
    errors: list[tuple[str, Failure]] = []
    calls: list[CallDone] = []


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The state of the engine, sent several times a second."""

    is_making_progress: bool
    stats: EngineStats


Report = LoadPlanned | EngineReady | EngineFailed | EngineOutputs | Heartbeat

COMMANDS = msgspec.msgpack.Decoder(Command)
"""Decoder of the commands of the server's process."""
REPORTS = msgspec.msgpack.Decoder(Report, dec_hook=decode_array)
"""Decoder of the reports of the engine's process."""
