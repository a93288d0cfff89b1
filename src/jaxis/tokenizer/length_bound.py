"""Lower bound of a string's tokens, from its bytes: texts that cannot fit are refused before they are tokenized.

Tokenizing megabytes takes seconds and a hundred times their memory. No token stands for more bytes than the longest
one, so a string of b bytes has at least b / longest tokens, unless the tokenizer drops or folds some of it. The rules
here know which of the `tokenizers` library's components do. There is no bound for a component that may drop anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers.models import BPE, Model
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from jaxis.tokenizer.byte_level import BYTE_OF_CHARACTER

# At most 4 bytes become 1: a letter of a mathematical alphabet becomes an ASCII letter. Compositions shrink less.
_UNICODE_FORM_FACTOR = 4.0
_LOWERCASE_FACTOR = 3.0  # U+212A, the Kelvin sign, becomes "k"
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
# Components that keep all of the text, whatever their settings.
_LOSSLESS = {"Sequence", "ByteLevel", "Prepend", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
_SPLITTING = {"Split", "Punctuation"}  # lossless unless they remove what they split at
_SPACE_DROPPING = {"Strip", "Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True)
class LengthBound:
    """Maximum text of one token, in bytes of UTF-8; infinite where the tokenizer may drop text.

    `counts_spaces` is True if white space counts; a tokenizer may drop it, or fold it into a token.
    """

    bytes_per_token: float
    counts_spaces: bool = True

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> LengthBound:
        added = backend.get_added_tokens_decoder().values()
        components = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
        vocabulary = backend.get_vocab(with_added_tokens=False)
        by_character = any(component["type"] == "ByteLevel" for component in components)
        factor = math.prod(_shrink_factor(component) for component in components)
        if not _covers_every_byte(backend.model, vocabulary, by_character):
            factor = math.inf
        lengths = map(len, vocabulary) if by_character else (len(token.encode()) for token in vocabulary)
        longest = max(lengths, default=1)
        longest = max([longest, *(len(token.content.encode()) for token in added)])
        drops_spaces = any(component["type"] in _SPACE_DROPPING for component in components)
        folds_spaces = any(token.lstrip or token.rstrip for token in added)
        return cls(factor * longest, not drops_spaces and not folds_spaces)

    def least_num_tokens(self, text: str) -> int:
        if len(text) * 4 <= self.bytes_per_token:
            return 0
        # str.split also splits at control characters that Unicode does not call white space: fewer bytes are counted.
        parts = [text] if self.counts_spaces else text.split()
        return math.ceil(sum(len(part.encode("utf-8", "surrogatepass")) for part in parts) / self.bytes_per_token)


def _parts(component: Normalizer | PreTokenizer | None) -> list[dict[str, Any]]:
    parts, stack = [], [] if component is None else [json.loads(component.__getstate__())]
    while stack:
        parts.append(stack.pop())
        stack.extend([*parts[-1].get("normalizers", ()), *parts[-1].get("pretokenizers", ())])
    return parts


def _shrink_factor(component: dict[str, Any]) -> float:
    """Returns the maximum bytes that become one byte; infinite without a bound. Ignores dropped white space."""
    kind = component["type"]
    if kind in _LOSSLESS or kind in _SPACE_DROPPING:
        return 1.0
    if kind in _SPLITTING:
        return math.inf if component["behavior"] == "Removed" else 1.0
    if kind in _UNICODE_FORMS:
        return _UNICODE_FORM_FACTOR
    if kind == "Lowercase":
        return _LOWERCASE_FACTOR
    if kind == "Replace" and "String" in component["pattern"] and component["content"]:
        return max(1.0, len(component["pattern"]["String"].encode()) / len(component["content"].encode()))
    return math.inf


def _covers_every_byte(model: Model, vocabulary: Mapping[str, int], by_character: bool) -> bool:
    """Returns whether every text is made of the model's tokens: others drop unknown text, or fold it into one."""
    if by_character:
        return isinstance(model, BPE) and all(character in vocabulary for character in BYTE_OF_CHARACTER)
    return bool(getattr(model, "byte_fallback", False)) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
