import base64
import json
import random
import re
import unicodedata

import pytest
import tiktoken
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxis.errors import CheckpointError
from jaxis.tokenizer import IncrementalDetokenizer, Tokenizer
from jaxis.tokenizer.split_rules import SPLIT_RULES
from tests.support.gguf_tokenizers import train_sentencepiece
from tests.support.tokenizer_families import TEXTS

PLAIN_TEXTS = [text for text in TEXTS if not any(mark in text for mark in ("<s>", "</s>", "\x00", "<|"))]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def random_texts(count, seed=0):
    choose = random.Random(seed)
    letters = [*map(chr, range(32, 127)), *"áß¿Ωж東京👩‍🌈́\t", *" " * 60, *"\n" * 8]
    return ["".join(choose.choices(letters, k=choose.randint(1, 50))) for _ in range(count)]


def write_sentencepiece(folder, processor, *, name="tokenizer.model", **config):
    (folder / name).write_bytes(processor.serialized_model_proto())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def bpe():
    return train_sentencepiece(user_defined_symbols=["<tool>"])


@pytest.fixture(scope="module")
def byte_level(family_folder):
    """A byte-level vocabulary, by id, and its merges."""
    values = json.loads((family_folder("llama3") / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = values["model"]["vocab"]
    return sorted(vocab, key=vocab.get), [tuple(merge) for merge in values["model"]["merges"]]


@pytest.fixture(scope="module")
def ranks(byte_level):
    """The same vocabulary as bytes -> rank."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return {bytes(byte_of[character] for character in token): rank for rank, token in enumerate(byte_level[0])}


def test_a_sentencepiece_bpe_model_alone_encodes_as_sentencepiece(tmp_path, bpe):
    write_sentencepiece(tmp_path, bpe)
    ours = Tokenizer.from_path(tmp_path)
    for text in [*PLAIN_TEXTS, *random_texts(200), "a <tool>"]:
        expected = bpe.encode(text)
        assert ours.encode(text) == [bpe.bos_id(), *expected]
        assert ours.decode(expected) == bpe.decode(expected) == text
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_a_unigram_model_encodes_as_sentencepiece(tmp_path, name, rule):
    processor = train_sentencepiece(
        model_type="unigram", vocab_size=500, normalization_rule_name=rule, remove_extra_whitespaces=rule != "identity"
    )
    write_sentencepiece(tmp_path, processor, name=name, add_bos_token=False)
    ours = Tokenizer.from_path(tmp_path)
    # The library composes a character with all its marks, where SentencePiece leaves some, and it takes text that
    # spells a byte piece for the byte.
    texts = [text for text in [*PLAIN_TEXTS, "ﬁ ① ｶ"] if "\u0323" not in text and "<0x41>" not in text]
    for text in texts:
        expected = processor.encode(text)
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == processor.decode(expected)


def test_a_model_without_prefix_or_bytes_encodes_as_sentencepiece(tmp_path):
    processor = train_sentencepiece(add_dummy_prefix=False, byte_fallback=False)
    write_sentencepiece(tmp_path, processor, add_bos_token=False, add_eos_token=True)
    ours = Tokenizer.from_path(tmp_path)
    for text in PLAIN_TEXTS:
        assert ours.encode(text) == [*processor.encode(text), processor.eos_id()]


def test_a_folder_of_the_llama_class_encodes_as_transformers(tmp_path, bpe):
    size = bpe.get_piece_size()
    added = {
        str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": i > size, "single_word": False}
        | {"special": i > size}
        for i, text in ((1, "<s>"), (2, "</s>"), (size, "<think>"), (size + 1, "<|im_end|>"))
    }
    for i in ("1", "2"):
        added[i]["special"] = True
    write_sentencepiece(
        tmp_path,
        bpe,
        added_tokens_decoder=added,
        add_bos_token=True,
        eos_token="<|im_end|>",
        bos_token="<s>",
        unk_token="<unk>",
        legacy=False,
        tokenizer_class="LlamaTokenizer",
    )
    ours, theirs = Tokenizer.from_path(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "the<think> cat<|im_end|>  \n the", *random_texts(100)]:
        if not text.startswith("<s>"):  # transformers drops a word start there
            assert ours.encode(text) == theirs.encode(text), text
    assert ours.eos_token_id == size + 1
    assert size in ours.encode("a<think>b")


@pytest.mark.parametrize("legacy", [None, True, False])
def test_words_begin_after_special_tokens_as_legacy_says(tmp_path, bpe, legacy):
    write_sentencepiece(tmp_path, bpe, **({} if legacy is None else {"legacy": legacy}))
    word = bpe.encode("the", add_bos=False)
    after = Tokenizer.from_path(tmp_path).encode("</s>the")[2:]
    assert (after == word) == (legacy is not False)


def test_added_tokens_json_gives_ids(tmp_path, bpe):
    size = bpe.get_piece_size()
    write_sentencepiece(tmp_path, bpe, eos_token="<|im_end|>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 2, "<x>": size}))
    ours = Tokenizer.from_path(tmp_path)
    ids = ours.encode("the<x>cat<|im_end|>")
    assert (ids.index(size), ids[-1]) == (2, size + 2)
    assert ours.eos_token_id == size + 2
    assert size + 2 in ours.special_token_ids
    assert size not in ours.special_token_ids


def test_a_config_renames_rows_of_the_vocabulary(tmp_path, bpe):
    token_id = bpe.piece_to_id("▁the")
    added = {str(token_id): {"content": "<|turn|>", "special": True, "normalized": False}}
    write_sentencepiece(tmp_path, bpe, added_tokens_decoder=added)
    assert Tokenizer.from_path(tmp_path).encode("<|turn|>")[1:] == [token_id]


def write_tekken(folder, byte_level, ranks, special=None, number=12):
    values = {
        "config": {
            "pattern": SPLIT_RULES["tekken"].patterns[0],
            "default_vocab_size": number + len(ranks) - 5,
            "default_num_special_tokens": number,
        },
        "vocab": [
            {"rank": r, "token_bytes": base64.b64encode(b).decode(), "token_str": None} for b, r in ranks.items()
        ],
    }
    if special is not None:
        values["special_tokens"] = special
    (folder / "tekken.json").write_text(json.dumps(values))


def test_tekken_encodes_as_tiktoken_behind_the_special_tokens(tmp_path, byte_level, ranks):
    write_tekken(tmp_path, byte_level, ranks)
    ours = Tokenizer.from_path(tmp_path)
    used = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 5}
    theirs = tiktoken.Encoding("t", pat_str=SPLIT_RULES["tekken"].patterns[0], mergeable_ranks=used, special_tokens={})
    for text in [*PLAIN_TEXTS, *random_texts(200)]:
        assert ours.encode(text) == [1, *(rank + 12 for rank in theirs.encode(text))], text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("<s>[INST] a[/INST]", add_special_tokens=False)[:2] == [1, 3]
    assert ours.special_token_ids == set(range(12))
    assert ours.special_tokens["eos_token"] == "</s>"
    assert not ours.has_chat_template


def test_tekken_lists_special_tokens_of_its_own(tmp_path, byte_level, ranks):
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "<s>", "[X]"])]
    write_tekken(tmp_path, byte_level, ranks, special, number=5)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[X]{{ messages[0].content }}")
    ours = Tokenizer.from_path(tmp_path)
    assert ours.encode("<s>[X]<SPECIAL_4>", add_special_tokens=False) == [1, 2, 4]
    assert ours.encode_chat([{"role": "user", "content": ""}]) == [1, 2]


def test_text_streams_from_other_layouts(tmp_path, bpe, byte_level, ranks):
    for name in ("sentencepiece", "tekken"):
        (tmp_path / name).mkdir()
    write_sentencepiece(tmp_path / "sentencepiece", bpe)
    write_tekken(tmp_path / "tekken", byte_level, ranks)
    for name in ("sentencepiece", "tekken"):
        tokenizer = Tokenizer.from_path(tmp_path / name)
        for text in PLAIN_TEXTS:
            detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the"))
            streamed = ""
            for token_id in tokenizer.encode("the" + text)[len(tokenizer.encode("the")) :]:
                detokenizer.update([token_id])
                streamed += detokenizer.delta()
            detokenizer.finish()
            assert "the" + streamed + detokenizer.delta() == tokenizer.decode(tokenizer.encode("the" + text))


@pytest.mark.parametrize(
    ("name", "tokenizer_class", "pre"),
    [("tiktoken.model", "TikTokenTokenizer", "kimi-k2"), ("qwen.tiktoken", "QWenTokenizer", "qwen2")],
)
def test_a_tiktoken_file_encodes_as_tiktoken(tmp_path, ranks, name, tokenizer_class, pre):
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(ranks) + 3): {"content": "[EOT]", "special": True}}
    config = {"tokenizer_class": tokenizer_class, "added_tokens_decoder": added, "eos_token": "[EOT]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_path(tmp_path)
    [pattern] = SPLIT_RULES[pre].patterns
    # tiktoken's regular expressions have no `&&`: there it is spelled as a lookahead, as in Kimi's own code for others.
    theirs = tiktoken.Encoding(
        "t", pat_str=_without_intersections(pattern), mergeable_ranks=ranks, special_tokens={"[EOT]": len(ranks) + 3}
    )
    for text in [*PLAIN_TEXTS, "x 1234東京abc don't!\n[EOT]a", *random_texts(200)]:
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert ours.encode(text) == theirs.encode(composed, allowed_special="all"), text
    assert ours.eos_token_id == len(ranks) + 3


def _without_intersections(pattern):
    return re.sub(r"\[([^\[\]]*)&&\[\^\\p\{Han\}\]\]([*+])", r"(?:(?!\\p{Han})[\1])\2", pattern)


@pytest.mark.parametrize(("model_type", "reference"), [("qwen2", Qwen2Tokenizer), ("gpt2", GPT2Tokenizer)])
def test_vocab_and_merges_encode_as_transformers(tmp_path, byte_level, model_type, reference):
    texts, merges = byte_level
    (tmp_path / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(texts)}))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    added = {
        str(len(texts) + i): {"content": text, "special": True} for i, text in enumerate(["<|im_start|>", "<|x|>"])
    }
    names = dict.fromkeys(("eos_token", "bos_token", "unk_token", "pad_token"), "<|x|>")
    config = {"tokenizer_class": reference.__name__, "added_tokens_decoder": added, **names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = Tokenizer.from_path(tmp_path), reference.from_pretrained(tmp_path)
    for text in [*TEXTS, *random_texts(100)]:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("<|im_start|><|x|>") == [len(texts), len(texts) + 1]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("vocab.json", {}, "without a tokenizer_class.*how text is split is not known.*save_pretrained"),
        ("vocab.json", {"tokenizer_class": "GPT2Tokenizer"}, "GPT2Tokenizer of llama.*how text is split is not known"),
        ("vocab.json", {"tokenizer_class": "Qwen2TokenizerFast"}, "merges.txt is missing"),
        ("tiktoken.model", {"tokenizer_class": "MyTokenizer"}, "class MyTokenizer.*how text is split is not known"),
        ("tokenizer.model", {"tokenizer_class": "InternLM2Tokenizer"}, "class InternLM2Tokenizer.*not known"),
    ],
)
def test_unknown_rules_are_refused_with_what_to_do(tmp_path, name, config, message):
    (tmp_path / name).write_text('{"a": 0}')
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("model_type", ["word", "char"])
def test_other_sentencepiece_models_are_refused(tmp_path, model_type):
    write_sentencepiece(tmp_path, train_sentencepiece(model_type=model_type, vocab_size=60, byte_fallback=False))
    with pytest.raises(CheckpointError, match=f"model type {model_type.upper()}; supported: BPE and UNIGRAM"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "spiece.model", "m.gguf"],
)
def test_a_git_lfs_pointer_is_named(tmp_path, name):
    (tmp_path / name).write_text(LFS_POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        Tokenizer.from_path(tmp_path / name if name.endswith("gguf") else tmp_path)


def test_a_git_lfs_pointer_beside_the_tokenizer_is_named(tmp_path, bpe):
    write_sentencepiece(tmp_path, bpe)
    (tmp_path / "tokenizer_config.json").write_text(LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is a Git LFS pointer.*git lfs pull"):
        Tokenizer.from_path(tmp_path)


def assert_one_line_or_works(path):
    try:
        Tokenizer.from_path(path).encode("the cat")
        message = str(path)
    except CheckpointError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message


def broken(data, seed):
    """A file cut off, one with a few other bytes, one with a piece taken out."""
    choose = random.Random(seed)
    place = choose.randrange(len(data))
    changed = bytearray(data)
    for _ in range(4):
        changed[choose.randrange(min(len(data), 4000))] = choose.randrange(256)
    return [data[:place], bytes(changed), data[:place] + data[place + 3 :]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("seed", range(20))
def test_broken_sentencepiece_models_are_one_line_or_work(tmp_path, bpe, rule, seed):
    model = bpe if rule == "identity" else train_sentencepiece(normalization_rule_name=rule, vocab_size=400)
    for data in broken(model.serialized_model_proto(), seed):
        (tmp_path / "tokenizer.model").write_bytes(data)
        assert_one_line_or_works(tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_broken_tekken_and_tiktoken_files_are_one_line_or_work(tmp_path, byte_level, ranks, seed):
    write_tekken(tmp_path, byte_level, ranks)
    data = (tmp_path / "tekken.json").read_bytes()
    for content in broken(data, seed):
        (tmp_path / "tekken.json").write_bytes(content)
        assert_one_line_or_works(tmp_path)
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer"}))
    for content in broken(b"\n".join(base64.b64encode(t) + b" %d" % r for t, r in ranks.items()), seed):
        (tmp_path / "tiktoken.model").write_bytes(content)
        assert_one_line_or_works(tmp_path)


@pytest.mark.parametrize("charsmap", [b"\x04\0\0\0abcd", b"\0\0\0\0", b"\x01", b"\xff" * 50])
def test_broken_normalization_rules_are_one_line(tmp_path, charsmap):
    model = train_sentencepiece(normalization_rule_name="nmt_nfkc", vocab_size=400).serialized_model_proto()
    # A later field of a message overrides an earlier one: normalizer_spec { precompiled_charsmap }.
    spec = bytes([0x12, len(charsmap)]) + charsmap
    (tmp_path / "tokenizer.model").write_bytes(model + bytes([0x1A, len(spec)]) + spec)
    with pytest.raises(CheckpointError, match=r"tokenizer.model has normalization rules that cannot be read"):
        Tokenizer.from_path(tmp_path)


WRONG = [None, 3, "x", [], {}, [1], {"a": 1}, -1, 10**15, 1.5, True, {"a": 10**15}, {"a": -1}]


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_values_of_the_wrong_type_are_one_line_or_work(tmp_path, byte_level, ranks, value):
    write_tekken(tmp_path, byte_level, ranks)
    values = json.loads((tmp_path / "tekken.json").read_text())
    edits = [{**values, name: value} for name in ("config", "vocab", "special_tokens")]
    edits += [{**values, "config": {**values["config"], name: value}} for name in values["config"]]
    edits += [{**values, "special_tokens": [value]}, {**values, "vocab": [value] * len(ranks)}]
    for edited in edits:
        (tmp_path / "tekken.json").write_text(json.dumps(edited))
        assert_one_line_or_works(tmp_path)
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "merges.txt").write_text("a b\n")
    (tmp_path / "vocab.json").write_text(json.dumps(value))
    assert_one_line_or_works(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "added_tokens.json").write_text(json.dumps(value))
    assert_one_line_or_works(tmp_path)


@pytest.mark.parametrize("merges", [b"a", b"a b c", b"a zz", b"\xff \xfe", b" ", b"a  b"])
def test_broken_merges_are_one_line_or_work(tmp_path, merges):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_bytes(merges)
    assert_one_line_or_works(tmp_path)
