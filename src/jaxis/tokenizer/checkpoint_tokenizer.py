"""Finds and reads a checkpoint's tokenizer, in any layout.

A tokenizer.json is the whole tokenizer and comes first. The other layouts are a vocabulary: the class in
tokenizer_config.json determines how text is split. If the class is unknown, the tokenizer is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from jaxis.errors import CheckpointError
from jaxis.loading.git_lfs import check_not_lfs_pointer
from jaxis.rooms import room_module
from jaxis.tokenizer.byte_level_files import read_merges_files, read_tiktoken_file, unknown_rules
from jaxis.tokenizer.class_settings import apply_class_settings
from jaxis.tokenizer.config import TokenizerConfig, read_json_object
from jaxis.tokenizer.gguf import gguf_tokenizer, has_tokenizer
from jaxis.tokenizer.sentencepiece import SpacePrefix, sentencepiece_backend, writes_spaces_after_special_tokens
from jaxis.tokenizer.sentencepiece_file import Piece, PieceType, SentencePieceModel
from jaxis.tokenizer.sequence_ends import add_sequence_ends
from jaxis.tokenizer.tekken import SPECIAL_TOKENS as TEKKEN_SPECIAL_TOKENS
from jaxis.tokenizer.tekken import read_tekken
from jaxis.tokenizer.token_texts import distinct_texts, with_added_tokens
from jaxis.tokenizer.wordpiece import SPECIAL_TOKENS as WORDPIECE_SPECIAL_TOKENS
from jaxis.tokenizer.wordpiece import WORDPIECE_CLASSES, read_wordpiece

# In this order: a folder may have several.
_FILES = (
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
)
# The classes over a SentencePiece model whose rules are the model's, and which add the beginning of a sequence.
_SENTENCEPIECE_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
_GENERIC_CLASSES = (None, "PreTrainedTokenizer", "TokenizersBackend")


def read_checkpoint_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig] | None:
    """Reads the tokenizer of a checkpoint's folder or of a GGUF file; None if there is none.

    Raises CheckpointError if a file is broken, or the tokenizer is not supported.
    """
    if path.is_file():
        metadata = room_module("loading.gguf", "container", str(path)).read_gguf_metadata(path)
        return gguf_tokenizer(metadata, str(path)) if has_tokenizer(metadata) else None
    if (path / "tokenizer.json").is_file():
        backend, config = _read_tokenizer_json(path / "tokenizer.json"), TokenizerConfig.from_folder(path)
        settings = path / "tokenizer_config.json"
        apply_class_settings(backend, config.tokenizer_class, read_json_object(settings), str(settings))
        return backend, config
    for name in _FILES:
        if (path / name).is_file():
            check_not_lfs_pointer(path / name)
            return _read_other(path / name, TokenizerConfig.from_folder(path))
    return None


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    check_not_lfs_pointer(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a plain Exception for any fault in the file
        raise CheckpointError(
            f"{path} is not a valid tokenizer file ({' '.join(str(error).split())}); fetch the file again"
        ) from error


def _read_other(path: Path, config: TokenizerConfig) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    if path.name == "tekken.json":
        backend = read_tekken(path)
        config = _with_defaults(config, TEKKEN_SPECIAL_TOKENS)
        _add_ends(backend, config, adds_bos=True)
        return backend, config
    added = config.added_tokens or _read_added_tokens(path.with_name("added_tokens.json"), config)
    if path.name in ("tokenizer.model", "spiece.model") and not _is_tiktoken(path):
        return _read_sentencepiece(path, config, added)
    if path.name == "vocab.json":
        model_type = read_json_object(path.with_name("config.json")).get("model_type")
        backend = read_merges_files(path, config.tokenizer_class, model_type, added)
    elif path.name == "vocab.txt":
        return _read_wordpiece(path, config)
    else:
        backend = read_tiktoken_file(path, config.tokenizer_class, added)
    _add_ends(backend, config, adds_bos=False)
    return backend, config


def _read_wordpiece(path: Path, config: TokenizerConfig) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    if config.tokenizer_class not in (*WORDPIECE_CLASSES, *_GENERIC_CLASSES):
        raise unknown_rules(path, config.tokenizer_class, list(WORDPIECE_CLASSES))
    config = _with_defaults(config, WORDPIECE_SPECIAL_TOKENS)
    settings = read_json_object(path.with_name("tokenizer_config.json"))
    return read_wordpiece(path, settings, config.special_tokens), config


def _is_tiktoken(path: Path) -> bool:
    """Returns whether a `tokenizer.model` is tiktoken's text, lines of base64 and a rank, not SentencePiece's."""
    with path.open("rb") as file:
        line = file.read(256).partition(b"\n")[0].split()
    return len(line) == 2 and line[0].isascii() and line[1].isdigit()


def _read_sentencepiece(
    path: Path, config: TokenizerConfig, added: Mapping[int, AddedToken]
) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    if config.tokenizer_class not in (*_SENTENCEPIECE_CLASSES, *_GENERIC_CLASSES):
        raise unknown_rules(path, config.tokenizer_class, list(_SENTENCEPIECE_CLASSES))
    model = SentencePieceModel.from_file(path)
    try:
        texts = with_added_tokens(distinct_texts([piece.text for piece in model.pieces]), added)
    except ValueError as error:
        raise CheckpointError(f"{path.parent}: {error} in tokenizer_config.json; fetch the file again") from error
    pieces = [_piece(model, i, text, added.get(i)) for i, text in enumerate(texts)]
    backend = sentencepiece_backend(model, pieces, _space_prefix(model, config), str(path))
    config = _with_defaults(config, {role: pieces[i].text for role, i in model.special_ids.items()})
    _add_ends(backend, config, adds_bos="bos_token" in model.special_ids)
    return backend, config


def _piece(model: SentencePieceModel, token_id: int, text: str, added: AddedToken | None) -> Piece:
    if added is not None:
        return Piece(text, type=PieceType.CONTROL if added.special else PieceType.USER_DEFINED)
    original = model.pieces[token_id] if token_id < len(model.pieces) else None
    if original is None or original.text != text:
        return Piece(text, type=PieceType.UNUSED)
    return original


def _space_prefix(model: SentencePieceModel, config: TokenizerConfig) -> SpacePrefix:
    if not model.add_dummy_prefix or config.add_prefix_space is False:
        return "never"
    if config.legacy is None:
        # transformers took it as true when such folders were written; Mistral's own have no such key.
        return "first" if writes_spaces_after_special_tokens(model.pieces) else "each"
    return "each" if config.legacy else "first"


def _with_defaults(config: TokenizerConfig, special_tokens: Mapping[str, str]) -> TokenizerConfig:
    defaults = {name: AddedToken(text, special=True, normalized=False) for name, text in special_tokens.items()}
    return dataclasses.replace(config, special_tokens={**defaults, **config.special_tokens})


def _add_ends(backend: tokenizers.Tokenizer, config: TokenizerConfig, *, adds_bos: bool) -> None:
    ends: dict[str, int | None] = {"bos_token": None, "eos_token": None}
    wanted = {"bos_token": adds_bos if config.add_bos_token is None else config.add_bos_token}
    wanted["eos_token"] = bool(config.add_eos_token)
    for role in ends:
        token = config.special_tokens.get(role)
        if wanted[role] and token is not None:
            ends[role] = backend.token_to_id(token.content)
    add_sequence_ends(backend, ends["bos_token"], ends["eos_token"])


def _read_added_tokens(path: Path, config: TokenizerConfig) -> dict[int, AddedToken]:
    """Reads id -> token of added_tokens.json, which older checkpoints have instead of `added_tokens_decoder`."""
    ids = read_json_object(path)
    if not all(type(token_id) is int for token_id in ids.values()):
        raise CheckpointError(f"{path} is not a map from tokens to ids; fetch the file again")
    special = {token.content for token in [*config.special_tokens.values(), *config.extra_special_tokens]}
    return {
        token_id: AddedToken(text, special=text in special, normalized=False)
        for text, token_id in sorted(ids.items(), key=lambda item: item[1])
    }
