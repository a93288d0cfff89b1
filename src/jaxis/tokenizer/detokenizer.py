"""Incremental detokenization: takes token ids as they are sampled, and returns text as soon as it is final.

The text is the difference between decoding prompt and output together and decoding the prompt alone, so that a leading
space of the model is kept. A token stands for fixed bytes inside a string, so each is looked up once, and the cost of a
step does not grow with the text. A token may end one character and begin the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxis.tokenizer.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Turns one completion's tokens into text, and finds its stop strings.

    The stop string that is completed first ends the text (of several at one character, the one that began first), so
    the result does not depend on how the text is split into tokens. `stop_hit` is that string, or None.
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
        self._reader = _TokenReader(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = [text for text in stop if text]
        self._include_stop = include_stop_str_in_output
        self.stop_hit: str | None = None
        self._decided: list[str] = []
        self._num_sent = 0
        self._held = ""  # the end of the text while it may be the start of a stop string

    @property
    def text(self) -> str:
        """All final text so far; it only grows. Excludes text that may still become a stop string."""
        return "".join(self._decided)

    def update(self, new_token_ids: Sequence[int], *, may_stop: bool = True) -> str | None:
        """Adds the next tokens, and returns the stop string that has been hit, or None; no effect after one was hit.

        `may_stop` is True if their text may be part of a stop string.
        """
        if self.stop_hit is None:
            text = self._reader.text_of(new_token_ids)
            if may_stop and self._stop:
                self._append(text)
            else:
                self._decided.append(text)
        return self.stop_hit

    def delta(self) -> str:
        """Returns the text that became final since the last call (or the start): safe to stream."""
        new = "".join(self._decided[self._num_sent :])
        self._num_sent = len(self._decided)
        return new

    def finish(self) -> None:
        """Ends the text when no token will follow: an incomplete character becomes U+FFFD."""
        if self.stop_hit is None:
            self._append(self._reader.end())
            self._decided.append(self._held)
            self._held = ""

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
        """Returns the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TokenPlaces:
    """Finds the places in the text where tokens begin, behind a prompt and `start` characters.

    A token that continues a character begins where the character does. A token without text, as special tokens are with
    `skip_special_tokens`, begins where the next one does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        start: int = 0,
    ) -> None:
        self._reader = _TokenReader(tokenizer, prompt_token_ids, skip_special_tokens)
        self._num_characters = start

    def add(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Returns the characters before each of the next tokens, and their text without an incomplete character."""
        places, texts = [], []
        for token_id in token_ids:
            data = self._reader.bytes_of(token_id)
            # The first byte tells which character the token begins in: the incomplete one, or the one it completes.
            first = self._reader.decode(data[:1])
            is_complete = bool(data) and not self._reader.is_inside_character
            places.append(self._num_characters + len(first) - is_complete)
            texts.append(first + self._reader.decode(data[1:]))
            self._num_characters += len(texts[-1])
        return places, "".join(texts)

    def end(self) -> str:
        """Returns the text of an incomplete character that no token will complete."""
        return self._reader.end()


class _TokenReader:
    """Decodes tokens behind a prompt; buffers the bytes of an incomplete character, which may begin in the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = tokenizer.utf8_decoder()
        prompt_end = self._end_of_prompt(prompt_token_ids)
        self._at_start = not prompt_end
        self._utf8.decode(prompt_end)

    @property
    def is_inside_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.decode(b"".join([self.bytes_of(token_id) for token_id in token_ids]))

    def decode(self, data: bytes) -> str:
        return self._utf8.decode(data)

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            if _is_text(data):  # a decoder may drop the leading space at the start of a string
                return self._tokenizer.decode([token_id], skip_special_tokens=False).encode("utf-8")
        return data

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to hold any character begun there; empty if the prompt has no text."""
        data = b""
        for token_id in reversed(prompt_token_ids):
            if len(data) >= _MAX_CHARACTER_BYTES:
                break
            if token_id not in self._skipped:
                data = self._tokenizer.token_bytes(token_id) + data
        return data


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
