"""A vocab.txt becomes the tokenizer that transformers makes of it."""

from __future__ import annotations

import json

import pytest
import transformers

from jaxis.errors import CheckpointError
from jaxis.tokenizer import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "Cat", "cafe", "café", "!", "中", "国", "a"]
TEXTS = ["The cats!", "café CAFE", "中国 cat", "dogs a [MASK] the", "  a\tcat\n", "Cat\u0000s", ""]


def save(folder, words=WORDS, **settings):
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"tokenizer_class": "BertTokenizer", "strip_accents": False, "tokenize_chinese_chars": False},
    ],
)
def test_ids_are_the_references(settings, tmp_path):
    tokenizer = Tokenizer.from_path(save(tmp_path, **settings))
    reference = transformers.BertTokenizer.from_pretrained(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text)["input_ids"] for text in TEXTS]
    pair = reference("the cat", "a cat")
    ids, second_start = tokenizer.encode_pair("the cat", "a cat")
    assert (ids, second_start) == (pair["input_ids"], pair["token_type_ids"].index(1))
    assert tokenizer.decode(reference("the cats")["input_ids"]) == "the cats"


def test_broken_vocabularies_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks the sep_token '\[SEP\]'"):
        Tokenizer.from_path(save(tmp_path, [word for word in WORDS if word != "[SEP]"]))
    with pytest.raises(CheckpointError, match="MPNetTokenizer"):
        Tokenizer.from_path(save(tmp_path, tokenizer_class="MPNetTokenizer"))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "vocab.txt").write_bytes(b"\xff\n")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        Tokenizer.from_path(tmp_path)
