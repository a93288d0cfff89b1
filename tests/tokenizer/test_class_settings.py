"""Settings of tokenizer_config.json beside a tokenizer.json, against the tokenizer that transformers makes of both."""

import json
import logging
import random

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxis.tokenizer import Tokenizer
from tests.support.encoder_checkpoints import wordpiece

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
SENTENCES = ["Hello world, the quick brown Fox's 你好 Ünïcode café 123"] * 3
NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def byte_level():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return backend


def llama():
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    backend.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL + bytes_))
    return backend


def bert():
    words = ["Hello", "the", "Fox", *"Helowrdquickn'fxÜuïécabt你好.,"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = wordpiece([*special, *dict.fromkeys(words), "hello", "fox", "cafe", "##ello", "##e"])
    backend.decoder = decoders.WordPiece()
    return backend


BYTE_LEVEL = ["GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer"]
BERT = ["BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "SplinterTokenizer"]
GENERIC = "PreTrainedTokenizerFast"
PREFIXES = [{}, {"add_prefix_space": True}, {"add_prefix_space": False}]
OF_BERT = [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
OF_BERT += [{"do_lower_case": False, "strip_accents": True}, {"strip_accents": None}]
# What changes nothing, and what is applied to every class.
OTHERS = [{"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": False}, {"model_max_length": 3}]
OTHERS += [{"truncation_side": "left"}, {"padding_side": "left"}, {"trim_offsets": False}, {"errors": "strict"}]
OTHERS += [{"split_special_tokens": True}, {"clean_up_tokenization_spaces": True}, {"unk_token": "<s>"}]
OTHERS += [{"extra_special_tokens": ["Fox"]}, {"additional_special_tokens": ["Fox"]}]
OTHERS += [{"extra_special_tokens": {"image_token": "Fox"}, "additional_special_tokens": ["quick"]}]
ADDED = {"content": "<pad>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": True}
OTHERS += [{"added_tokens_decoder": {"3": ADDED}}, {"added_tokens_decoder": {"999": ADDED | {"content": "Fox"}}}]
CASES = [(byte_level, name, each) for name in [*BYTE_LEVEL, GENERIC] for each in PREFIXES]
CASES += [(bert, name, each) for name in [*BERT, GENERIC] for each in OF_BERT]
CASES += [
    (make, name, each) for make, name in [(byte_level, GENERIC), (byte_level, "GPT2Tokenizer")] for each in OTHERS
]


def write(folder, make, tokenizer_class, settings):
    make().save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": tokenizer_class} | (NAMES if make is not bert else {}) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def texts():
    rng = random.Random(0)
    pieces = [
        "Hello",
        " ",
        "the",
        "Fox",
        "'s",
        "你好",
        "Ü",
        "café",
        "12",
        "\n",
        "<s>",
        "</s>",
        "<pad>",
        ".",
        " ,",
        "quick",
    ]
    return ["", " ", *("".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(60))]


@pytest.mark.parametrize(("make", "tokenizer_class", "settings"), CASES)
def test_text_is_encoded_and_decoded_as_by_the_reference(make, tokenizer_class, settings, tmp_path):
    write(tmp_path, make, tokenizer_class, settings)
    reference, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_path(tmp_path)
    for text in texts():
        ids = reference.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_llamas_tokenizer_without_a_prefix_has_none(tmp_path):
    write(tmp_path, llama, "LlamaTokenizer", {"add_prefix_space": False})
    reference, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_path(tmp_path)
    for text in texts():
        ids = reference.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)


def test_what_a_class_does_not_apply_is_logged(tmp_path, caplog):
    write(tmp_path, bert, GENERIC, {"do_lower_case": False, "strip_accents": True})
    with caplog.at_level(logging.INFO, "jaxis.tokenizer"):
        Tokenizer.from_path(tmp_path)
    [record] = caplog.records
    assert "do_lower_case, strip_accents is not applied: PreTrainedTokenizer takes" in record.getMessage()
