"""Tokenizers as keys of GGUF files."""

import json

import pytest
import tokenizers

from jaxis.bringup.convert.gguf_tokenizer import gguf_tokenizer_keys
from jaxis.errors import CheckpointError
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.byte_level import byte_level_backend, spell_bytes
from jaxis.tokenizer.config import TokenizerConfig
from jaxis.tokenizer.gguf import gguf_tokenizer
from jaxis.tokenizer.split_rules import SPLIT_RULES
from tests.support import tokenizer_families
from tests.support.tokenizer_families import TEXTS

WHOLE = "tokenizer.huggingface.json"


def described(folder, **changes):
    """The keys of a family's tokenizer, and the tokenizer itself."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    tokenizer = Tokenizer.from_path(folder)
    return gguf_tokenizer_keys(tokenizer, tokenizer.vocab_size + 3, {tokenizer.eos_token_id}, "llama", "x"), tokenizer


@pytest.mark.parametrize("name", ["llama3", "qwen3", "llama2", "llama2_v5", "mistral"])
def test_what_is_read_back_encodes_alike(name, tmp_path):
    found, original = described(tokenizer_families.FAMILIES[name](tmp_path / name))
    back = Tokenizer(*gguf_tokenizer({**found.keys, "general.architecture": "llama"}, "x"))
    assert [back.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]
    assert (back.bos_token_id, back.eos_token_id) == (original.bos_token_id, original.eos_token_id)
    assert len(found.keys["tokenizer.ggml.tokens"]) == original.vocab_size + 3
    assert found.keys["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]


@pytest.mark.parametrize("name", ["llama2_v5"])
def test_rules_without_a_key_are_noted_and_kept_for_jaxis(name, tmp_path):
    found, original = described(tokenizer_families.FAMILIES[name](tmp_path / name))
    assert found.keys[WHOLE] == original.to_json()
    assert ["llama.cpp will split some texts differently" in note for note in found.notes] == [True]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "llama2", "mistral"])
def test_what_keys_can_say_needs_no_notes(name, tmp_path):
    found, _ = described(tokenizer_families.FAMILIES[name](tmp_path / name))
    assert WHOLE not in found.keys
    assert found.notes == ()


@pytest.mark.parametrize("removes", [False, True])
def test_each_rule_of_splitting_is_written_under_a_name_that_splits_alike(removes):
    vocab = {spell_bytes(bytes([byte])): byte for byte in range(256)}
    for rules in set(SPLIT_RULES.values()):
        described = json.loads(byte_level_backend(vocab, [], rules, "x").to_str())
        for step in described["pre_tokenizer"]["pretokenizers"] if removes else ():
            if step["type"] == "Split":  # as many tokenizer.json say it
                step |= {"behavior": "Removed", "invert": True}
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)), TokenizerConfig())
        found = gguf_tokenizer_keys(tokenizer, len(vocab), set(), "llama", "x").keys["tokenizer.ggml.pre"]
        assert SPLIT_RULES[found] == rules


def test_unknown_splits_are_refused(tmp_path):
    folder = tokenizer_families.FAMILIES["qwen3"](tmp_path / "qwen3")
    *steps, last = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    for unknown in ([{"type": "Whitespace"}], [*steps, last | {"use_regex": True}]):
        with pytest.raises(CheckpointError, match=r"llama\.cpp has no name for how this tokenizer splits text"):
            described(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": unknown})


def test_merges_that_no_scores_lead_to_are_refused(tmp_path):
    folder = tokenizer_families.FAMILIES["llama2"](tmp_path / "llama2")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    with pytest.raises(CheckpointError, match="merges are not those of a SentencePiece vocabulary"):
        described(folder, model={**model, "merges": model["merges"][::2]})


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tokenizer = Tokenizer.from_path(tokenizer_families.FAMILIES["qwen3"](tmp_path / "qwen3"))
    with pytest.raises(CheckpointError, match="they are not of one model"):
        gguf_tokenizer_keys(tokenizer, 10, set(), "qwen3", "x")


def test_ends_that_the_file_cannot_name_are_noted(tmp_path):
    tokenizer = Tokenizer.from_path(tokenizer_families.FAMILIES["qwen3"](tmp_path / "qwen3"))
    ends = {tokenizer.eos_token_id, *(tokenizer.token_to_id(letter) for letter in "abc")}
    found = gguf_tokenizer_keys(tokenizer, tokenizer.vocab_size, ends, "qwen3", "x")
    assert found.notes == ("the file does not say that an answer ends with 'c'",)
