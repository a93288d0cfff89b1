"""Log-probabilities in the forms of OpenAI's two endpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from jaxis.outputs import Logprob
from jaxis.server.http.body import is_none
from jaxis.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI's clients expect this value


class ChatTokenLogprob(BaseModel):
    """A token's log-probability. `bytes` are UTF-8, and may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatPositionLogprobs(ChatTokenLogprob):
    """A generated token, and the most likely tokens at its position.

    Attributes:
      kept_mass: Kept probability mass; see `CompletionOutput`. Only in the processed modes.
    """

    top_logprobs: list[ChatTokenLogprob] = []
    kept_mass: float | None = Field(default=None, exclude_if=is_none)


class ChatLogprobs(BaseModel):
    """Log-probabilities with one entry for each generated token."""

    content: list[ChatPositionLogprobs]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Lists with an entry for each token; the first token of a prompt has no log-probability.

    Attributes:
      kept_mass: Kept probability masses; see `CompletionOutput`. Only in the processed modes, and for generated tokens.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    kept_mass: list[float] | None = Field(default=None, exclude_if=is_none)


@dataclass(frozen=True)
class LogprobFormatter:
    """Writer of tokens and log-probabilities; without a tokenizer, it writes ids.

    With `as_token_ids`, each token is "token_id:ID", since the strings of tokens need not be unique.
    """

    tokenizer: Tokenizer | None
    as_token_ids: bool = False

    def chat(
        self, positions: Sequence[Mapping[int, Logprob]], num_top: int, kept_mass: Sequence[float] | None = None
    ) -> ChatLogprobs:
        """Returns the log-probabilities for /v1/chat/completions, with the `num_top` most likely tokens.

        `positions` has the entries of each token, the sampled token first, and `kept_mass` its kept probability mass.
        """
        content = []
        for index, entries in enumerate(positions):
            token_id, logprob = next(iter(entries.items()))
            top = [self._chat_token(*entry) for entry in _most_likely(entries, num_top)]
            mass = None if kept_mass is None else kept_mass[index]
            token = self._chat_token(token_id, logprob).model_dump()
            content.append(ChatPositionLogprobs(**token, top_logprobs=top, kept_mass=mass))
        return ChatLogprobs(content=content)

    def completion(
        self,
        token_ids: Iterable[int],
        positions: Iterable[Mapping[int, Logprob] | None],
        text_offset: list[int],
    ) -> CompletionLogprobs:
        """Returns the log-probabilities for /v1/completions, of tokens with their offsets in the text.

        `positions` has the entries of each token; None for a prompt's first token.
        """
        top_logprobs: list[dict[str, float] | None] = []
        result = CompletionLogprobs(text_offset=text_offset)
        for token_id, entries in zip(token_ids, positions, strict=True):
            result.tokens.append(self.token(token_id))
            if entries is None:
                result.token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                result.token_logprobs.append(finite(entries[token_id].logprob))
                # Several tokens may have the same text; the most likely one is kept.
                top = sorted(entries.items(), key=lambda entry: entry[1].rank, reverse=True)
                top_logprobs.append({self.token(id_): finite(logprob.logprob) for id_, logprob in top})
        result.top_logprobs = top_logprobs
        return result

    def prompt(self, positions: Iterable[Mapping[int, Logprob] | None]) -> list[dict[int, dict[str, Any]] | None]:
        """Returns `prompt_logprobs`: for each prompt token, its entries by token id, as JSON."""
        return [
            None
            if entries is None
            else {
                token_id: {
                    "logprob": finite(logprob.logprob),
                    "rank": logprob.rank,
                    "decoded_token": logprob.decoded_token,
                }
                for token_id, logprob in entries.items()
            }
            for entries in positions
        ]

    def token(self, token_id: int) -> str:
        if self.as_token_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def _chat_token(self, token_id: int, logprob: Logprob) -> ChatTokenLogprob:
        data = None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))
        return ChatTokenLogprob(token=self.token(token_id), logprob=finite(logprob.logprob), bytes=data)


def _most_likely(entries: Mapping[int, Logprob], number: int) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda entry: entry[1].rank)[:number]


def finite(logprob: float) -> float:
    """Returns a log-probability as a number that JSON has."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
