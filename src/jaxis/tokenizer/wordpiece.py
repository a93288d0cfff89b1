from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxis.errors import CheckpointError

# The classes whose rules are these.
WORDPIECE_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def read_wordpiece(
    path: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, AddedToken]
) -> tokenizers.Tokenizer:
    """Reads a tokenizer of BERT's kind from a vocabulary, `vocab.txt`: one token a line.

    `settings` are tokenizer_config.json's: `do_lower_case` (true, unless it says something else),
    `tokenize_chinese_chars`, `strip_accents`. Raises CheckpointError if the vocabulary is not UTF-8, or lacks a special
    token.
    """
    try:
        words = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 ({error.reason}): fetch the file again") from None
    words = [word.removesuffix("\r") for word in (words[:-1] if not words[-1] else words)]
    vocabulary = {word: index for index, word in enumerate(words)}
    names = {name: special_tokens[name].content for name in SPECIAL_TOKENS}
    for name in ("unk_token", "cls_token", "sep_token"):
        if names[name] not in vocabulary:
            raise CheckpointError(f"{path} lacks the {name} {names[name]!r}: fetch the files again")
    known = {name: token for name, token in special_tokens.items() if token.content in vocabulary}
    return wordpiece_backend(vocabulary, settings, known)


def wordpiece_backend(
    vocabulary: Mapping[str, int], settings: Mapping[str, Any], special_tokens: Mapping[str, AddedToken]
) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a vocabulary, in which continuations of words begin with "##".

    The special tokens have names of SPECIAL_TOKENS and are the vocabulary's, among them "unk_token", "cls_token" and
    "sep_token". The settings are those of `read_wordpiece`.
    """
    names = {name: token.content for name, token in special_tokens.items()}
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=names["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),
        lowercase=bool(settings.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    first, last = names["cls_token"], names["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    backend.add_special_tokens([special_tokens[name] for name in SPECIAL_TOKENS if name in special_tokens])
    return backend
