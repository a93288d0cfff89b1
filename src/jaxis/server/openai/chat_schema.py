"""Request and answer bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from jaxis.sampling_params import INTEGER_BOUNDS, TOP_LOGPROBS_BOUNDS
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, bounded, is_none, type_of
from jaxis.server.openai.fields import (
    Answer,
    ChatToolCall,
    ChatToolCallDelta,
    FunctionCall,
    GenerationRequest,
    NamedToolChoice,
    RefusalPart,
    StructuredFields,
    Tool,
    Usage,
)
from jaxis.server.openai.logprobs import ChatLogprobs
from jaxis.server.openai.not_applied import NOT_FOR_CHAT

MAX_MESSAGES = 4096


def _no_images(part_type: object) -> object:
    if part_type in ("image", "input_image"):
        raise ValueError(f"an image's type is image_url here, not {part_type!r}")
    return part_type


class ContentPart(LenientModel):
    type: Annotated[Literal["text"], BeforeValidator(_no_images)]
    text: str


class ImageUrl(LenientModel):
    """An image as a data: URL, such as data:image/png;base64,..."""

    url: str


class ImagePart(LenientModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(LenientModel):
    """A video in a content, as frames, which is the form of Qwen's clients.

    Attributes:
      video: A data: URL of an image for each frame.
      fps: Frames per second.
    """

    type: Literal["video"]
    video: str | list[str]
    fps: float | None = None


class VideoUrlPart(LenientModel):
    """A video in a content, as one URL data:video/jpeg;base64,FRAME,FRAME, which is the form of vLLM's clients."""

    type: Literal["video_url"]
    video_url: ImageUrl
    fps: float | None = None


_TAGS = {"image_url": "Image", "video": "Video", "video_url": "VideoUrl", "refusal": "Refusal"}
ChatPart = Annotated[
    Annotated[ContentPart, Tag("Text")]
    | Annotated[RefusalPart, Tag("Refusal")]
    | Annotated[ImagePart, Tag("Image")]
    | Annotated[VideoPart, Tag("Video")]
    | Annotated[VideoUrlPart, Tag("VideoUrl")],
    Discriminator(lambda value: _TAGS.get(type_of(value), "Text")),
]


class ChatMessage(LenientModel):
    """One turn. Assistant messages may come back as the server sent them.

    Attributes:
      tool_calls: Calls by an assistant.
      tool_call_id: Id of the call that a tool's message answers.
      reasoning_content, reasoning: Reasoning of an assistant, under either of the names in use.
      refusal: Text of an assistant's message without content.
      function_call: Single call by an assistant, in the form before `tool_calls`; a message of the role "function"
        answers it.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        "prefix": NotApplied((False,), "send continue_final_message"),
        "images": NotApplied(([],), "send parts of type image_url in content"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ChatPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: FunctionCall | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if isinstance(part, ContentPart | RefusalPart))
        return self.content or self.refusal or ""


class Prediction(LenientModel):
    """Expected content of the answer, such as the file that it edits."""

    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest, StructuredFields):
    """A conversation to answer.

    Attributes:
      max_completion_tokens, max_tokens: Most tokens to generate, under the new and the old name; None continues until
        the model stops or its context is full.
      top_logprobs: Number of most likely tokens with a log-probability at each position; needs `logprobs`.
      add_generation_prompt: True if the prompt ends where the assistant's turn begins. None means True unless
        `continue_final_message`.
      continue_final_message: True continues the last message instead of answering it.
      chat_template_kwargs: Additional variables of the chat template.
      echo: True puts the continued message before its continuation; needs `continue_final_message`.
      tools: Functions that the model may call.
      tool_choice: Choice of the tool: "auto" (the default with tools) allows calls, "required" demands one, "none"
        forbids them; a named tool must be called.
      parallel_tool_calls: False keeps only the first call of an answer.
      reasoning_effort: Reasoning effort, as a variable of the chat template or one of the server's budgets; other
        values are refused.
      include_reasoning: False leaves the reasoning out of the answer.
      modalities: Kinds of output; only ["text"].
      prediction: Expected answer. It changes no answer, but speeds up similar ones if the engine speculates by lookup.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = GenerationRequest.not_applied | NOT_FOR_CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    max_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = bounded(TOP_LOGPROBS_BOUNDS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    include_reasoning: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Prediction | None = None


class AssistantMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ChatToolCall] | None = Field(default=None, exclude_if=is_none)


class ChatChoice(BaseModel):
    """One of `n` answers.

    Attributes:
      routed_experts: Experts of the tokens, in the form of `routed_experts_npy`.
    """

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    routed_experts: str | None = Field(default=None, exclude_if=is_none)


class ChatCompletionResponse(Answer):
    """A whole answer.

    Attributes:
      kv_transfer_params: Parameters by which another server finds the prompt's blocks here, if the request asked for
        them.
      prompt_token_ids: Token ids of the prompt, if the request sets `return_token_ids`.
    """

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None = Field(default=None, exclude_if=is_none)
    kv_transfer_params: dict[str, Any] | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class ChatDelta(BaseModel):
    """A chunk's addition to a message."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ChatToolCallDelta] | None = Field(default=None, exclude_if=is_none)


class ChatChunkChoice(BaseModel):
    """A chunk's addition to one of `n` answers.

    Attributes:
      routed_experts: Experts of the tokens, in the form of `routed_experts_npy`; in the chunk that ends the answer.
    """

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    routed_experts: str | None = Field(default=None, exclude_if=is_none)


class ChatCompletionChunk(Answer):
    """A part of a streamed answer.

    Attributes:
      kv_transfer_params: Parameters as in a whole answer; in the last chunk of the last choice.
      prompt_token_ids: Token ids of the prompt, if the request sets `return_token_ids`; in the first chunk.
    """

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
