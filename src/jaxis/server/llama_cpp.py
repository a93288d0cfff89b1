"""llama-server's own /completion: its request, its job, and its answer, whole or streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.sampling_params import INTEGER_BOUNDS, NUMBER_BOUNDS
from jaxis.server.context import Context, check_generates
from jaxis.server.generation.answer_format import AnswerFormat
from jaxis.server.generation.answer_reader import AnswerCounts
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import PlainPrompts
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.generation.timings import Timings
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, TokenId, bounded, is_none, new_id
from jaxis.server.http.errors import DataEvents, ErrorDialect
from jaxis.server.http.openapi import GENERATION_RESPONSES
from jaxis.server.http.sse import sse_event
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.openai.not_applied import OTHER_SERVERS_FIELDS
from jaxis.server.protocol import Protocol
from jaxis.server.respond import respond

router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_generates)])
ERRORS = ErrorDialect(
    prefixes=("/completion", "/completions"),
    fields={
        "repetition_penalty": "repeat_penalty",
        "max_tokens": "n_predict",
        "thinking_token_budget": "reasoning_budget_tokens",
    },
)
_SAME_NAME = ("temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty", "ignore_eos")
# llama-server's fields that change answers and are not applied here.
_NOT_APPLIED = (
    *("typical_p", "top_n_sigma", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability", "samplers"),
    "lora_request",
)
_ASK_OPENAIS = "ask /v1/completions"


class LlamaCompletionRequest(LenientModel):
    """A prompt to continue.

    Attributes:
      prompt: A string, or token ids.
      n_predict: Most tokens to generate; None or -1 continues until the model stops or its context is full.
      seed: Seed; a negative one counts as missing.
      repeat_penalty: Repetition penalty; `repetition_penalty` in jaxis.
      reasoning_budget_tokens: Most thinking tokens, `thinking_token_budget` in jaxis; -1 for no limit.
      grammar: Grammar of the answer, in GBNF or in Lark's syntax.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {
        **{name: OTHER_SERVERS_FIELDS[name] for name in _NOT_APPLIED},
        "n_probs": NotApplied((0,), _ASK_OPENAIS),
        "logit_bias": NotApplied(([], {}), _ASK_OPENAIS),
        "cache_prompt": NotApplied((True,)),  # prefixes are always cached
        "id_slot": NotApplied((-1,)),  # slots are not numbered
    }

    model: str | None = None
    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    stream: bool | None = None
    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    temperature: float | None = bounded(NUMBER_BOUNDS["temperature"])
    top_k: Annotated[int, Field(le=MAX_INT32)] | None = None
    top_p: float | None = bounded(NUMBER_BOUNDS["top_p"])
    min_p: float | None = bounded(NUMBER_BOUNDS["min_p"])
    seed: Annotated[int, Field(le=INTEGER_BOUNDS["seed"].high)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = bounded(NUMBER_BOUNDS["repetition_penalty"])
    presence_penalty: float | None = bounded(NUMBER_BOUNDS["presence_penalty"])
    frequency_penalty: float | None = bounded(NUMBER_BOUNDS["frequency_penalty"])
    ignore_eos: bool | None = None
    reasoning_budget_tokens: int | None = bounded(INTEGER_BOUNDS["thinking_token_budget"], high=MAX_INT32)
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None


class LlamaSettings(BaseModel):
    """Settings of an answer that its request may not know: the seed, which may have been drawn."""

    seed: int | None


class LlamaCompletion(BaseModel):
    """A whole answer, or an event of a stream. Fields that events leave out are in the last event.

    Attributes:
      content: The text, or its new part.
      tokens: Token ids of `content`.
      stop: True if the answer has ended.
      stop_type: Reason of the end: "eos", "limit" or "word".
      stopping_word: Stop string that ended the answer; "" if none did.
      tokens_predicted, tokens_evaluated: Generated tokens so far; tokens of the prompt.
      tokens_cached: Prompt tokens found in the prefix cache.
      truncated: False, since prompts are never cut.
    """

    index: Literal[0] = 0
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | None = Field(default=None, exclude_if=is_none)
    stop_type: str | None = Field(default=None, exclude_if=is_none)
    stopping_word: str | None = Field(default=None, exclude_if=is_none)
    tokens_cached: int | None = Field(default=None, exclude_if=is_none)
    truncated: Literal[False] | None = Field(default=None, exclude_if=is_none)
    generation_settings: LlamaSettings | None = Field(default=None, exclude_if=is_none)
    timings: Timings | None = Field(default=None, exclude_if=is_none)


def llama_job(request: LlamaCompletionRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request.

    Raises:
      RequestError: A field cannot be honoured.
    """
    model = model.named(request.model)
    if request.n_predict == 0:
        raise RequestError("=0 generates nothing: send at least 1", param="n_predict")
    if request.grammar and request.json_schema is not None:
        raise RequestError("constrains the answer, and so does grammar: send only one", param="json_schema")
    grammar = None
    if request.grammar:
        grammar = AnswerGrammar.of("grammar", grammar=request.grammar)
    elif request.json_schema is not None:
        grammar = AnswerGrammar.of("json_schema", json_schema=request.json_schema)
    settings = {
        **{name: getattr(request, name) for name in _SAME_NAME},
        # This limit is past the end of any context, so only the context limits the answer.
        "max_tokens": MAX_INT32 if request.n_predict in (None, -1) else request.n_predict,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "seed": None if request.seed is None or request.seed < 0 else request.seed,
        "repetition_penalty": request.repeat_penalty,
        "thinking_token_budget": request.reasoning_budget_tokens,
    }
    answer = AnswerFormat(grammar=grammar)
    return make_job(
        new_id("cmpl"), model, PlainPrompts(prompts=[request.prompt]), settings, answer, stream=request.stream
    )


class LlamaAnswer(DataEvents):
    """Writer of the answer of a job."""

    def __init__(self, job: GenerationJob) -> None:
        self._model = job.model
        self._counts = AnswerCounts()
        self._last = CompletionOutput(0)
        self._seed: int | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> LlamaCompletion:
        [output] = outputs
        self._counts.add(0, output)
        self._seed = output.seed
        [self._last] = output.outputs
        return self._ended(self._last.text, self._last.token_ids if self._last.text else [])

    def add(self, prompt: int, output: RequestOutput) -> str:  # noqa: ARG002 (there is one prompt)
        """Returns an event with the new part of the text."""
        self._counts.add(0, output)
        self._seed = output.seed
        event = ""
        for self._last in output.outputs:
            if self._last.text:
                event = sse_event(self._part(self._last.text, self._last.token_ids))
        return event

    def end(self) -> str:
        return sse_event(self._ended("", []))

    def _part(self, content: str, tokens: list[int]) -> LlamaCompletion:
        return LlamaCompletion(
            content=content,
            tokens=tokens,
            stop=False,
            tokens_predicted=self._counts.num_tokens,
            tokens_evaluated=self._counts.num_prompt_tokens,
        )

    def _ended(self, content: str, tokens: list[int]) -> LlamaCompletion:
        counts, last = self._counts, self._last
        word = last.stop_reason if isinstance(last.stop_reason, str) else ""
        return self._part(content, tokens).model_copy(
            update={
                "stop": True,
                "model": self._model.name,
                "stop_type": "limit" if last.finish_reason == "length" else "word" if word else "eos",
                "stopping_word": word,
                "tokens_cached": counts.num_cached_tokens,
                "truncated": False,
                "generation_settings": LlamaSettings(seed=self._seed),
                "timings": Timings.of(counts),
            }
        )


@router.post("/completion", response_model=LlamaCompletion, responses=GENERATION_RESPONSES)
@router.post("/completions", response_model=LlamaCompletion, responses=GENERATION_RESPONSES, include_in_schema=False)
async def complete(body: LlamaCompletionRequest, request: Request, context: Context) -> Response:
    """Continues a prompt; see /v1/completions for all of its parameters."""
    headers = context.ignored_fields.check(body)
    job = llama_job(body, context.model)
    return await respond(request, context, job, LlamaAnswer(job), headers)


PROTOCOL = Protocol(routers=[router], errors=[ERRORS])
