"""Byte-level BPE: a vocabulary and its merges in GPT-2's alphabet, with the rules that split a string into words.

Each byte is written as one printable character, so tokens may end inside a character and no text is unknown. Families
differ in how a string is split before merging: merges never cross a border between words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxis.errors import CheckpointError


@dataclass(frozen=True)
class SplitRules:
    """Rules by which a family's text is cut into words, in this order.

    Attributes:
      nfc: True brings the text into Unicode's composed form NFC first.
      patterns: Regular expressions, applied one after the other: each match becomes a separate piece.
      single_digits: True makes each digit a separate piece.
      gpt2_pattern: True applies GPT-2's own pattern last.
      ignore_merges: True makes a word that is a token that token, even if merging its parts would not lead to it.
    """

    nfc: bool = False
    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_pattern: bool = False
    ignore_merges: bool = False


def byte_level_backend(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], rules: SplitRules, source: str
) -> tokenizers.Tokenizer:
    """Builds a byte-level BPE tokenizer without added tokens.

    `vocab` maps tokens in GPT-2's alphabet to ids; of `merges`, the first is merged first. Raises CheckpointError,
    which names `source`, if the parts or the result of a merge are not tokens.
    """
    backend = tokenizers.Tokenizer(bpe_model(vocab, merges, source, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns
    ]
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.gpt2_pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def bpe_model(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], source: str, **options: bool | str | None
) -> models.BPE:
    """Builds the library's BPE model. Raises CheckpointError if parts or result of a merge are not tokens."""
    try:
        return models.BPE(vocab=dict(vocab), merges=list(merges), **options)
    except Exception as error:  # the library raises a plain Exception for a merge that is not in the vocabulary
        raise CheckpointError(
            f"{source}: the merges do not fit the vocabulary ({' '.join(str(error).split())}); fetch the file again"
        ) from error


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others are characters from U+0100 on.
BYTE_OF_CHARACTER = _byte_of_character()
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def spell_bytes(data: bytes) -> str:
    """Returns bytes in GPT-2's alphabet."""
    return "".join([_CHARACTER_OF_BYTE[byte] for byte in data])
