"""Prompts of a job: a conversation that the chat template renders, or strings and token ids to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jaxis.errors import RequestError
from jaxis.prompts import TokenizedPrompt, tokenize_chat
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import messages_for_template, reserved_variable
from jaxis.tokenizer.message_order import MessageOrder, arrange_messages, move_tool_images
from jaxis.vision.prompt_images import NoImages, PromptImages, take_images

QUICK_LENGTH = 1000  # characters or token ids that are tokenized in a tenth of a millisecond
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # name in most templates, and in DeepSeek's

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation to answer, in the terms of chat templates.

    Attributes:
      operation: Name of the job in traces.
      num_prompts: Number of prompts that `tokenize` returns.
      is_quick: True if `tokenize` takes less time than handing it to a thread.
      messages: Messages with a role, a content, and the other fields that `messages_for_template` reads. A content is a
        string; for users and tools, it may also be a list of texts and of parts made by `image_part`.
      tools: Functions that the template shows, in OpenAI's format.
      variables: Additional variables of the template.
      add_generation_prompt: True if the prompt ends where the assistant's turn begins. None means True unless
        `continue_final_message`.
      continue_final_message: True if the answer continues the last message.
      cache_salt: Salt of the prefix cache; only prompts with the same salt share blocks.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    cache_salt: str | None = None

    operation: ClassVar[Operation] = "chat"
    num_prompts: ClassVar[int] = 1
    is_quick: ClassVar[bool] = False

    def tokenize(self, tokenizer: Tokenizer | None, images: PromptImages | NoImages) -> list[TokenizedPrompt]:
        """Returns the prompt.

        Args:
          tokenizer: Tokenizer of the model.
          images: Inserts images into prompts, or refuses them.

        Raises:
          RequestError: The model has no chat template, the template refuses the conversation, or an image cannot be
            read.
        """
        messages = self.messages if tokenizer is None else self._arranged(tokenizer)
        messages, sources = take_images(messages)
        prompt = tokenize_chat(messages, tokenizer, **self._template_arguments())
        prompt = TokenizedPrompt(prompt.text, prompt.token_ids, self.cache_salt)
        return [images.put(prompt, sources)]

    def render(self, tokenizer: Tokenizer) -> str:
        """Returns the prompt as a string; raises what `tokenize` raises."""
        messages, _ = take_images(self._arranged(tokenizer))
        return tokenizer.apply_chat_template(messages, **self._template_arguments())

    def _arranged(self, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Returns the messages as the template reads them, in an order that it accepts."""
        tools = self.tools or None
        template, special_tokens = tokenizer.choose_chat_template(None, tools), tokenizer.special_tokens
        order = MessageOrder.of(template, special_tokens)
        messages = messages_for_template(self.messages, tokenizer, tools=tools)
        return arrange_messages(move_tool_images(messages, template, special_tokens, order), order)

    def _template_arguments(self) -> dict[str, Any]:
        opens_turn = self.add_generation_prompt
        return {
            **self.variables,
            "add_generation_prompt": not self.continue_final_message if opens_turn is None else opens_turn,
            "continue_final_message": self.continue_final_message,
            **({"tools": self.tools} if self.tools else {}),
        }


@dataclass(frozen=True, kw_only=True)
class PlainPrompts:
    """Prompts to continue unchanged.

    Attributes:
      operation: Name of the job in traces.
      prompts: Strings, or token ids.
      add_special_tokens: True if strings get the tokenizer's beginning-of-sequence token.
      cache_salt: Salt of the prefix cache; only prompts with the same salt share blocks.
    """

    prompts: Sequence[str | list[int]]
    add_special_tokens: bool = True
    cache_salt: str | None = None

    operation: ClassVar[Operation] = "text_completion"

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def is_quick(self) -> bool:
        """True if the prompts are short in total."""
        return sum(map(len, self.prompts)) <= QUICK_LENGTH

    def tokenize(self, tokenizer: Tokenizer | None, images: PromptImages | NoImages) -> list[TokenizedPrompt]:
        """Returns the prompts, which have no images.

        Raises:
          RequestError: A prompt is a string, and the model has no tokenizer; or it is too long.
        """
        del images
        return [self._tokenized(prompt, tokenizer) for prompt in self.prompts]

    def _tokenized(self, prompt: str | list[int], tokenizer: Tokenizer | None) -> TokenizedPrompt:
        if not isinstance(prompt, str):
            return TokenizedPrompt(None, prompt, self.cache_salt)
        if tokenizer is None:
            raise RequestError("is text, and the model has no tokenizer: send token ids", param="prompt")
        token_ids = tokenizer.encode(prompt, add_special_tokens=self.add_special_tokens)
        return TokenizedPrompt(prompt, token_ids, self.cache_salt)


JobPrompts = ChatPrompt | PlainPrompts


def template_variables(given: Mapping[str, Any] | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the variables of the chat template.

    Raises:
      RequestError: A name is reserved.
    """
    variables = dict(given or {})
    if (reserved := reserved_variable(variables, tokenizer)) is not None:
        raise RequestError(f"must not set {reserved!r}: leave it out", param="chat_template_kwargs")
    return variables


def thinking_variables(is_on: bool, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the switches of reasoning that the model's chat templates read, set to `is_on`."""
    sources = template_sources(tokenizer)
    return {name: is_on for name in _THINKING_SWITCHES if name in sources}


def template_sources(tokenizer: Tokenizer | None) -> str:
    return "".join(tokenizer.chat_templates.values()) if tokenizer else ""
