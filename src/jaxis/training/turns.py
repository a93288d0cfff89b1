"""The last turn of a conversation as token ids, and its learned part.

Learned tokens are those that the model would have to write: the assistant's text and the token that ends its turn. The
start of a turn is found by rendering the conversation before it as a server does, which needs no marks in the template.
If the template has `{% generation %}` blocks, their content is learned instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import turn_end_token_id
from jaxis.tokenizer.template_worker import GENERATION_MARKS

Span: TypeAlias = tuple[int, int]
"""Start and end of a part of a sequence."""
# Unicode's private use area: no exchanged text contains these characters.
_BEGIN, _END = "\uf8f0", "\uf8f1"
_MARKS = dict(zip(GENERATION_MARKS, (_BEGIN, _END), strict=True))
"""Template variables that mark the start and end of generation blocks."""
_TAG = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True)
class LearnedTurn:
    """A conversation's token ids up to the end of its last turn.

    Attributes:
      spans: Learned spans of the last turn, in tokens.
      is_unlike: True if the template begins the turn differently from its generation prompt.
      is_endless: True if no special token ends the turn.
      has_opening: True if the template's generation block includes the generation prompt.
    """

    ids: list[int]
    spans: list[Span]
    is_unlike: bool = False
    is_endless: bool = False
    has_opening: bool = False


def check_template(tokenizer: Tokenizer) -> None:
    """Raises RequestError if the tokenizer has no chat template."""
    if not tokenizer.has_chat_template:
        raise RequestError("the model has no chat template: set model.chat_template, such as chatml or gemma")


class TurnEncoder:
    """Encoder of conversations; `template` has arguments of `Tokenizer.apply_chat_template`, as enable_thinking."""

    def __init__(self, tokenizer: Tokenizer, template: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = dict(template)
        self._turn_end = turn_end_token_id(tokenizer) if tokenizer.has_chat_template else None

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> LearnedTurn:
        """Encodes a conversation that ends with a turn of the assistant; `tools` are JSON schemas, or None.

        Raises RequestError if the template refuses the conversation, or the learned part of the turn is ambiguous.
        """
        source = self._tokenizer.choose_chat_template(self._template.get("chat_template"), tools)
        whole, last = self._render(messages, tools, opens=False), f"messages[{len(messages) - 1}]"
        prompt = self._prompt(messages, tools, whole)
        if _TAG.search(source) is not None:
            return self._tagged(messages, tools, whole, prompt)
        if not prompt:
            raise RequestError(
                "begins with an answer of the assistant, of which nothing says where it begins: put the user's message "
                "before it, or set data.train.train_target=final_assistant_turn"
            )
        prompt_ids = self._encode(prompt)
        if whole.startswith(prompt):
            ids, _ = self._encode_both(prompt, whole)
            end, is_endless = self._end_of_turn(ids, len(prompt_ids))
            return LearnedTurn(ids[:end], [(len(prompt_ids), end)], is_endless=is_endless)
        if not whole.startswith(self._render(messages[:-1], tools, opens=False).rstrip()):
            raise RequestError(
                f"what is learned of {last} is undefined: with it, the chat template writes what is before otherwise; "
                "give model.chat_template, one with generation blocks"
            )
        ids = self._encode(whole)
        start = next((i for i, (a, b) in enumerate(zip(prompt_ids, ids, strict=False)) if a != b), len(ids))
        end, is_endless = self._end_of_turn(ids, start)
        return LearnedTurn(ids[:end], [(start, end)], is_unlike=True, is_endless=is_endless)

    def _prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any, whole: str) -> str:
        """Returns the text that a turn answers.

        Before the first turn, it ends with the template's opening of an answer; "" if that is not once in the turn.
        """
        if len(messages) > 1:
            return self._render(messages[:-1], tools, opens=True)
        opened = self._render(messages, tools, opens=True)
        opening = opened.removeprefix(whole)
        if opening in ("", opened) or whole.count(opening) != 1:
            return ""
        return whole[: whole.index(opening) + len(opening)]

    def _tagged(self, messages: Sequence[Mapping[str, Any]], tools: Any, whole: str, prompt: str) -> LearnedTurn:
        """Returns the turn with the learned spans of its generation blocks."""
        last = f"messages[{len(messages) - 1}]"
        new = self._blocks(messages, tools, whole)
        if len(messages) > 1:
            new = new[len(self._blocks(messages[:-1], tools)) :]
        ids, places = self._encode_both(prompt, whole)
        spans = [tokens for each in new if (tokens := _tokens_of(each, places)) is not None]
        if not spans:
            raise RequestError(f"the chat template's generation blocks hold nothing of {last}")
        has_opening = whole.startswith(prompt) and new[0][0] < len(prompt)
        return LearnedTurn(ids[: spans[-1][1]], spans, has_opening=has_opening)

    def _blocks(self, messages: Sequence[Mapping[str, Any]], tools: Any, whole: str | None = None) -> list[Span]:
        """Returns the spans of generation blocks, in characters of the conversation."""
        text, found = _without_marks(self._render(messages, tools, opens=False, **_MARKS))
        if whole is not None and text != whole:
            raise RequestError("the chat template changes what its generation blocks hold: put whole answers there")
        return found

    def _encode_both(self, prompt: str, whole: str) -> tuple[list[int], list[Span]]:
        """Returns token ids of a conversation, beginning with those of its prompt, and the characters of each."""
        ids, places = self._tokenizer.encode_with_places(whole)
        if not whole.startswith(prompt):
            return ids, places
        prompt_ids = self._encode(prompt)
        if ids[: len(prompt_ids)] == prompt_ids:
            return ids, places
        # The tokens at the border differ from a server's.
        _, places = self._tokenizer.encode_with_places(prompt)
        rest, rest_places = self._tokenizer.encode_with_places(whole[len(prompt) :])
        moved = [(start + len(prompt), end + len(prompt)) for start, end in rest_places]
        return prompt_ids + rest, [*places, *moved]

    def _end_of_turn(self, ids: Sequence[int], start: int) -> tuple[int, bool]:
        """Returns the end of a turn, after its end token, if any, and whether it has none.

        The text that the template writes between turns does not belong to it.
        """
        end, special = len(ids), self._tokenizer.special_token_ids
        for i in reversed(range(start, len(ids))):
            if ids[i] == self._turn_end:
                # Some templates write two: one ends the text, the other the turn.
                return next((k for k in range(i + 1, end) if ids[k] not in special), end), False
        while end > start and ids[end - 1] not in special and not self._tokenizer.token_text(ids[end - 1]).strip():
            end -= 1
        if end > start and ids[end - 1] in special:
            return end, False
        return len(ids), True  # all of it is learned

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, opens: bool, **variables: Any) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=opens, **self._template, **variables
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """Returns a rendered conversation without marks, and the spans of its generation blocks in characters."""
    parts = re.split(f"([{_BEGIN}{_END}])", marked)
    text, spans, begin = "", [], 0
    for part in parts:
        if part == _BEGIN:
            begin = len(text)
        elif part == _END:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


def _tokens_of(span: Span, places: Sequence[Span]) -> Span | None:
    """Returns the span of tokens, at `places`, that overlap a span of characters; None if there are none."""
    inside = [i for i, (begin, end) in enumerate(places) if begin < span[1] and end > span[0]]
    return (inside[0], inside[-1] + 1) if inside else None
