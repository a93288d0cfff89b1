"""Request and answer bodies of Ollama's /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from jaxis.sampling_params import INTEGER_BOUNDS, MAX_LOGPROBS, NUMBER_BOUNDS
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, bounded, is_none
from jaxis.server.openai.logprobs import ChatPositionLogprobs

MAX_MESSAGES = 4096


def _whole(value: object) -> object:
    """Converts 40.0 to 40, as Ollama does: some clients' languages have only one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]


class OllamaOptions(LenientModel):
    """Options of a request; unlisted ones have no effect.

    Attributes:
      num_ctx: Without effect: the server sets the context length at its start.
      num_predict: Most tokens of the answer; None or less than 1 for no limit.
      top_k: Number of candidate tokens; less than 1 for no limit.
      seed: Seed; a negative one counts as missing.
      repeat_penalty: Repetition penalty; `repetition_penalty` in jaxis.
      repeat_last_n: Range of `repeat_penalty`; 0 turns it off, and other values have no effect: it counts all tokens.
      thinking_token_budget: Most thinking tokens, as in vLLM; -1 for no limit.
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
      model: Served name; None or "" for the server's only model.
      stream: True or None streams the answer.
      format: Constraint on the answer: "json" or a JSON schema; "" for free text.
      think: Switch or effort of reasoning; None leaves it to the chat template.
      keep_alive: Time that the model stays loaded after the answer, if models are loaded on demand; 0 without a prompt
        unloads it.
      truncate, shift: Without effect: nothing is cut off, and a prompt that is too long is refused.
      top_logprobs: Number of most likely tokens with a log-probability at each position; needs `logprobs`.
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
        return self.stream is not False


class OllamaFunctionCall(LenientModel):
    """Name of a function, and its arguments as an object; null stands for an empty object."""

    index: int | None = Field(default=None, exclude_if=is_none)
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)] = Field(
        default_factory=dict
    )


class OllamaToolCall(LenientModel):
    id: str | None = Field(default=None, exclude_if=is_none)
    function: OllamaFunctionCall


class OllamaMessage(LenientModel):
    """One turn. Assistant messages may come back as the server sent them.

    Attributes:
      thinking: Reasoning of an assistant.
      tool_calls: Calls by an assistant.
      tool_name: Name of the called function, in a tool's message.
      tool_call_id: Id of the answered call, in a tool's message; None selects the first unanswered call of that name.
      images: Image files in base64, which precede the content of a user or tool.
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
      messages: The conversation; an empty one only loads the model.
      tools: Functions that the model may call.
    """

    messages: list[OllamaMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """A prompt to answer or, with `raw`, to continue.

    Attributes:
      prompt: The prompt; an empty one only loads the model.
      system: System message before the prompt.
      raw: True continues the prompt unchanged, without the chat template.
      images: Image files in base64, which precede the prompt.
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
    """The model's turn, or a line's addition to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[OllamaToolCall] | None = Field(default=None, exclude_if=is_none)


class OllamaAnswer(BaseModel):
    """Fields of a whole answer and of a line of a stream. Only its last line has the fields after `done`.

    Attributes:
      created_at: Time in RFC 3339.
      done_reason: Finish reason: "stop", "length", or "load" or "unload" if the request has no prompt.
      total_duration: Nanoseconds from the request's arrival to the end of the answer.
      load_duration: Nanoseconds from the arrival to the first step.
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
    """Answer of /api/chat."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    """Answer of /api/generate."""

    response: str = ""
    thinking: str | None = Field(default=None, exclude_if=is_none)


def asks_to_unload(body: Mapping[str, Any]) -> bool:
    """Returns whether a request's body has no prompt and asks to unload the model."""
    return body.get("keep_alive") in (0, "0", "0s") and not body.get("messages") and not body.get("prompt")
