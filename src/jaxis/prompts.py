"""What a user gives as prompts, read into token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt ready for the engine.

    Attributes:
      text: What it was written as; None if it was given as token ids.
      token_ids: Not checked against the model's vocabulary.
      cache_salt: Only requests with the same salt share cached prefixes.
    """

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one, many as a list.

    Raises:
      RequestError: It is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {type(prompts).__name__}; give a text, a list of token ids, or a list of those")
    items = list(prompts)
    if items and all(isinstance(item, int | np.integer) for item in items):
        return [items]
    return items


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None, where: str) -> TokenizedPrompt:
    """Reads one prompt.

    Args:
      prompt: A text, token ids, or a dict with one of "prompt" and "prompt_token_ids", and optionally "cache_salt".
      tokenizer: The checkpoint's, if it has one.
      where: The prompt's name in an error.

    Raises:
      RequestError: The prompt is none of these, or is text and there is no tokenizer.
    """
    cache_salt = None
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - _KEYS:
            raise RequestError(f"{where} has unknown keys {sorted(map(str, unknown))}; known: {sorted(_KEYS)}")
        if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError(f"{where} needs exactly one of 'prompt' and 'prompt_token_ids'")
        cache_salt = prompt.get("cache_salt")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"{where} has the cache_salt {cache_salt!r}; give a text")
        key = "prompt" if "prompt" in prompt else "prompt_token_ids"
        prompt = prompt[key]
        if isinstance(prompt, str) != (key == "prompt"):
            expected = "a text" if key == "prompt" else "a list of token ids"
            raise RequestError(f"{where}: {key!r} is {type(prompt).__name__}; give {expected}")
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise RequestError(f"{where} is {type(prompt).__name__}; give a text or a list of token ids")
        return TokenizedPrompt(None, prompt, cache_salt)
    if tokenizer is None:
        raise RequestError(f"{where} is text, and the checkpoint has no tokenizer: give a list of token ids")
    return TokenizedPrompt(prompt, tokenizer.encode(prompt), cache_salt)


def as_conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation as a list of one, many as a list.

    Raises:
      RequestError: It is neither.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is {type(messages).__name__}; give a list of {{'role': ..., 'content': ...}}, or a list of those"
        )
    items = list(messages)
    return [items] if items and isinstance(items[0], Mapping) else items


def is_conversation(prompt: Prompt | Sequence[Message]) -> bool:
    """Whether it is a list of messages, as against a prompt."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def tokenize_chat(messages: Sequence[Message], tokenizer: Tokenizer | None, **template: Any) -> TokenizedPrompt:
    """Renders one conversation through the chat template; `template` holds `Tokenizer.apply_chat_template`'s arguments.

    Raises:
      RequestError: There is no chat template, or it refuses the messages.
    """
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer with a chat template, and the checkpoint has none")
    text = tokenizer.apply_chat_template(messages, **template)
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


def call_for_template(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An assistant's tool call with its arguments as an object: templates write the JSON themselves.

    Args:
      call: In OpenAI's form, {"function": {"name", "arguments"}}, the arguments an object or JSON text.
      where: The call's name in an error.

    Raises:
      RequestError: The arguments are no JSON object.
    """
    function = dict(call["function"])
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} has arguments for {function['name']!r} that are no JSON object: correct them")
    return {**call, "function": {**function, "arguments": arguments}}
