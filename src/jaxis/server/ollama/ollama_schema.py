"""Bodies of Ollama's /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from jaxis.sampling_params import INTEGER_BOUNDS, MAX_LOGPROBS, NUMBER_BOUNDS
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, bounded, is_none
from jaxis.server.openai.logprobs import ChatPositionLogprobs

MAX_MESSAGES = 4096


def _whole(value: object) -> object:
    """40.0 as 40: Ollama takes it, and clients whose language has one type of number send it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]


class OllamaOptions(LenientModel):
    """Options of a request; those that are not listed here have no effect.

    Attributes:
      num_ctx: No effect: the context is as long as the server was started with.
      num_predict: Most tokens of the answer; none or less than 1 is no limit.
      top_k: Less than 1 is no limit.
      seed: A negative one is the server's own, as if it were left out.
      repeat_penalty: jaxis's `repetition_penalty`.
      repeat_last_n: 0 turns `repeat_penalty` off; other values have no effect: the penalty counts all tokens.
      thinking_token_budget: vLLM's: how many tokens the model may think; -1 is no limit.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {"repeat_last_n": NotApplied(neutral=(0,))}

    num_ctx: Integer | None = None
    num_predict: Annotated[Integer, Field(le=MAX_INT32)] | None = None
    temperature: float | None = bounded(NUMBER_BOUNDS["temperature"])
    top_k: Annotated[Integer, Field(le=MAX_INT32)] | None = None
    top_p: float | None = bounded(NUMBER_BOUNDS["top_p"])
    min_p: float | None = bounded(NUMBER_BOUNDS["min_p"])
    seed: Annotated[Integer, Field(le=INTEGER_BOUNDS["seed"].high)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = bounded(NUMBER_BOUNDS["repetition_penalty"])
    repeat_last_n: Integer | None = None
    presence_penalty: float | None = bounded(NUMBER_BOUNDS["presence_penalty"])
    frequency_penalty: float | None = bounded(NUMBER_BOUNDS["frequency_penalty"])
    thinking_token_budget: Annotated[Integer, Field(ge=-1, le=MAX_INT32)] | None = None


class OllamaRequest(LenientModel):
    """Fields that both routes accept.

    Attributes:
      model: A served name; none, or an empty one, is the one model there is.
      stream: None streams.
      format: "json", or a JSON schema that the answer follows; "" is free text.
      options: How to sample.
      think: Whether to reason, or how much; None is as the model's chat template does.
      keep_alive: How long the model stays loaded after the answer, where models are loaded on demand; 0, with nothing
        to answer, asks to unload it.
      truncate, shift: No effect: nothing is ever cut off; a prompt that is too long is refused.
      logprobs: Return log-probabilities.
      top_logprobs: With `logprobs`: of this many most likely tokens for each token.
    """

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: str | float | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return self.stream is not False


class OllamaFunctionCall(LenientModel):
    """A function's name, and its arguments as an object; null is an empty one."""

    index: int | None = Field(default=None, exclude_if=is_none)
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)] = Field(
        default_factory=dict
    )


class OllamaToolCall(LenientModel):
    """A call."""

    id: str | None = Field(default=None, exclude_if=is_none)
    function: OllamaFunctionCall


class OllamaMessage(LenientModel):
    """One turn. Assistant messages may come back as the server sent them.

    Attributes:
      thinking: Of an assistant: its reasoning.
      tool_calls: Of an assistant: the calls that it made.
      tool_name: Of a tool: the function that was called.
      tool_call_id: Of a tool: the call that it answers; None is the first of that name without an answer.
      images: Of a user or a tool: files of images in base64, before the content.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


class OllamaFunction(LenientModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(LenientModel):
    """A tool; only functions are supported."""

    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaChatRequest(OllamaRequest):
    """A conversation to answer.

    Attributes:
      messages: The conversation; an empty one only asks whether the model is loaded.
      tools: Functions that the model may call.
    """

    messages: list[OllamaMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer, or, with `raw`, to continue.

    Attributes:
      prompt: The prompt; an empty one only asks whether the model is loaded.
      system: A system message before it.
      raw: Continue the prompt as it is, without the chat template.
      images: Files of images in base64, before the prompt.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {
        "suffix": NotApplied(("",), "this model does not support insert: leave it out"),
        "template": NotApplied(("",), "only the server's own template is used: leave it out, or send raw=true"),
        "context": NotApplied(([],), "nothing is kept from one request to the next: send messages to /api/chat"),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaAnswerMessage(BaseModel):
    """The model's turn, or what a line adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[OllamaToolCall] | None = Field(default=None, exclude_if=is_none)


class OllamaAnswer(BaseModel):
    """Fields of a whole answer, of a line of a stream, and of its last line, which alone has those after `done`.

    Attributes:
      created_at: RFC 3339.
      done_reason: "stop", "length", or "load" or "unload" if there was nothing to answer.
      total_duration: Nanoseconds from the request's arrival to the end of the answer.
      load_duration: Of these, before the first step.
      prompt_eval_count: Tokens of the prompt, those from the prefix cache included.
      prompt_eval_duration: Nanoseconds from the first step to the first token.
      eval_count: Generated tokens.
      eval_duration: Nanoseconds from the first token to the last.
    """

    model: str
    created_at: str
    logprobs: list[ChatPositionLogprobs] | None = Field(default=None, exclude_if=is_none)
    done: bool = False
    done_reason: str | None = Field(default=None, exclude_if=is_none)
    total_duration: int | None = Field(default=None, exclude_if=is_none)
    load_duration: int | None = Field(default=None, exclude_if=is_none)
    prompt_eval_count: int | None = Field(default=None, exclude_if=is_none)
    prompt_eval_duration: int | None = Field(default=None, exclude_if=is_none)
    eval_count: int | None = Field(default=None, exclude_if=is_none)
    eval_duration: int | None = Field(default=None, exclude_if=is_none)


class OllamaChatAnswer(OllamaAnswer):
    """/api/chat's."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    """/api/generate's."""

    response: str = ""
    thinking: str | None = Field(default=None, exclude_if=is_none)


def asks_to_unload(body: Mapping[str, Any]) -> bool:
    """Whether the body of a request has nothing to answer, and asks to unload the model."""
    return body.get("keep_alive") in (0, "0", "0s") and not body.get("messages") and not body.get("prompt")
