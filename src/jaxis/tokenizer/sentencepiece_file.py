"""Reader of SentencePiece model files (`tokenizer.model`, `spiece.model`).

The file is one protocol buffer message, of which a dozen fields are read here, without sentencepiece or protobuf.
Source: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto and
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxis.errors import CheckpointError


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
    """Algorithm that cuts a string into pieces."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class SentencePieceModel:
    """Content of a model file.

    Attributes:
      byte_fallback: True makes text outside the vocabulary one piece for each byte.
      charsmap: Compiled rules that normalize the text; empty if there are none.
      add_dummy_prefix: True begins strings with an added space.
      remove_extra_whitespaces: True drops spaces at the ends and repeated ones.
      whitespace_as_suffix: True if a space belongs to the word before it.
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
        """Reads a model file. Raises CheckpointError if the file cannot be read, or is not a SentencePiece model."""
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
    """Yields the fields of a message: their numbers and values, an integer or the bytes of anything else."""
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
    return value - (1 << 64) if value >= 1 << 63 else value
