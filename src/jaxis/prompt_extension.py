"""Checks that a conversation's tokens extend those of an earlier one, as trainers and prefix caches require."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.errors import RequestError

Conversation = Sequence[Mapping[str, Any]]
# Inserted before contents to find their positions: letters that no word of any language begins with.
_MARK = "Zqxj"


@dataclass(frozen=True)
class PromptExtension:
    """Comparison of a prompt with an earlier one.

    Attributes:
      extends: True if the prompt begins with all tokens of the earlier one.
      num_common_tokens: Number of equal tokens at the beginning. If the prompt does not extend the earlier one, this is
        the position of the first token that differs.
      token_id: The prompt's token at that position; None if the prompt extends the earlier one or ends there.
      previous_token_id: The earlier prompt's token at that position; None if the prompt extends it.
      message_index: Index of the message that contains `token_id`; None if the prompt extends the earlier one, or if
        the token lies among tools before the first message or after the last message.
    """

    extends: bool
    num_common_tokens: int
    token_id: int | None = None
    previous_token_id: int | None = None
    message_index: int | None = None


def compare_prompts(
    token_ids: Sequence[int],
    previous_token_ids: Sequence[int],
    messages: Conversation,
    tokenize: Callable[[Conversation], Sequence[int]],
    *,
    has_tools: bool = False,
) -> PromptExtension:
    """Compares a conversation's tokens with those of an earlier one.

    Args:
      token_ids: Tokens of the conversation.
      previous_token_ids: Tokens of the earlier prompt, followed by those generated after it.
      messages: Messages of the conversation.
      tokenize: Function that renders another conversation in the same way, but without opening a turn at its end. It is
        called a few times, and only if the tokens do not extend the earlier ones; it may raise a RequestError.
      has_tools: True if there are tools, which templates put before the first message or into it.
    """
    common = _num_common(token_ids, previous_token_ids)
    if common == len(previous_token_ids):
        return PromptExtension(extends=True, num_common_tokens=common)
    found = PromptExtension(
        extends=False,
        num_common_tokens=common,
        token_id=token_ids[common] if common < len(token_ids) else None,
        previous_token_id=previous_token_ids[common],
    )
    if found.token_id is None:
        return found
    index = _message_at(common, token_ids, messages, tokenize, has_tools=has_tools)
    return dataclasses.replace(found, message_index=index)


def _message_at(
    position: int,
    token_ids: Sequence[int],
    messages: Conversation,
    tokenize: Callable[[Conversation], Sequence[int]],
    *,
    has_tools: bool,
) -> int | None:
    """Returns the message whose part of the prompt contains a position; None if there is none.

    A message's content begins where the prompt changes if that content and all later ones change. Its role lies before
    that, after the end of the prompt of the messages before it.
    """

    def content_start(index: int) -> int:
        changed = [*messages[:index], *map(_marked, messages[index:])]
        return _num_common(token_ids, tokenize(changed))

    def prompt_end(stop: int) -> int:
        return _num_common(token_ids, tokenize(messages[:stop]))

    low, high = (
        0,
        len(messages),
    )  # contents before `low` begin at the position or before it, those from `high` on after it
    try:
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if content_start(middle) <= position else (low, middle)
    except RequestError:
        return None  # the template ignores contents
    if low == 0:
        return None if has_tools else 0
    index, start = low - 1, content_start(low - 1)
    try:
        end = prompt_end(low)
    except RequestError:
        return index  # the template refuses a conversation that ends here
    # Some templates leave out earlier reasoning: the prompts of fewer messages then differ within a message.
    if not start < end <= position:
        return index
    return low if low < len(messages) else None


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with marks before its content, calls and reasoning."""
    marked = dict(message)
    for name in ("content", "reasoning_content"):
        if isinstance(value := message.get(name), str):
            marked[name] = _MARK + value
        elif isinstance(value, list):
            marked[name] = [
                {**part, "text": _MARK + part["text"]} if isinstance(part.get("text"), str) else part for part in value
            ]
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _MARK + call["function"]["name"]}} for call in calls
        ]
    return marked


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    differing = itertools.dropwhile(lambda pair: pair[1][0] == pair[1][1], pairs)
    return next((index for index, _ in differing), min(len(first), len(second)))
