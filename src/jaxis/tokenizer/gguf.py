"""The tokenizer of a GGUF file, from its metadata: a `tokenizers` backend and the settings of tokenizer_config.json.

The keys are llama.cpp's (src/llama-vocab.cpp, gguf-py/gguf/constants.py). A row of `tokenizer.ggml.tokens` is a row of
the embedding. So every row keeps its id, also if two have the same text or one is not valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxis.errors import CheckpointError
from jaxis.tokenizer.byte_level import byte_level_backend
from jaxis.tokenizer.config import DEFAULT_TEMPLATE, TokenizerConfig
from jaxis.tokenizer.sentencepiece import (
    WORD_START,
    SpacePrefix,
    sentencepiece_backend,
    sentencepiece_bpe_backend,
    writes_spaces_after_special_tokens,
)
from jaxis.tokenizer.sentencepiece_file import ModelType, Piece, PieceType, SentencePieceModel
from jaxis.tokenizer.sequence_ends import add_sequence_ends
from jaxis.tokenizer.split_rules import SPLIT_RULES, adds_bos_by_default
from jaxis.tokenizer.token_texts import distinct_texts
from jaxis.tokenizer.wordpiece import wordpiece_backend

_INSTEAD = "use a file made with a newer llama.cpp, or the model's safetensors"
SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # llama.cpp's spelling
    "mask_token": "mask_token_id",
}
# What llama.cpp assumes of a vocabulary that does not say.
_ASSUMED_IDS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "bert": {"seperator_token_id": 102, "unknown_token_id": 100, "padding_token_id": 0},
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
}
_END_OF_TURN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# The end-of-sequence token of a chat model's file is often its base model's; these end an answer wherever they exist.
END_OF_TURN_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot|>",
        "<|return|>",
        "<|call|>",
        "</s>",
        "[EOS]",
    }
)
# In the harmony format an answer is several messages: <|end|> ends one, <|return|> and <|call|> end the answer.
_HARMONY_TOKENS = frozenset({"<|return|>", "<|call|>", "<|end|>"})
_NO_TOKENIZER = (None, "none", "no_vocab")
_PHI3_PLAIN_TOKENS = frozenset({"<unk>", "<s>", "<|endoftext|>"})

_ASSUMED_CLS = 101


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a GGUF file with these keys has a tokenizer of any kind."""
    return metadata.get("tokenizer.ggml.model") not in _NO_TOKENIZER


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    """Builds the tokenizer that a GGUF file's keys describe; strings may have surrogate escapes (bytes not UTF-8).

    Raises CheckpointError for a tokenizer that is not supported, or metadata that is missing, broken or contradictory.
    """
    values = _Values(metadata, source)
    model = values.get("model", str)
    if model not in ("bert", "gemma4", "llama", "gpt2", "t5"):
        raise CheckpointError(
            f"{source} has no tokenizer"
            if model in _NO_TOKENIZER
            else f"{source} has a tokenizer of the kind {model!r}; supported: 'llama' (SentencePiece BPE), 't5' "
            f"(SentencePiece Unigram), 'gpt2' (byte-level BPE), 'gemma4' and 'bert' (WordPiece); {_INSTEAD}"
        )
    pieces = _pieces(values)
    ids = _special_token_ids(values, len(pieces), model)
    if whole := values.get("huggingface.json", str, prefix="tokenizer."):
        backend = _whole_tokenizer(whole, source)
    elif model == "bert":
        backend = _wordpiece_backend(values, pieces, ids)
    elif model == "llama":
        backend = _sentencepiece_backend(values, pieces)
        _add_ends(backend, values, ids, adds_bos=True)
    elif model == "gemma4":  # SentencePiece's spelling, with merges of its own
        backend = sentencepiece_bpe_backend(pieces, "never", source, merges=_merges(values))
        _add_ends(backend, values, ids, adds_bos=True)
    elif model == "t5":
        backend = _unigram_backend(values, pieces, ids)
        _add_ends(backend, values, ids, adds_bos=False, adds_eos=True)
    else:
        backend = _gpt2_backend(values, pieces)
        adds_bos = "bos_token_id" in ids and adds_bos_by_default(values.get("pre", str) or "")
        _add_ends(backend, values, ids, adds_bos=adds_bos)
    return backend, _config(values, pieces, ids)


class _Values:
    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self.source = source

    def get(self, name: str, kind: type, *, prefix: str = "tokenizer.ggml.") -> Any:
        """Returns a key's value, None if it is absent. Raises CheckpointError if the value has another type."""
        value = self._metadata.get(prefix + name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.fault(f"{prefix}{name} is of type {type(value).__name__}, not {kind.__name__}")
        return value

    def array(self, name: str, kinds: type | tuple[type, ...], length: int | None = None) -> list[Any] | None:
        """Returns an array's elements, None if it is absent. Raises CheckpointError for another type, or too few."""
        value = self._metadata.get("tokenizer.ggml." + name)
        if value is None:
            return None
        if hasattr(value, "tolist"):  # a NumPy array
            value = value.tolist()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.fault(f"tokenizer.ggml.{name} is not an array")
        if not all(isinstance(element, kinds) for element in value):
            raise self.fault(f"tokenizer.ggml.{name} has elements of the wrong type")
        if length is not None and len(value) < length:
            raise self.fault(f"tokenizer.ggml.{name} has {len(value)} elements for {length} tokens")
        return list(value)

    def templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        names = [name for name in self._metadata if name.startswith(prefix + ".")]
        templates = {name.removeprefix(prefix + "."): self.get(name, str, prefix="") for name in names}
        if default := self.get("chat_template", str, prefix="tokenizer."):
            templates[DEFAULT_TEMPLATE] = default
        return templates

    @property
    def architecture(self) -> str | None:
        return self.get("general.architecture", str, prefix="")

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {what}; fetch the file again")


def _pieces(values: _Values) -> list[Piece]:
    """Returns the vocabulary, with texts that are valid and distinct."""
    tokens = values.array("tokens", str)
    if not tokens:
        raise values.fault("tokenizer.ggml.tokens is missing or empty")
    scores = values.array("scores", (int, float), len(tokens)) or [0.0] * len(tokens)
    if any(score != score for score in scores):
        raise values.fault("tokenizer.ggml.scores has elements that are not numbers")
    types = values.array("token_type", int, len(tokens)) or [PieceType.NORMAL] * len(tokens)
    texts = distinct_texts(tokens)
    return [
        Piece(text, score, kind if text == token else PieceType.UNUSED)
        for text, token, score, kind in zip(texts, tokens, scores, types, strict=False)
    ]


def _special_token_ids(values: _Values, num_tokens: int, model: str) -> dict[str, int]:
    ids = {}
    for name in dict.fromkeys([*SPECIAL_TOKEN_KEYS.values(), *_END_OF_TURN_KEYS]):
        token_id = values.get(name, int)
        if token_id is None:
            token_id = _ASSUMED_IDS.get(model, {}).get(name)
        if token_id is None:
            continue
        if not 0 <= token_id < num_tokens:
            raise values.fault(f"tokenizer.ggml.{name} is {token_id}, but there are {num_tokens} tokens")
        ids[name] = token_id
    return ids


def _sentencepiece_backend(values: _Values, pieces: list[Piece]) -> tokenizers.Tokenizer:
    prefix: SpacePrefix = "each"
    if values.get("add_space_prefix", bool) is False:
        prefix = "never"
    elif writes_spaces_after_special_tokens(pieces):
        prefix = "first"
    backend = sentencepiece_bpe_backend([_with_word_starts(piece) for piece in pieces], prefix, values.source)
    if values.architecture in ("phi3", "phimoe"):
        backend.add_tokens(
            [
                AddedToken(token.content, special=token.special, normalized=False, rstrip=True)
                for token in backend.get_added_tokens_decoder().values()
                if token.content not in _PHI3_PLAIN_TOKENS
            ]
        )
    return backend


def _unigram_backend(values: _Values, pieces: list[Piece], ids: dict[str, int]) -> tokenizers.Tokenizer:
    normal = [piece.score for piece in pieces if piece.type != PieceType.UNUSED]
    if not normal:
        raise values.fault("the vocabulary has no token that is used")
    # What is unknown costs a little more than the worst token. Rows that fill the table up are no tokens, and their
    # texts, such as [PAD250001], no text: behind a null character, they are found in none.
    pieces = [
        Piece(f"\0{piece.text}", min(normal), piece.type) if piece.type == PieceType.UNUSED else piece
        for piece in pieces
    ]
    charsmap = values.array("precompiled_charsmap", int) or []
    if not all(-128 <= byte <= 255 for byte in charsmap):
        raise values.fault("tokenizer.ggml.precompiled_charsmap has elements that are not bytes")
    # Converters write something else into this key for XLM-RoBERTa where the folder has only tokenizer.json.
    removes = values.get("remove_extra_whitespaces", bool) is not False or values.architecture == "bert"
    model = SentencePieceModel(
        pieces=pieces,
        model_type=ModelType.UNIGRAM,
        byte_fallback=any(piece.type == PieceType.BYTE for piece in pieces),
        charsmap=bytes(byte & 0xFF for byte in charsmap),
        add_dummy_prefix=values.get("add_space_prefix", bool) is not False,
        remove_extra_whitespaces=removes,
        whitespace_as_suffix=False,
        special_ids={"unk_token": ids["unknown_token_id"]},
    )
    return sentencepiece_backend(model, pieces, "each" if model.add_dummy_prefix else "never", values.source)


def _with_word_starts(piece: Piece) -> Piece:
    """Returns a user-defined run of spaces in SentencePiece's spelling; the file has plain spaces."""
    if piece.type == PieceType.USER_DEFINED and not piece.text.strip(" "):
        return Piece(WORD_START * len(piece.text), piece.score, piece.type)
    return piece


def _wordpiece_backend(values: _Values, pieces: list[Piece], ids: dict[str, int]) -> tokenizers.Tokenizer:
    """Builds WordPiece. In the file, words begin with SentencePiece's mark, and continuations with nothing."""

    def word(piece: Piece) -> str:
        is_special = piece.type in (PieceType.CONTROL, PieceType.UNKNOWN)
        if piece.text.startswith(WORD_START):
            return piece.text.removeprefix(WORD_START)
        is_bracketed = piece.text.startswith("[") and piece.text.endswith("]")  # as older converters leave it
        return piece.text if is_special or is_bracketed else f"##{piece.text}"

    words = [word(piece) for piece in pieces]
    vocabulary = dict(zip(reversed(words), reversed(range(len(words))), strict=True))
    roles = {"cls_token": values.get("cls_token_id", int), "unk_token": ids.get("unknown_token_id")}
    roles |= {name: ids.get(SPECIAL_TOKEN_KEYS[name]) for name in ("sep_token", "pad_token", "mask_token")}
    if roles["cls_token"] is None:
        roles["cls_token"] = ids.get("bos_token_id", _ASSUMED_CLS)
    for name in ("cls_token", "sep_token", "unk_token"):
        if (token_id := roles[name]) is None or not 0 <= token_id < len(words):
            raise values.fault(f"the vocabulary has no {name}")
    special = {
        name: AddedToken(words[token_id], special=True, normalized=False)
        for name, token_id in roles.items()
        if token_id is not None
    }
    # The file does not say whether text is lowercased; a vocabulary without uppercase words has no use for others.
    rest = set(words) - {token.content for token in special.values()}
    is_lower = not any(each.isupper() for each in rest if not (each.startswith("[") and each.endswith("]")))
    return wordpiece_backend(vocabulary, {"do_lower_case": is_lower}, special)


def _gpt2_backend(values: _Values, pieces: list[Piece]) -> tokenizers.Tokenizer:
    pre = values.get("pre", str)
    if pre not in SPLIT_RULES:
        what = "does not say how its text is split" if pre in (None, "", "default") else f"splits text as {pre!r}"
        raise CheckpointError(
            f"{values.source} {what} (tokenizer.ggml.pre); a guess would give wrong tokens; {_INSTEAD}"
        )
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    backend = byte_level_backend(vocab, _merges(values), SPLIT_RULES[pre], values.source)
    backend.add_tokens(
        [
            AddedToken(piece.text, special=piece.type != PieceType.USER_DEFINED, normalized=False)
            for piece in pieces
            if piece.type in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED)
        ]
    )
    return backend


def _merges(values: _Values) -> list[tuple[str, str]]:
    merges = values.array("merges", str)
    if merges is None:
        raise values.fault("tokenizer.ggml.merges is missing")
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise values.fault(f"tokenizer.ggml.merges has {merge!a}, which is not two tokens")
        pairs.append((left, right))
    return pairs


def _whole_tokenizer(text: str, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises a plain Exception for any fault in the text
        raise CheckpointError(
            f"{source}: tokenizer.huggingface.json is not a valid tokenizer ({' '.join(str(error).split())}); "
            "fetch the file again"
        ) from error


def _add_ends(
    backend: tokenizers.Tokenizer, values: _Values, ids: dict[str, int], *, adds_bos: bool, adds_eos: bool = False
) -> None:
    ends: dict[str, int | None] = {"bos": None, "eos": None}
    for end, default in (("bos", adds_bos), ("eos", adds_eos)):
        wanted = values.get(f"add_{end}_token", bool)
        if default if wanted is None else wanted:
            ends[end] = ids.get(f"{end}_token_id")
            if ends[end] is None:
                raise values.fault(f"tokenizer.ggml.add_{end}_token is true, but there is no {end}_token_id")
    add_sequence_ends(backend, ends["bos"], ends["eos"])


def _config(values: _Values, pieces: list[Piece], ids: dict[str, int]) -> TokenizerConfig:
    special_tokens = {
        name: AddedToken(pieces[ids[key]].text, special=True, normalized=False)
        for name, key in SPECIAL_TOKEN_KEYS.items()
        if key in ids and _has_role(name, pieces[ids[key]])
    }
    return TokenizerConfig(
        special_tokens=special_tokens,
        chat_templates=values.templates(),
        stop_token_ids=_stop_token_ids(pieces, ids),
    )


def _has_role(name: str, piece: Piece) -> bool:
    """Returns whether a token with a special role can be special; a word named for padding stays a word."""
    return name in ("bos_token", "eos_token") or piece.type not in (PieceType.NORMAL, PieceType.BYTE)


def _stop_token_ids(pieces: list[Piece], ids: dict[str, int]) -> frozenset[int]:
    control = {piece.text: i for i, piece in enumerate(pieces) if piece.type == PieceType.CONTROL}
    by_text = {control[text] for text in END_OF_TURN_TOKENS & set(control)}
    if set(control) >= _HARMONY_TOKENS:
        by_text.discard(control["<|end|>"])
    return frozenset(by_text | {ids[key] for key in _END_OF_TURN_KEYS if key in ids})
