"""Whether a conversation's tokens extend those of an earlier one, as trainers and prefix caches need them to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.errors import RequestError

Conversation = Sequence[Mapping[str, Any]]
# Put before contents, to see where they stand: letters that no word of any language begins with.
_MARK = "Zqxj"


@dataclass(frozen=True)
class PromptExtension:
    """How a prompt goes on from an earlier one.

    Attributes:
      extends: Whether it begins with all tokens of the earlier one.
      num_common_tokens: How many tokens both begin with; where it does not extend the earlier one, the position of the
        first that differs.
      token_id: The prompt's token there; None if it extends the earlier one, or ends there.
      previous_token_id: The earlier one's.
      message_index: The message that `token_id` lies in; None if it extends the earlier one, or the token is in none:
        among tools before the first message, or behind the last.
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
      token_ids: The conversation's.
      previous_token_ids: Those of the earlier prompt, and of what was generated after it.
      messages: The conversation.
      tokenize: Renders another conversation in the same way, but without opening a turn at its end. Called a few times,
        and only if the tokens do not extend the earlier ones; it may raise a RequestError.
      has_tools: Whether there are tools, which templates put before the first message or into it.
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
    """The message whose part of the prompt holds a position.

    A message's content begins where the prompt changes if that content, and those after it, do. Its role stands before
    that, behind the end of the prompt of the messages before it.
    """

    def content_start(index: int) -> int:
        changed = [*messages[:index], *map(_marked, messages[index:])]
        return _num_common(token_ids, tokenize(changed))

    def prompt_end(stop: int) -> int:
        return _num_common(token_ids, tokenize(messages[:stop]))

    low, high = (
        0,
        len(messages),
    )  # the contents before `low` begin at the position or earlier, those from `high` on later
    try:
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if content_start(middle) <= position else (low, middle)
    except RequestError:
        return None  # the template reads contents
    if low == 0:
        return None if has_tools else 0
    index, start = low - 1, content_start(low - 1)
    try:
        end = prompt_end(low)
    except RequestError:
        return index  # a template that takes no conversation ending there
    # Where a template leaves out earlier reasoning, the prompts of fewer messages differ within a message.
    if not start < end <= position:
        return index
    return low if low < len(messages) else None


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with something else as its content, calls and reasoning."""
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
