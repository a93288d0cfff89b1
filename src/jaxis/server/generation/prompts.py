"""The prompts of a job: a conversation that the chat template renders, or strings and token ids to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jaxis.errors import RequestError
from jaxis.prompts import TokenizedPrompt, tokenize_chat
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import (
    MessageOrder,
    arrange_messages,
    messages_for_template,
    move_tool_images,
    reserved_variable,
)
from jaxis.vision.prompt_images import PromptImages, take_images, with_images

QUICK_LENGTH = 1000  # characters, or token ids: tokenized in a tenth of a millisecond
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # most templates' name, and DeepSeek's

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation to answer, in the words of chat templates.

    Attributes:
      operation: What traces call the job.
      num_prompts: How many prompts `tokenize` returns.
      is_quick: Whether `tokenize` takes less than handing it to a thread does.
      messages: Each has a role and its content, and what else `messages_for_template` reads. A content is one string;
        of users and tools, it may be a list of parts, texts and those of `image_part`.
      tools: The functions that the template shows, in OpenAI's format.
      variables: More variables of the template.
      add_generation_prompt: End the prompt where the assistant's turn begins; None does unless
        `continue_final_message`.
      continue_final_message: Go on with the last message in place of answering it.
      cache_salt: Only prompts with the same salt share cached prefixes.
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

    def tokenize(self, tokenizer: Tokenizer | None, images: PromptImages | None = None) -> list[TokenizedPrompt]:
        """The prompt.

        Args:
          tokenizer: The model's.
          images: Puts images into its prompts; None: they can have none.

        Raises:
          RequestError: There is no template, it refuses the conversation, or an image cannot be read.
        """
        messages = self.messages if tokenizer is None else self._arranged(tokenizer)
        messages, sources = take_images(messages)
        prompt = tokenize_chat(messages, tokenizer, **self._template_arguments())
        prompt = TokenizedPrompt(prompt.text, prompt.token_ids, self.cache_salt)
        return [with_images(prompt, sources, images)]

    def render(self, tokenizer: Tokenizer) -> str:
        """The prompt as a string; raises what `tokenize` does."""
        messages, _ = take_images(self._arranged(tokenizer))
        return tokenizer.apply_chat_template(messages, **self._template_arguments())

    def _arranged(self, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """The messages as the template reads them, in an order that it takes."""
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
    """Prompts to continue as they are.

    Attributes:
      operation: What traces call the job.
      prompts: Strings, or token ids.
      add_special_tokens: Add the tokenizer's beginning-of-sequence token to strings.
      cache_salt: Only prompts with the same salt share cached prefixes.
    """

    prompts: Sequence[str | list[int]]
    add_special_tokens: bool = True
    cache_salt: str | None = None

    operation: ClassVar[Operation] = "text_completion"

    @property
    def num_prompts(self) -> int:
        """How many there are."""
        return len(self.prompts)

    @property
    def is_quick(self) -> bool:
        """Whether all of them are short."""
        return sum(map(len, self.prompts)) <= QUICK_LENGTH

    def tokenize(self, tokenizer: Tokenizer | None, images: PromptImages | None = None) -> list[TokenizedPrompt]:
        """The prompts, which have no images.

        Args:
          tokenizer: The model's.
          images: Not used.

        Raises:
          RequestError: One is a string, and there is no tokenizer; or it is too long.
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
    """Variables of the chat template.

    Args:
      given: A request's `chat_template_kwargs`.
      tokenizer: The model's.

    Raises:
      RequestError: A name is reserved.
    """
    variables = dict(given or {})
    if (reserved := reserved_variable(variables, tokenizer)) is not None:
        raise RequestError(f"must not set {reserved!r}: leave it out", param="chat_template_kwargs")
    return variables


def thinking_variables(is_on: bool, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Those variables that the model's chat templates read and that turn reasoning on or off."""
    sources = template_sources(tokenizer)
    return {name: is_on for name in _THINKING_SWITCHES if name in sources}


def template_sources(tokenizer: Tokenizer | None) -> str:
    """The sources of the model's chat templates."""
    return "".join(tokenizer.chat_templates.values()) if tokenizer else ""
