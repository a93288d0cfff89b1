"""What the server's process and the engine's tell each other: MessagePack frames with fixed types, no pickle."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

import jaxis.errors
from jaxis.engine.frontend.engine_thread import EngineStats, Submission
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar, Grammar, ReasoningTokens
from jaxis.errors import EngineError, JaxisError
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxis.engine.setup import BuiltEngine

_LENGTH = struct.Struct("<Q")
_DEFAULT_PARAMS = SamplingParams()


class Delay(msgspec.Struct, array_like=True):
    """What comes before the form of an answer, or instead of it; see `DelayedGrammar`."""

    reasoning: ReasoningTokens | None
    alternatives: list[int]


class Add(msgspec.Struct, array_like=True, tag="add"):
    """Queue a request; see `Submission`. `params` holds what differs from the defaults."""

    request_id: str
    prompt: TokenizedPrompt
    params: dict[str, Any]
    priority: int
    final_only: bool
    delay: Delay | None


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End a request."""

    request_id: str


Command = Add | Abort


class Built(msgspec.Struct, tag="built"):
    """The engine is there; see `EngineInfo`."""

    folder: str
    default_sampling_params: dict[str, Any]
    max_model_len: int
    max_num_seqs: int
    num_cache_tokens: int
    vocab_size: int
    eos_token_ids: list[int]
    model_type: str | None


class Failed(msgspec.Struct, tag="failed"):
    """An error of the engine as a whole."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Tells of an error."""
        return cls(type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> JaxisError:
        """The error again; one that is none of jaxis's own becomes an EngineError."""
        kind = getattr(jaxis.errors, self.kind, None)
        return kind(self.message) if kind is not None else EngineError(f"{self.kind}: {self.message}")


class Completion(msgspec.Struct, array_like=True):
    """A CompletionOutput."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Delta(msgspec.Struct, array_like=True, tag="delta"):
    """A RequestOutput without the prompt, which the other side knows."""

    request_id: str
    outputs: list[Completion]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    first_scheduled_time: float | None
    first_token_time: float | None


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """A request ended in an error."""

    request_id: str
    kind: str
    message: str


class Step(msgspec.Struct, tag="step"):
    """What a step brought."""

    results: list[Delta | Refused]


class Alive(msgspec.Struct, tag="alive"):
    """Sent once in a while."""

    is_making_progress: bool
    stats: EngineStats


Report = Built | Failed | Step | Alive

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def to_frame(message: Command | Report) -> bytes:
    """A message with its length before it."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def decode_command(data: bytes | memoryview) -> Command:
    """A command from a frame's data."""
    return _command_decoder.decode(data)


def decode_report(data: bytes | memoryview) -> Report:
    """A report from a frame's data."""
    return _report_decoder.decode(data)


class FrameReader:
    """Cuts what a socket brings into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each frame that is complete now."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            stop = start + _LENGTH.size + length
            if len(self._buffer) < stop:
                break
            yield bytes(memoryview(self._buffer)[start + _LENGTH.size : stop])
            start = stop
        del self._buffer[:start]


def params_to_fields(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, as plain data."""
    fields = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(_DEFAULT_PARAMS, field.name)
    }
    if params.structured_outputs is not None:
        kind = params.structured_outputs.kind
        fields["structured_outputs"] = {kind: getattr(params.structured_outputs, kind)}
    return fields


def params_from_fields(fields: dict[str, Any]) -> SamplingParams:
    """The parameters again."""
    if (form := fields.get("structured_outputs")) is not None:
        fields = fields | {"structured_outputs": StructuredOutputs(**form)}
    return SamplingParams(**fields)


def add_command(new: Submission, request_id: str) -> Add:
    """The command that submits a request, under an id that is unique over there."""
    delay = None
    if isinstance(new.grammar, DelayedGrammar):
        delay = Delay(new.grammar.reasoning, list(new.grammar.alternatives))
    prompt = TokenizedPrompt(new.prompt.text, list(new.prompt.token_ids), new.prompt.cache_salt)
    return Add(request_id, prompt, params_to_fields(new.params), new.priority, new.final_only, delay)


def delayed(grammar: Grammar, delay: Delay | None) -> Grammar:
    """The compiled form, with what comes before it."""
    return grammar if delay is None else DelayedGrammar(grammar, delay.reasoning, delay.alternatives)


def to_delta(output: RequestOutput) -> Delta:
    """An output as a message."""
    return Delta(
        output.request_id,
        [
            Completion(new.index, new.text, new.token_ids, new.logprobs, new.finish_reason, new.stop_reason)
            for new in output.outputs
        ],
        output.finished,
        output.prompt_logprobs,
        output.num_cached_tokens,
        output.first_scheduled_time,
        output.first_token_time,
    )


def from_delta(delta: Delta, request: Submission) -> RequestOutput:
    """The output again."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt.text,
        prompt_token_ids=request.prompt.token_ids,
        prompt_logprobs=delta.prompt_logprobs,
        outputs=[
            CompletionOutput(
                index=new.index,
                text=new.text,
                token_ids=new.token_ids,
                logprobs=new.logprobs,
                finish_reason=new.finish_reason,
                stop_reason=new.stop_reason,
            )
            for new in delta.outputs
        ],
        finished=delta.finished,
        num_cached_tokens=delta.num_cached_tokens,
        first_scheduled_time=delta.first_scheduled_time,
        first_token_time=delta.first_token_time,
    )


def built_report(built: BuiltEngine) -> Built:
    """What the server needs to know of an engine."""
    engine = built.engine
    config, blocks = engine.vllm_config, engine.scheduler.block_manager
    return Built(
        folder=str(config.model_config.model),
        default_sampling_params=params_to_fields(built.default_sampling_params),
        max_model_len=engine.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        num_cache_tokens=blocks.num_blocks * blocks.block_size,
        vocab_size=engine.runner.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        model_type=config.model_config.hf_config.get("model_type"),
    )
