"""Search for a vocabulary's tokens by their beginning."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator

from jaxis.tokenizer import Tokenizer


class TokenPrefixes:
    """The tokens of a vocabulary, in the order of their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = sorted((tokenizer.token_bytes(token_id), token_id) for token_id in range(tokenizer.vocab_size))
        self._texts = [text for text, _ in tokens]
        self._ids = [token_id for _, token_id in tokens]

    def toward(self, text: bytes) -> Iterator[int]:
        """Yields the tokens that spell the beginning of a string, or all of it and more."""
        for length in range(1, len(text)):
            yield from (token_id for token_id, rest in self._beginning_with(text[:length]) if not rest)
        yield from (token_id for token_id, _ in self._beginning_with(text))

    def beyond(self, text: bytes) -> Iterator[int]:
        """Yields the tokens that begin with a string, and have more than white space after it."""
        yield from (token_id for token_id, rest in self._beginning_with(text) if rest.strip())

    def beyond_inner(self, text: bytes) -> Iterator[int]:
        """Yields the tokens that hold a string anywhere, and more than white space after it."""
        for token, token_id in zip(self._texts, self._ids, strict=True):
            if text in token and token.partition(text)[2].strip():
                yield token_id

    def _beginning_with(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields (id, bytes after the text) of the tokens that begin with it, in order."""
        for at in range(bisect_left(self._texts, text), len(self._texts)):
            if not self._texts[at].startswith(text):
                return
            yield self._ids[at], self._texts[at][len(text) :]


@functools.lru_cache(maxsize=4)
def token_prefixes(tokenizer: Tokenizer) -> TokenPrefixes:
    """Returns the prefixes of a tokenizer, made once for each."""
    return TokenPrefixes(tokenizer)
