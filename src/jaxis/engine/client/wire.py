"""The protocol between the server process and the engine process: MessagePack frames of fixed types, no pickle."""

from __future__ import annotations

import msgspec

from jaxis.engine.client.engine_change import EngineChange
from jaxis.engine.client.engine_client import (
    AdapterLoad,
    ChangeDone,
    EngineInfo,
    EngineOutputs,
    EngineStats,
    RequestState,
    Submission,
    TokenDelta,
)
from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar
from jaxis.engine.grammar.matcher import Grammar
from jaxis.engine.grammar.thinking_budget import ThinkingBudget
from jaxis.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    JaxisError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from jaxis.host.channel import decode_array
from jaxis.outputs import RequestOutput
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer

_ERRORS: dict[str, type[JaxisError]] = {
    error.__name__: error
    for error in (
        CheckpointError,
        ConfigError,
        DeadlineExceededError,
        EngineError,
        JaxisError,
        OverloadedError,
        RequestError,
        UnavailableError,
    )
}


class GrammarDelay(msgspec.Struct, array_like=True):
    """The text allowed before a grammar, or instead of it, as `DelayedGrammar` defines it."""

    marks: ReasoningMarks | None
    alternatives: list[int]

    def apply(self, grammar: CompiledGrammar, tokenizer: Tokenizer) -> DelayedGrammar:
        return DelayedGrammar(grammar, tokenizer, self.marks, self.alternatives)


class AddRequest(msgspec.Struct, tag="add"):
    """The command to queue a request, made from a `Submission`. The engine's process compiles the grammar again."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int
    client: str | None
    final_only: bool
    delay: GrammarDelay | None
    budgeted: ReasoningMarks | None

    @classmethod
    def of(cls, new: Submission) -> AddRequest:
        grammar, delay, budgeted = new.grammar, None, None
        if isinstance(grammar, ThinkingBudget):
            grammar, budgeted = grammar.grammar, grammar.marks
        if isinstance(grammar, DelayedGrammar):
            delay = GrammarDelay(grammar.marks, list(grammar.alternatives))
        return cls(new.request_id, new.prompt, new.params, new.priority, new.client, new.final_only, delay, budgeted)

    def grammar(self, compiler: GrammarCompiler) -> Grammar | None:
        """Rebuilds the grammar, which may take seconds if there are `structured_outputs`.

        Args:
          compiler: Compiler of the engine's process. The server's process has checked that the grammar compiles in
            time.
        """
        grammar: Grammar | None = None
        budget, tokenizer = self.params.thinking_token_budget, compiler.tokenizer
        if self.params.structured_outputs is not None:
            compiled = compiler.compile(self.params.structured_outputs, limited=False)
            grammar = compiled if self.delay is None or tokenizer is None else self.delay.apply(compiled, tokenizer)
        if self.budgeted is None or budget is None or tokenizer is None:
            return grammar
        grace = self.params.thinking_budget_grace_period
        return ThinkingBudget(self.budgeted, budget, tokenizer, compiler.vocab_size, grammar, grace=grace)

    def submission(self, grammar: Grammar | None) -> Submission:
        """Rebuilds the request, with its grammar as compiled here."""
        return Submission(
            self.request_id, self.prompt, self.params, self.priority, self.client, self.final_only, grammar
        )


class AbortRequest(msgspec.Struct, tag="abort"):
    """The command to end a request."""

    request_id: str


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """The command to forget every cached prefix."""


class DescribeRequests(msgspec.Struct, tag="describe"):
    """The command to report the states of all requests."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """The command to load an adapter.

    Attributes:
      call_id: Number that comes back with the result.
      source: Folder of the adapter.
      waits: True if later commands wait until the adapter is known.
    """

    call_id: int
    source: str
    waits: bool = False


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """The command to forget an adapter once nothing uses it."""

    adapter: bytes


class ChangeEngine(msgspec.Struct, tag="change"):
    """The command to change the engine: pause it, replace its weights, and the like.

    Attributes:
      call_id: Number that comes back with the result.
      change: The change.
      waits: True if later commands wait until the change is done.
    """

    call_id: int
    change: EngineChange
    waits: bool = False


Command = AddRequest | AbortRequest | ResetPrefixCache | DescribeRequests | LoadAdapter | UnloadAdapter | ChangeEngine


class LoadPlanned(msgspec.Struct, tag="planned"):
    """The bytes of memory that the engine will take. It waits for a line on stdin before it reads its weights."""

    num_bytes: int


class EngineReady(msgspec.Struct, tag="ready"):
    """The report that the engine is built."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed"):
    """An error of the engine as a whole."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> EngineFailed:
        return cls(type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> JaxisError:
        return error_of(self.kind, self.message)


class RequestFailed(msgspec.Struct):
    """A request that ended in an error; `param` is that of a RequestError."""

    request_id: str
    kind: str
    message: str
    param: str | None

    @classmethod
    def of(cls, request_id: str, error: Exception) -> RequestFailed:
        if isinstance(error, RequestError):
            return cls(request_id, RequestError.__name__, error.message, error.param)
        return cls(request_id, type(error).__name__, str(error), None)

    def error(self) -> JaxisError:
        if self.kind == RequestError.__name__:
            return RequestError(self.message, param=self.param)
        return error_of(self.kind, self.message)


class AdapterLoaded(msgspec.Struct):
    """The result of a LoadAdapter; the wire form of `AdapterLoad`."""

    call_id: int
    adapter: bytes
    failure: EngineFailed | None
    chat_template: str | None

    @classmethod
    def of(cls, load: AdapterLoad) -> AdapterLoaded:
        failure = None if load.error is None else EngineFailed.of(load.error)
        return cls(load.call_id, load.adapter, failure, load.chat_template)

    def load(self) -> AdapterLoad:
        return AdapterLoad(self.call_id, self.adapter, self.failure and self.failure.error(), self.chat_template)


class EngineChanged(msgspec.Struct):
    """The result of a ChangeEngine; the wire form of `ChangeDone`."""

    call_id: int
    fingerprint: str
    version: str | int
    failure: EngineFailed | None

    @classmethod
    def of(cls, done: ChangeDone) -> EngineChanged:
        failure = None if done.error is None else EngineFailed.of(done.error)
        return cls(done.call_id, done.fingerprint, done.version, failure)

    def done(self) -> ChangeDone:
        return ChangeDone(self.call_id, self.fingerprint, self.version, self.failure and self.failure.error())


class StepOutputs(msgspec.Struct, tag="step"):
    """The results of a step; the wire form of `EngineOutputs`."""

    outputs: list[RequestOutput]
    deltas: list[TokenDelta]
    failures: list[RequestFailed]
    states: list[RequestState] | None = None
    loads: list[AdapterLoaded] = []
    changes: list[EngineChanged] = []

    @classmethod
    def of(cls, new: EngineOutputs) -> StepOutputs:
        failures = [RequestFailed.of(request_id, error) for request_id, error in new.errors]
        loads, changes = [*map(AdapterLoaded.of, new.loads)], [*map(EngineChanged.of, new.changes)]
        return cls(new.outputs, new.deltas, failures, new.states, loads, changes)

    def engine_outputs(self) -> EngineOutputs:
        errors: list[tuple[str, Exception]] = [(failed.request_id, failed.error()) for failed in self.failures]
        loads, changes = [each.load() for each in self.loads], [each.done() for each in self.changes]
        return EngineOutputs(self.outputs, self.deltas, errors, self.states, loads, changes)


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The state of the engine, sent several times a second."""

    is_making_progress: bool
    stats: EngineStats


Report = LoadPlanned | EngineReady | EngineFailed | StepOutputs | Heartbeat

COMMANDS = msgspec.msgpack.Decoder(Command)
"""Decoder of the commands of the server's process."""
REPORTS = msgspec.msgpack.Decoder(Report, dec_hook=decode_array)
"""Decoder of the reports of the engine's process."""


def error_of(kind: str, message: str) -> JaxisError:
    """Rebuilds an error from the name of its type; a type that is not jaxis's own becomes an EngineError."""
    error = _ERRORS.get(kind)
    return EngineError(f"{kind}: {message}") if error is None else error(message)
