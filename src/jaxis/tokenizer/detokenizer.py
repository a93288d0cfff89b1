"""Incremental detokenization: token ids in as they are sampled, text out as soon as it cannot change any more.

The text is what decoding prompt and output together adds to decoding the prompt alone, so a leading space is kept
wherever the model wrote one. Each step decodes only the newest tokens behind a few earlier ones, so its cost does not
grow with the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxis.tokenizer.tokenizer import Tokenizer

# What a token's text depends on is whether any text stands before it: a few tokens are enough to tell.
_CONTEXT_TOKENS = 4


class IncrementalDetokenizer:
    """Turns one completion's tokens into text, and finds its stop strings.

    The stop string that is complete first ends the text, so the result does not depend on how the text is cut into
    tokens; of several complete at the same character, the one that began first.

    Attributes:
      stop_hit: The stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stop = [text for text in stop if text]
        self._include_stop = include_stop_str_in_output
        self.stop_hit: str | None = None
        self._decided: list[str] = []
        self._num_sent = 0
        self._held = ""  # the end of the text, for as long as it may be the beginning of a stop string

        # Pending tokens end within a character; context tokens stand before them and are text already.
        tail = self._prompt_tail(prompt_token_ids)
        num_complete = len(tail) - self._num_incomplete(tail)
        self._context = tail[:num_complete]
        self._pending = tail[num_complete:]

    @property
    def text(self) -> str:
        """All text decided so far; it only grows. It leaves out what may still turn out to be a stop string."""
        return "".join(self._decided)

    def update(self, new_token_ids: Sequence[int]) -> str | None:
        """Takes the next tokens in; after a stop string has been hit, they change nothing.

        Returns:
          The stop string that has been hit, or None.
        """
        if self.stop_hit is None:
            self._pending.extend(token_id for token_id in new_token_ids if self._has_text(token_id))
            self._decode_pending(len(self._pending) - self._num_incomplete(self._pending))
        return self.stop_hit

    def delta(self) -> str:
        """The text decided since the last call (or since the start): safe to stream."""
        new = "".join(self._decided[self._num_sent :])
        self._num_sent = len(self._decided)
        return new

    def finish(self) -> None:
        """Decides the rest when no token will follow: half a character becomes U+FFFD."""
        if self.stop_hit is None:
            self._decode_pending(len(self._pending))
            self._decided.append(self._held)
            self._held = ""

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.token_bytes(token_id) != b""

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            # Cutting within a character would spoil the decoding of what follows.
            if len(tail) >= _CONTEXT_TOKENS and not _continues_character(self._tokenizer.token_bytes(tail[-1])):
                break
            if self._has_text(token_id):
                tail.append(token_id)
        return tail[::-1]

    def _num_incomplete(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the end hold the beginning of a character that is not complete yet."""
        data = b""
        for token_id in reversed(token_ids):
            data = self._tokenizer.token_bytes(token_id) + data
            if len(data) >= 3:  # a character has four bytes at most
                break
        missing = len(data) - codecs.utf_8_decode(data, "replace", False)[1]
        count = 0
        while missing > 0:
            count += 1
            missing -= len(self._tokenizer.token_bytes(token_ids[-count]))
        return count

    def _decode_pending(self, count: int) -> None:
        if count == 0:
            return
        ready, self._pending = self._pending[:count], self._pending[count:]
        # Tokens that are to be skipped are not among these; the others' special text is wanted.
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + ready, skip_special_tokens=False)
        if text.startswith(before):
            text = text[len(before) :]
        else:  # byte-fallback decoders spoil a run of bytes as soon as one of them is invalid; earlier text stays
            text = self._tokenizer.decode(ready, skip_special_tokens=False)
        self._context = ready if text else self._context + ready
        self._append(text)

    def _append(self, text: str) -> None:
        text = self._held + text
        hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if hits:
            end, _, self.stop_hit = min(hits)
            text = text[: end if self._include_stop else end - len(self.stop_hit)]
        num_held = 0 if hits else self._num_held(text)
        self._decided.append(text[: len(text) - num_held])
        self._held = text[len(text) - num_held :]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _continues_character(data: bytes) -> bool:
    return 0x80 <= data[0] < 0xC0
