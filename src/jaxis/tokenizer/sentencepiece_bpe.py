"""SentencePiece's BPE as a `tokenizers` backend.

A SentencePiece vocabulary has a score for each piece and no merges: of all pairs of neighbours whose concatenation is
a piece, the one with the best score is merged first. The merges that give the same result are every way to cut a piece
into two pieces, in the order of the whole's score. What is not in the vocabulary becomes one token for each UTF-8 byte.
Source: https://github.com/google/sentencepiece (src/bpe_model.cc, src/sentencepiece_model.proto).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, normalizers

from jaxis.tokenizer.byte_level import bpe_model

WORD_START = "▁"  # U+2581, which SentencePiece writes for a space


class PieceType(enum.IntEnum):
    """The kinds of a piece, as SentencePiece and GGUF number them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One row of the vocabulary; its place in the list is its id."""

    text: str
    score: float = 0.0
    type: int = PieceType.NORMAL


def sentencepiece_bpe_backend(pieces: Sequence[Piece], *, add_space_prefix: bool, source: str) -> tokenizers.Tokenizer:
    """A tokenizer with the vocabulary's control and user-defined pieces as added tokens.

    Args:
      pieces: The vocabulary, without two pieces of one text.
      add_space_prefix: Whether a text, and what follows a special token in it, begins with a word.
      source: What the vocabulary was read from, for errors.
    """
    unknown = next((piece.text for piece in pieces if piece.type == PieceType.UNKNOWN), None)
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    model = bpe_model(vocab, derive_merges(pieces), source, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    mark_spaces = normalizers.Replace(" ", WORD_START)
    steps = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), mark_spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark_spaces
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(added_pieces(pieces, add_space_prefix=add_space_prefix))
    return backend


def derive_merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to cut a piece into two pieces, those of the best piece first.

    Equal scores are told apart as `transformers` does: the longer left part first, then the longer right part.
    Control and byte pieces are neither parts nor results: text that spells them is text.
    """
    scores = {piece.text: _merge_score(piece) for piece in pieces if piece.type in _MERGED}
    merges = [
        (score, end, len(text) - end, text)
        for text, score in scores.items()
        for end in range(1, len(text))
        if text[:end] in scores and text[end:] in scores
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(text[:end], text[end:]) for _, end, _, text in merges]


_MERGED = frozenset({PieceType.NORMAL, PieceType.UNUSED, PieceType.USER_DEFINED})


def _merge_score(piece: Piece) -> float:
    # SentencePiece takes user-defined pieces out of the text before it merges anything.
    return float("inf") if piece.type == PieceType.USER_DEFINED else piece.score


def added_pieces(pieces: Sequence[Piece], *, add_space_prefix: bool) -> list[AddedToken]:
    """The pieces that are found in a text before it is cut into others.

    A run of spaces is found in the normalized text, where it is a run of word starts. A prefix would be added to the
    run as well, so there its merges have to do.
    """
    added = []
    for piece in pieces:
        if piece.type in (PieceType.CONTROL, PieceType.UNKNOWN):
            added.append(AddedToken(piece.text, special=True, normalized=False))
        elif piece.type == PieceType.USER_DEFINED:
            is_spaces = not piece.text.strip(WORD_START)
            if not (is_spaces and add_space_prefix):
                added.append(AddedToken(piece.text, special=False, normalized=is_spaces))
    return added
