"""/v1/completions: its request, its job, and its answer, whole or streamed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.sampling_params import INTEGER_BOUNDS, TOP_LOGPROBS_BOUNDS
from jaxis.server.generation.answer_format import AnswerFormat
from jaxis.server.generation.answer_reader import AnswerCounts
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import PlainPrompts
from jaxis.server.generation.routed_experts import routed_experts_npy
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.generation.timings import Timings
from jaxis.server.http.body import MAX_INT32, NotApplied, TokenId, bounded, is_none, new_id
from jaxis.server.http.errors import DONE, DataEvents
from jaxis.server.http.sse import TextEvents, sse_event
from jaxis.server.openai.chat_schema import Prediction
from jaxis.server.openai.fields import Answer, GenerationRequest, StructuredFields, Usage
from jaxis.server.openai.job_parameters import answer_grammar, check_stream_options, sampling_settings, token_limit
from jaxis.server.openai.logprobs import CompletionLogprobs, LogprobFormatter
from jaxis.server.openai.not_applied import NOT_FOR_COMPLETIONS
from jaxis.tokenizer import Tokenizer, TokenPlaces

MAX_PROMPTS = 4096
DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(GenerationRequest, StructuredFields):
    """A prompt, or a batch of prompts, to complete.

    Attributes:
      prompt: A string, token ids, or a list of either.
      max_tokens: Most tokens to generate; None stands for 16. 0 with `echo` only reads the prompt.
      max_completion_tokens: Name of the same limit in chat requests; some proxies send both.
      echo: True puts the prompt before the completion, in the text and in the log-probabilities.
      logprobs: Number of most likely tokens with a log-probability at each position.
      add_special_tokens: False adds no beginning-of-sequence token to a string.
      best_of: Number of candidates; only the value of `n` is accepted.
      suffix: Text after the completion; not supported.
      prediction: Expected completion of every prompt, as in a chat request; OpenAI's completions have no such field.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = GenerationRequest.not_applied | NOT_FOR_COMPLETIONS

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    max_completion_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    echo: bool | None = None
    logprobs: int | None = bounded(TOP_LOGPROBS_BOUNDS)
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    prediction: Prediction | None = None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list, also if there is only one."""
        # The type of the first element is that of all.
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)


class CompletionChoice(BaseModel):
    """One completion, or a chunk's addition to it; `index` counts through the prompts and their `n` completions.

    Attributes:
      prompt_token_ids, token_ids: Token ids, if the request sets `return_token_ids`; in a stream, the prompt's come
        with the first chunk.
      seed: Seed of the completion, if there are several prompts.
      routed_experts: Experts of the tokens, in the form of `routed_experts_npy`; in a stream, in the choice's last
        chunk.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    routed_experts: str | None = Field(default=None, exclude_if=is_none)
    seed: int | None = Field(default=None, exclude_if=is_none)


class CompletionResponse(Answer):
    """A whole answer, or a chunk of one.

    Attributes:
      kv_transfer_params: Parameters as in `ChatCompletionResponse`. In a stream, the last chunk of each prompt has
        them.
    """

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = Field(default=None, exclude_if=is_none)


def completion_job(request: CompletionRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request for completions. Raises RequestError if a field cannot be honoured."""
    model = model.named(request.model)
    check_stream_options(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError(f"={request.best_of} is not supported: leave it out, and choose from n", param="best_of")
    max_tokens = token_limit(request.max_tokens, request.max_completion_tokens)
    if max_tokens == 0 and not request.echo:
        raise RequestError("=0 generates nothing: send at least 1, or echo=true", param="max_tokens")
    settings = sampling_settings(request) | {
        "max_tokens": DEFAULT_MAX_TOKENS if max_tokens is None else max(1, max_tokens),
        "logprobs": request.logprobs,
        "prediction": None if request.prediction is None else request.prediction.text,
    }
    if request.echo and request.logprobs is not None:
        settings["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    answer = AnswerFormat(grammar=answer_grammar(request))
    return make_job(
        new_id("cmpl"),
        model,
        PlainPrompts(
            prompts=request.prompts(),
            add_special_tokens=request.add_special_tokens is not False,
            cache_salt=request.cache_salt,
        ),
        settings,
        answer,
        priority=request.priority,
        stream=request.stream,
    )


class CompletionAnswer(DataEvents):
    def __init__(self, request: CompletionRequest, job: GenerationJob) -> None:
        options = request.stream_options
        self._request = request
        self._job = job
        self._formatter = LogprobFormatter(job.model.tokenizer, bool(request.return_tokens_as_token_ids))
        self._counts = AnswerCounts()
        self._ends_with_usage = options is not None and bool(options.include_usage)
        self._always_tells_usage = options is not None and bool(options.continuous_usage_stats)
        self._begun: set[int] = set()  # choices
        self._places: dict[int, TokenPlaces] = {}  # per choice
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}  # per prompt
        self._returns_ids = bool(request.return_token_ids)
        self._num_ended = 0  # prompts
        self._plain: dict[int, TextEvents] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        choices = []
        for prompt, output in enumerate(outputs):
            self._trim(output)
            self._counts.add(prompt, output)
            choices += [self._choice(prompt, output, completion) for completion in output.outputs]
        # The transfer parameters are the same for each prompt, since they do not name blocks.
        return self._answer(
            choices,
            Usage.of(self._counts),
            kv_transfer_params=outputs[0].kv_transfer_params,
            seed=outputs[0].seed if len(outputs) == 1 else None,
            timings=Timings.of(self._counts),
        )

    def add(self, prompt: int, output: RequestOutput) -> str:
        self._trim(output)
        self._counts.add(prompt, output)
        if not self._always_tells_usage and not self._returns_ids and (text := _plain_text(output)):
            number = prompt * self._job.params.n + output.outputs[0].index
            if number in self._plain:
                return self._plain[number].event(text)
            self._plain[number] = TextEvents(functools.partial(self._text_chunk, number))
        choices = [self._choice(prompt, output, completion) for completion in output.outputs]
        choices = [each for each in choices if each.text or each.logprobs or each.finish_reason or each.token_ids]
        if not choices:
            return ""
        usage = Usage.of(self._counts) if self._always_tells_usage else None
        ended: dict[str, Any] = {}
        if output.finished:  # all choices of the prompt
            self._num_ended += 1
            ended["kv_transfer_params"] = output.kv_transfer_params
            if self._job.prompts.num_prompts == 1:
                ended["seed"] = output.seed
            if self._num_ended == self._job.prompts.num_prompts and not self._ends_with_usage:
                ended["timings"] = Timings.of(self._counts)
        return sse_event(self._answer(choices, usage, **ended))

    def end(self) -> str:
        if not self._ends_with_usage:
            return DONE
        return sse_event(self._answer([], Usage.of(self._counts), timings=Timings.of(self._counts))) + DONE

    def _text_chunk(self, number: int, text: str) -> CompletionResponse:
        return self._answer([CompletionChoice(index=number, text=text)], None)

    def _answer(self, choices: list[CompletionChoice], usage: Usage | None, **more: Any) -> CompletionResponse:
        return CompletionResponse(
            id=self._job.request_id,
            model=self._job.model.name,
            system_fingerprint=self._job.model.fingerprint,
            choices=choices,
            usage=usage,
            **more,
        )

    def _trim(self, output: RequestOutput) -> None:
        """Removes the one token that the engine generates even if none was requested."""
        if self._request.max_tokens == 0:
            for completion in output.outputs:
                completion.text, completion.token_ids = "", []
                completion.finish_reason, completion.stop_reason = "length", None
                if completion.logprobs is not None:
                    completion.logprobs = []

    def _choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """Returns a choice, or a step's addition to it."""
        number = prompt * self._job.params.n + completion.index
        is_first = number not in self._begun
        self._begun.add(number)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        prompt_text, prompt_offsets = self._echoed(output) if self._request.echo and is_first else ("", [])
        logprobs = None
        if completion.logprobs is not None:
            if is_first and (tokenizer := self._job.model.tokenizer) is not None:
                skips = self._job.params.skip_special_tokens
                self._places[number] = TokenPlaces(
                    tokenizer, output.prompt_token_ids, skip_special_tokens=skips, start=len(prompt_text)
                )
            logprobs = self._logprobs(number, output, completion, prompt_offsets, self._prompt_logprobs.get(prompt))
        prompt_logprobs = self._prompt_logprobs.get(prompt) if is_first else None
        if self._request.prompt_logprobs is None:
            prompt_logprobs = None
        return CompletionChoice(
            index=number,
            text=prompt_text + completion.text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=None if prompt_logprobs is None else self._formatter.prompt(prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._returns_ids and is_first else None,
            token_ids=completion.token_ids if self._returns_ids else None,
            routed_experts=routed_experts_npy(completion),
            seed=output.seed if completion.finished and self._job.prompts.num_prompts > 1 else None,
        )

    def _logprobs(
        self,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        prompt_offsets: list[int],
        prompt_logprobs: list | None,
    ) -> CompletionLogprobs:
        token_ids, positions = completion.token_ids, list(completion.logprobs or [])
        offsets, _ = self._places[number].add(token_ids) if number in self._places else ([0] * len(token_ids), "")
        if prompt_offsets:
            token_ids = output.prompt_token_ids + token_ids
            positions = (prompt_logprobs or []) + positions
        logprobs = self._formatter.completion(token_ids, positions, prompt_offsets + offsets)
        logprobs.kept_mass = completion.kept_mass
        return logprobs

    def _echoed(self, output: RequestOutput) -> tuple[str, list[int]]:
        """Returns the prompt's text, and the offsets of its tokens in the text."""
        token_ids, tokenizer = output.prompt_token_ids, self._job.model.tokenizer
        if tokenizer is None:
            return "", [0] * len(token_ids)
        if output.prompt is not None:
            return output.prompt, _string_offsets(output.prompt, token_ids, tokenizer)
        places = TokenPlaces(tokenizer, skip_special_tokens=False)
        offsets, text = places.add(token_ids)
        # The completion's text has the rest of an incomplete character.
        return text + places.end() if self._request.max_tokens == 0 else text, offsets


def _string_offsets(prompt: str, token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Returns offsets of tokens in the string, which may differ from their decoded text, as in Unicode's form."""
    ids, places = tokenizer.encode_with_places(prompt)
    num_added = len(token_ids) - len(ids)  # special tokens, around the string's own
    first = next(start for start in range(num_added + 1) if token_ids[start:][: len(ids)] == ids)
    return [0] * first + [start for start, _ in places] + [len(prompt)] * (num_added - first)


def _plain_text(output: RequestOutput) -> str | None:
    """Returns the text of an output that adds only text to one completion; None for other outputs."""
    if len(output.outputs) != 1 or output.outputs[0].logprobs or output.outputs[0].finished:
        return None
    return output.outputs[0].text
