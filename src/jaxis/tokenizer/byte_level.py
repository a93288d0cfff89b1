"""Byte-level BPE: its alphabet of 256 characters, tiktoken's ranks, and vocabularies made of them."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxis.errors import CheckpointError

# Byte-level BPE: a vocabulary and its merges in GPT-2's alphabet, with the rules that split a string into words.
#
# Each byte is written as one printable character, so tokens may end inside a character and no text is unknown. What
# differs between families is how a string is split before merging: merges never cross a border between words.


@dataclass(frozen=True)
class SplitRules:
    """How a family's text is cut into words, in this order.

    Attributes:
      nfc: Whether the text is first brought into Unicode's composed form NFC.
      patterns: Regular expressions, applied one after the other: each match becomes a piece of its own.
      single_digits: Whether each digit becomes a piece of its own.
      gpt2_pattern: Whether GPT-2's own pattern is applied last.
      ignore_merges: Whether a word that is a token is that token, even if merging its parts would not lead to it.
    """

    nfc: bool = False
    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_pattern: bool = False
    ignore_merges: bool = False


def byte_level_backend(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], rules: SplitRules, source: str
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer without added tokens.

    Args:
      vocab: Token in GPT-2's alphabet -> id.
      merges: Pairs of tokens, the first to be merged first.
      rules: How to split text.
      source: What the vocabulary was read from, for errors.

    Raises:
      CheckpointError: A merge whose parts or result are no tokens.
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
    """The library's BPE model, with its faults as errors of the checkpoint.

    Raises:
      CheckpointError: A merge whose parts or result are no tokens.
    """
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
    """Bytes in GPT-2's alphabet."""
    return "".join([_CHARACTER_OF_BYTE[byte] for byte in data])


# Byte-level vocabularies as tiktoken has them: bytes with ranks, and no merges.
#
# Of all pairs of neighbours whose bytes together are a token, the one with the lowest rank is merged first, and a
# word that is a token is that token. Source: https://github.com/openai/tiktoken (src/lib.rs).


def read_ranks(path: Path) -> list[bytes]:
    """Reads a file of lines with a token in base64 and its rank; returns the tokens by rank.

    Raises:
      CheckpointError: The file cannot be read, or is not such a file.
    """
    try:
        lines = path.read_bytes().splitlines()
        pairs = [line.split() for line in lines if line]
        tokens = {int(rank): decode_token(token) for token, rank in pairs}
        return [tokens[rank] for rank in range(len(pairs))]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} has no token of rank {error.args[0]}; fetch the file again") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a tiktoken vocabulary ({error}); fetch the file again") from error


def decode_token(token: bytes | str) -> bytes:
    """A token's bytes from base64. Raises ValueError if it is not that."""
    try:
        return base64.b64decode(token, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{token!r} is not base64") from error


def spell_ranks(tokens: Sequence[bytes]) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens in GPT-2's alphabet, and the merges that lead to them.

    The merges are every way to cut a token into two, the lowest rank first; equal ones by the ranks of the parts.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    spelled = [spell_bytes(token) for token in tokens]
    merges = sorted(
        (rank, left, right)
        for token, rank in ranks.items()
        for end in range(1, len(token))
        if (left := ranks.get(token[:end])) is not None and (right := ranks.get(token[end:])) is not None
    )
    return spelled, [(spelled[left], spelled[right]) for _, left, right in merges]


# Vocabularies as lists of texts: a token's place is its id, and its row in the embedding.


MAX_ADDED_ROWS = 1 << 20  # far more than any model adds; an id beyond is a broken file


def distinct_texts(texts: Sequence[str]) -> list[str]:
    """The texts, valid and each once, as the library needs them; the others get a name that no text becomes.

    Of equal texts the last one stays. An empty text, and one with surrogate escapes (bytes that are not UTF-8), cannot
    stay either.
    """
    last = {text: i for i, text in enumerate(texts)}
    return [text if text and last[text] == i and _is_valid(text) else unused_text(i) for i, text in enumerate(texts)]


def unused_text(token_id: int) -> str:
    """The text of a row that stands for none."""
    return f"<jaxis-unused-{token_id}>"


def with_added_tokens(texts: Sequence[str], added: Mapping[int, AddedToken]) -> list[str]:
    """The texts with added tokens in their rows: behind the vocabulary, or in place of what the row was.

    Raises:
      ValueError: A negative or absurd id, or two ids for one token.
    """
    rows = list(texts)
    for token_id in added:
        if not 0 <= token_id < len(texts) + MAX_ADDED_ROWS:
            raise ValueError(f"the added token {added[token_id].content!r} has the id {token_id}")
    repeated = [text for text, count in Counter(token.content for token in added.values()).items() if count > 1]
    if repeated:
        raise ValueError(f"the added token {repeated[0]!r} has two ids")
    rows += [unused_text(i) for i in range(len(rows), max(added, default=-1) + 1)]
    for token_id, token in added.items():
        rows[token_id] = token.content
    # An added token's text may also be a row of the vocabulary, which no text becomes then.
    of_added = {token.content: token_id for token_id, token in added.items()}
    return [text if of_added.get(text, i) == i else unused_text(i) for i, text in enumerate(rows)]


def _is_valid(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
