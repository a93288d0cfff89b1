"""vLLM's /inference/v1/generate: token ids in, token ids and log-probabilities out.

Source of the wire form: vllm/entrypoints/scale_out/token_in_token_out/protocol.py (vLLM 0.33).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.sampling_params import INTEGER_BOUNDS, TOP_LOGPROBS_BOUNDS
from jaxis.server.generation.answer_format import AnswerFormat
from jaxis.server.generation.answer_reader import AnswerCounts
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import PlainPrompts
from jaxis.server.generation.routed_experts import routed_experts_npy
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.generation.timings import Timings
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, TokenId, bounded, is_none, new_id
from jaxis.server.http.errors import DONE, DataEvents, ErrorDialect
from jaxis.server.http.sse import sse_event
from jaxis.server.openai.fields import SamplingFields, StreamOptions, StructuredOutputsParams, Usage
from jaxis.server.openai.job_parameters import sampling_settings, structured_grammar
from jaxis.server.openai.logprobs import LogprobFormatter, finite

_NO_IMAGES = NotApplied(({},), "token ids take no images here: send those to /v1/chat/completions")


class TokenSamplingParams(SamplingFields):
    """vLLM's SamplingParams that are implemented; others are refused by name.

    Attributes:
      max_tokens: Most tokens to generate; None continues until the model stops or its context is full.
      logprobs: Number of most likely tokens with a log-probability at each position.
      structured_outputs: Constraint on the text from its first token.
      detokenize: Accepted without effect. Text is made if the request asks for it or has stop strings.
    """

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    logprobs: int | None = bounded(TOP_LOGPROBS_BOUNDS)
    structured_outputs: StructuredOutputsParams | None = None
    num_speculative_tokens: int | None = bounded(INTEGER_BOUNDS["num_speculative_tokens"], high=MAX_INT32)
    detokenize: bool | None = None


class GenerateRequest(LenientModel):
    """A prompt as token ids, and parameters of its completion.

    Attributes:
      request_id: Id of the request, which the answer repeats.
      output_mode: Content of the answer; "text" adds text.
      return_token_ids: True returns the prompt's ids, too.
      kv_transfer_params: Parameters of the KV transfer, as in a chat request.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        "features": _NO_IMAGES,
        "content_parts": NotApplied(([],), _NO_IMAGES.advice),
        "token_offsets": NotApplied(),
        "lora_request": NotApplied((), "adapters are not supported here: leave it out"),
        # Grammars apply from the first token here.
        "reasoning_ended": NotApplied((True,), "structured_outputs apply from the first token: leave it out"),
        "prompt": NotApplied((), "send token_ids, or call /v1/completions"),
        "messages": NotApplied((), "render them with /v1/chat/completions/render, and send token_ids"),
        "max_tokens": NotApplied((), "send sampling_params.max_tokens"),
        "temperature": NotApplied((), "send sampling_params.temperature"),
    }

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: TokenSamplingParams = TokenSamplingParams.model_construct()
    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    kv_transfer_params: dict[str, Any] | None = None


class GenerateLogprob(BaseModel):
    """A token's log-probability. `token` repeats the id, for clients of older versions."""

    token_id: int
    token: str
    logprob: float
    rank: int


class GeneratePosition(GenerateLogprob):
    """A generated token, followed by the most likely tokens at its position, by rank.

    Attributes:
      kept_mass: Kept probability mass; see `CompletionOutput`.
    """

    top_logprobs: list[GenerateLogprob]
    kept_mass: float | None = Field(default=None, exclude_if=is_none)


class GenerateLogprobs(BaseModel):
    """Log-probabilities with one entry for each generated token."""

    content: list[GeneratePosition]


class GenerateChoice(BaseModel):
    """One of `n` answers, or a chunk's addition to it.

    Attributes:
      routed_experts: Experts of the tokens, in the form of `routed_experts_npy`; in a stream, in the choice's last
        chunk.
    """

    index: int
    token_ids: list[int]
    text: str | None = Field(default=None, exclude_if=is_none)
    logprobs: GenerateLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = Field(default=None, exclude_if=is_none)


class GenerateResponse(BaseModel):
    """An answer, or a chunk of one.

    Attributes:
      seed, timings: Fields as in `Answer`.
    """

    request_id: str
    model: str
    created: int = Field(default_factory=lambda: int(time.time()))
    output_mode: Literal["tokens", "text"] = "tokens"
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = None
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    usage: Usage | None = Field(default=None, exclude_if=is_none)
    kv_transfer_params: dict[str, Any] | None = None
    system_fingerprint: str | None = None
    seed: int | None = Field(default=None, exclude_if=is_none)
    timings: Timings | None = Field(default=None, exclude_if=is_none)


GENERATE_ERRORS = ErrorDialect(
    prefixes=("/inference/v1/generate",),
    fields={
        **{f"{name}": f"sampling_params.{name}" for name in TokenSamplingParams.model_fields},
        "prompt": "token_ids",
    },
)
"""OpenAI's errors, with this endpoint's names of fields."""


def generate_job(request: GenerateRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request.

    Raises:
      RequestError: A field cannot be honoured.
    """
    model = model.named(request.model)
    params = request.sampling_params
    if request.stream_options is not None and not request.stream:
        raise RequestError("needs stream=true: add it, or leave the options out", param="stream_options")
    grammar: AnswerGrammar | None = None
    if params.structured_outputs is not None:
        grammar = structured_grammar("sampling_params.structured_outputs", params.structured_outputs)
    settings = sampling_settings(params) | {
        "max_tokens": MAX_INT32 if params.max_tokens is None else params.max_tokens,
        "logprobs": params.logprobs,
        "num_speculative_tokens": params.num_speculative_tokens,
        "detokenize": request.output_mode == "text" or bool(params.stop),
    }
    if request.kv_transfer_params:
        settings["extra_args"] = {"kv_transfer_params": request.kv_transfer_params}
    answer = AnswerFormat(grammar=grammar)
    return make_job(
        request.request_id or new_id("gen"),
        model,
        PlainPrompts(prompts=[request.token_ids], cache_salt=request.cache_salt),
        settings,
        answer,
        priority=request.priority,
        stream=request.stream,
    )


class GenerateAnswer(DataEvents):
    def __init__(self, request: GenerateRequest, job: GenerationJob) -> None:
        options = request.stream_options
        self._request, self._job = request, job
        self._counts = AnswerCounts()
        self._formatter = LogprobFormatter(job.model.tokenizer)
        self._ends_with_usage = options is not None and bool(options.include_usage)
        self._has_begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> GenerateResponse:
        [output] = outputs
        self._counts.add(0, output)
        return self._response(output, usage=Usage.of(self._counts), **self._ended(output))

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        self._counts.add(0, output)
        return sse_event(self._response(output, **(self._ended(output) if output.finished else {})))

    def end(self) -> str:
        """Returns the token counts, if requested, and the stream's end."""
        if not self._ends_with_usage:
            return DONE
        usage = GenerateResponse(
            request_id=self._job.request_id, model=self._job.model.name, choices=[], usage=Usage.of(self._counts)
        )
        return sse_event(usage) + DONE

    def _response(self, output: RequestOutput, **more: Any) -> GenerateResponse:
        if not self._has_begun:
            self._has_begun = True
            if self._request.return_token_ids:
                more["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._formatter.prompt(output.prompt_logprobs)
        return GenerateResponse(
            request_id=self._job.request_id,
            model=self._job.model.name,
            output_mode=self._request.output_mode or "tokens",
            choices=[self._choice(completion) for completion in output.outputs],
            system_fingerprint=self._job.model.fingerprint,
            **more,
        )

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "kv_transfer_params": output.kv_transfer_params,
            "seed": output.seed,
            "timings": Timings.of(self._counts),
        }

    def _choice(self, completion: CompletionOutput) -> GenerateChoice:
        return GenerateChoice(
            index=completion.index,
            token_ids=completion.token_ids,
            text=completion.text if self._request.output_mode == "text" else None,
            logprobs=_logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            routed_experts=routed_experts_npy(completion),
        )


def _logprobs(completion: CompletionOutput) -> GenerateLogprobs | None:
    if completion.logprobs is None:
        return None
    content = []
    for index, entries in enumerate(completion.logprobs):
        tokens = [_token(token_id, logprob) for token_id, logprob in entries.items()]
        mass = None if completion.kept_mass is None else completion.kept_mass[index]
        content.append(GeneratePosition(**tokens[0].model_dump(), top_logprobs=tokens, kept_mass=mass))
    return GenerateLogprobs(content=content)


def _token(token_id: int, logprob: Logprob) -> GenerateLogprob:
    value = finite(logprob.logprob)
    return GenerateLogprob(token_id=token_id, token=f"token_id:{token_id}", logprob=value, rank=logprob.rank)
