"""Log-probabilities in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jaxis.outputs import Logprob
from jaxis.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI's clients expect this value


class ChatTokenLogprob(BaseModel):
    """A token's log-probability; `bytes` are UTF-8, and may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatPositionLogprobs(ChatTokenLogprob):
    """A generated token, and the most likely ones in its place."""

    top_logprobs: list[ChatTokenLogprob] = []


class ChatLogprobs(BaseModel):
    """One entry a generated token."""

    content: list[ChatPositionLogprobs]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Four lists with an entry a token; the first token of a prompt has no log-probability."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


@dataclass(frozen=True)
class LogprobFormatter:
    """Writes tokens as clients want to see them.

    Attributes:
      tokenizer: None writes ids.
      as_token_ids: Write each token as "token_id:ID": the strings of tokens need not be unique.
    """

    tokenizer: Tokenizer | None
    as_token_ids: bool = False

    def chat(self, positions: Sequence[Mapping[int, Logprob]], num_top: int) -> ChatLogprobs:
        """For /v1/chat/completions.

        Args:
          positions: A token's entries each, the sampled one first.
          num_top: How many of the most likely tokens to list.
        """
        content = []
        for entries in positions:
            token_id, logprob = next(iter(entries.items()))
            top = [self._chat_token(*entry) for entry in _most_likely(entries, num_top)]
            content.append(ChatPositionLogprobs(**self._chat_token(token_id, logprob).model_dump(), top_logprobs=top))
        return ChatLogprobs(content=content)

    def completion(
        self,
        token_ids: Iterable[int],
        positions: Iterable[Mapping[int, Logprob] | None],
        text_offset: int,
    ) -> tuple[CompletionLogprobs, int]:
        """For /v1/completions.

        Args:
          token_ids: The tokens.
          positions: Their entries; None for a prompt's first token.
          text_offset: Characters before them.

        Returns:
          The lists, and the characters up to the end of the tokens.
        """
        top_logprobs: list[dict[str, float] | None] = []
        result = CompletionLogprobs()
        for token_id, entries in zip(token_ids, positions, strict=True):
            result.text_offset.append(text_offset)
            result.tokens.append(self.token(token_id))
            if entries is None:
                result.token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                result.token_logprobs.append(_finite(entries[token_id].logprob))
                # Several tokens may have the same text; the most likely one is kept.
                top = sorted(entries.items(), key=lambda entry: entry[1].rank, reverse=True)
                top_logprobs.append({self.token(id_): _finite(logprob.logprob) for id_, logprob in top})
            text_offset += len(self._text(token_id))
        result.top_logprobs = top_logprobs
        return result, text_offset

    def prompt(self, positions: Iterable[Mapping[int, Logprob] | None]) -> list[dict[int, dict[str, Any]] | None]:
        """For `prompt_logprobs`: for each prompt token, token id -> its Logprob as JSON."""
        return [
            None
            if entries is None
            else {
                token_id: {
                    "logprob": _finite(logprob.logprob),
                    "rank": logprob.rank,
                    "decoded_token": logprob.decoded_token,
                }
                for token_id, logprob in entries.items()
            }
            for entries in positions
        ]

    def token(self, token_id: int) -> str:
        """How a token is written."""
        return f"token_id:{token_id}" if self.as_token_ids or self.tokenizer is None else self._text(token_id)

    def _text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _chat_token(self, token_id: int, logprob: Logprob) -> ChatTokenLogprob:
        data = None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))
        return ChatTokenLogprob(token=self.token(token_id), logprob=_finite(logprob.logprob), bytes=data)


def _most_likely(entries: Mapping[int, Logprob], number: int) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda entry: entry[1].rank)[:number]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
