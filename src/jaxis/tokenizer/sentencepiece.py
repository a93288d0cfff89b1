"""SentencePiece: reads tokenizer.model, and makes a tokenizer of its pieces."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxis.errors import CheckpointError
from jaxis.tokenizer.byte_level import bpe_model

# Reads a SentencePiece model file (`tokenizer.model`, `spiece.model`).
#
# The file is one protocol buffer message, of which a tokenizer needs a dozen fields: they are read here, so that
# neither sentencepiece nor protobuf has to be installed. Source:
# https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto and
# https://protobuf.dev/programming-guides/encoding.


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


class ModelType(enum.IntEnum):
    """How a string is cut into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model file says.

    Attributes:
      pieces: The vocabulary.
      model_type: How a string is cut into pieces.
      byte_fallback: Whether what is not in the vocabulary becomes one piece for each byte.
      charsmap: Compiled rules that normalize the text; empty if there are none.
      add_dummy_prefix: Whether a string begins with a space that it does not have.
      remove_extra_whitespaces: Whether spaces at the ends and repeated ones are dropped.
      whitespace_as_suffix: Whether a space belongs to the word before it.
      special_ids: Role, such as "bos_token" -> id, of the pieces that have one.
    """

    pieces: list[Piece]
    model_type: ModelType
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    whitespace_as_suffix: bool
    special_ids: dict[str, int]

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceModel:
        """Reads a model file.

        Raises:
          CheckpointError: The file cannot be read, or is not a SentencePiece model.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            model = _parse(data)
        except (ValueError, IndexError, struct.error) as error:
            raise CheckpointError(f"{path} is not a SentencePiece model ({error}); fetch the file again") from error
        if not model.pieces:
            raise CheckpointError(f"{path} is not a SentencePiece model (it has no pieces); fetch the file again")
        return model


# Fields of the messages, by the numbers in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_ROLES = {40: ("unk_token", 0), 41: ("bos_token", 1), 42: ("eos_token", 2), 43: ("pad_token", -1)}
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(_piece(_message(value)))
        elif number == _TRAINER:
            trainer |= dict(_fields(_message(value)))
        elif number == _NORMALIZER:
            normalizer |= dict(_fields(_message(value)))
    if not _number(normalizer, _ESCAPE_WHITESPACES, 1):
        raise ValueError("a vocabulary with plain spaces is not supported")
    ids = {role: _signed(_number(trainer, number, default)) for number, (role, default) in _ROLES.items()}
    return SentencePieceModel(
        pieces=pieces,
        model_type=ModelType(_number(trainer, _MODEL_TYPE, ModelType.UNIGRAM)),
        byte_fallback=bool(_number(trainer, _BYTE_FALLBACK, 0)),
        charsmap=_message(normalizer.get(_CHARSMAP, b"")),
        add_dummy_prefix=bool(_number(normalizer, _ADD_DUMMY_PREFIX, 1)),
        remove_extra_whitespaces=bool(_number(normalizer, _REMOVE_EXTRA_WHITESPACES, 1)),
        whitespace_as_suffix=bool(_number(trainer, _WHITESPACE_AS_SUFFIX, 0)),
        special_ids={role: token_id for role, token_id in ids.items() if 0 <= token_id < len(pieces)},
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _message(fields.get(_PIECE_SCORE, b"\0\0\0\0")))
    if math.isnan(score):
        raise ValueError("a score is not a number")
    text = _message(fields.get(_PIECE_TEXT, b"")).decode("utf-8")
    return Piece(text, score, _number(fields, _PIECE_TYPE, PieceType.NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: their numbers and values, an integer or the bytes of anything else."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            size, position = _varint(data, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"a field of the unknown type {wire_type}")
        if position + size > len(data):
            raise ValueError(f"it ends after {len(data)} bytes within a field")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position == len(data):
            raise ValueError(f"it ends after {len(data)} bytes within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number of more than 64 bits")


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text should be")
    return value


def _number(fields: dict[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError("text where a number should be")
    return value


def _signed(value: int) -> int:
    """A number as the 64-bit two's complement that the format stores."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SentencePiece vocabularies, BPE and Unigram, as a `tokenizers` backend.
#
# A SentencePiece BPE vocabulary has a score for each piece and no merges: of all pairs of neighbours whose
# concatenation is a piece, the one with the best score is merged first. The merges that give the same result are
# every way to cut a piece into two pieces, in the order of the whole's score. Source:
# https://github.com/google/sentencepiece (src/bpe_model.cc, src/normalizer.cc).


WORD_START = "▁"  # U+2581, which SentencePiece writes for a space

# Where a word begins though the text has no space there: nowhere, at the start of each piece of text between special
# tokens, or at the start of the whole text, unless it begins with a space.
SpacePrefix = Literal["never", "each", "first"]


def sentencepiece_backend(
    model: SentencePieceModel, pieces: Sequence[Piece], prefix: SpacePrefix, source: str
) -> tokenizers.Tokenizer:
    """A tokenizer of a SentencePiece model.

    Args:
      model: The model's rules.
      pieces: The vocabulary; its control and user-defined pieces become added tokens.
      prefix: Where a word begins without a space.
      source: The model's file, for errors.

    Raises:
      CheckpointError: A kind of model that is not supported.
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
    """A tokenizer of a SentencePiece BPE vocabulary.

    Args:
      pieces: The vocabulary, without two pieces of the same text.
      prefix: Where a word begins without a space.
      source: What the vocabulary was read from, for errors.
      cleaning: What is done to a string before its spaces are marked.
      byte_fallback: Whether what is not in the vocabulary becomes one token for each byte of its UTF-8 form.
      merges: Pairs of pieces, the first to be merged first; None: those that follow from the pieces' scores.
    """
    unknown = next((piece.text for piece in pieces if piece.type == PieceType.UNKNOWN), None)
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    merges = derive_merges(pieces) if merges is None else merges
    model = bpe_model(vocab, merges, source, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    return _backend(model, pieces, prefix, cleaning)


def derive_merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to cut a piece into two pieces, those of the best piece first.

    Equal scores are told apart as transformers does: the longer left part first, then the longer right part. Control
    and byte pieces are neither parts nor results: text that spells them is text.
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
    """The pieces that are found in a string before it is cut into others.

    A run of spaces is found in the normalized text, where it is a run of word starts. A prefix would be added to the
    run as well, so there its merges have to do.
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
    """Whether this is a vocabulary of Mistral since its second: its templates write the space that begins a word."""
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
