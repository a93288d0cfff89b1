"""SentencePiece vocabularies, BPE and Unigram, as a `tokenizers` backend.

A SentencePiece BPE vocabulary has a score for each piece and no merges: of all pairs of neighbours whose concatenation
is a piece, the one with the best score is merged first. The merges that give the same result are every way to cut a
piece into two pieces, in the order of the whole's score. Source: https://github.com/google/sentencepiece
(src/bpe_model.cc, src/normalizer.cc).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxis.errors import CheckpointError
from jaxis.tokenizer.byte_level import bpe_model
from jaxis.tokenizer.sentencepiece_file import ModelType, Piece, PieceType, SentencePieceModel

WORD_START = "▁"  # U+2581, which SentencePiece writes for a space

# Where a word begins though the text has no space there: nowhere, at the start of each piece of text between special
# tokens, or at the start of the whole text, unless it begins with a space.
SpacePrefix = Literal["never", "each", "first"]


def sentencepiece_backend(
    model: SentencePieceModel, pieces: Sequence[Piece], prefix: SpacePrefix, source: str
) -> tokenizers.Tokenizer:
    """Builds a tokenizer of a SentencePiece model; control and user-defined pieces become added tokens.

    `prefix` says where a word begins without a space. Raises CheckpointError, which names `source`, if the kind of
    model is not supported.
    """
    if model.model_type not in (ModelType.BPE, ModelType.UNIGRAM) or model.whitespace_as_suffix:
        what = "spaces after words" if model.whitespace_as_suffix else f"the model type {model.model_type.name}"
        raise CheckpointError(
            f"{source} is a SentencePiece model with {what}; supported: BPE and UNIGRAM with spaces before words"
        )
    cleaning: list[normalizers.Normalizer] = []
    if model.charsmap:
        cleaning.append(_precompiled(model.charsmap, source))
    if model.remove_extra_whitespaces:
        cleaning += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.model_type == ModelType.BPE:
        return sentencepiece_bpe_backend(pieces, prefix, source, cleaning=cleaning, byte_fallback=model.byte_fallback)
    scores = [(piece.text, piece.score) for piece in pieces]
    try:
        unigram = models.Unigram(scores, model.special_ids.get("unk_token"), model.byte_fallback)
    except Exception as error:  # the library raises a plain Exception for any fault
        raise CheckpointError(f"{source} has no usable vocabulary ({error}); fetch the file again") from error
    return _backend(unigram, pieces, prefix, cleaning)


def sentencepiece_bpe_backend(
    pieces: Sequence[Piece],
    prefix: SpacePrefix,
    source: str,
    *,
    cleaning: Sequence[normalizers.Normalizer] = (),
    byte_fallback: bool = True,
    merges: Sequence[tuple[str, str]] | None = None,
) -> tokenizers.Tokenizer:
    """Builds a tokenizer of a SentencePiece BPE vocabulary, without two pieces of the same text.

    The normalizers `cleaning` apply before spaces are marked. With `byte_fallback`, text outside the vocabulary is one
    token for each byte of its UTF-8 form. Without merges, the first to be merged first, they follow from the pieces'
    scores.
    """
    unknown = next((piece.text for piece in pieces if piece.type == PieceType.UNKNOWN), None)
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    merges = derive_merges(pieces) if merges is None else merges
    model = bpe_model(vocab, merges, source, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    return _backend(model, pieces, prefix, cleaning)


def derive_merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Returns every way to cut a piece into two pieces, those of the best piece first.

    Ties are broken as in transformers: the longer left part first, then the longer right part. Control and byte pieces
    are neither parts nor results: text that spells them is text.
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


def _backend(
    model: models.Model, pieces: Sequence[Piece], prefix: SpacePrefix, cleaning: Sequence[normalizers.Normalizer]
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    steps = list(cleaning)
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(WORD_START, prepend_scheme="first", split=False)
    else:
        if prefix == "each":
            steps.append(normalizers.Prepend(WORD_START))
        steps.append(normalizers.Replace(" ", WORD_START))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    to_text = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix != "never":
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(to_text)
    backend.add_tokens(_added_pieces(pieces, prefix))
    return backend


def _added_pieces(pieces: Sequence[Piece], prefix: SpacePrefix) -> list[AddedToken]:
    """Returns the pieces that are found in a string before it is cut into others.

    A run of spaces is found in the normalized text, as a run of word starts. A prefix would be added to the run as
    well, so with a prefix the run comes from merges.
    """
    added = []
    for piece in pieces:
        if piece.type in (PieceType.CONTROL, PieceType.UNKNOWN):
            added.append(AddedToken(piece.text, special=True, normalized=False))
        elif piece.type == PieceType.USER_DEFINED:
            is_spaces = not piece.text.strip(WORD_START)
            if not is_spaces or prefix == "never":
                added.append(AddedToken(piece.text, special=False, normalized=is_spaces))
    return added


def writes_spaces_after_special_tokens(pieces: Sequence[Piece]) -> bool:
    """Returns whether this is a vocabulary of Mistral since its second: templates write the space before a word."""
    return any(piece.text == "[INST]" and piece.type == PieceType.CONTROL for piece in pieces)


def _precompiled(charsmap: bytes, source: str) -> normalizers.Normalizer:
    try:
        normalizer = normalizers.Precompiled(charsmap)
        normalizer.normalize_str("".join(map(chr, range(1, 0x3000))))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on rules that point outside themselves
        raise CheckpointError(f"{source} has normalization rules that cannot be read; fetch the file again") from error
    return normalizer
