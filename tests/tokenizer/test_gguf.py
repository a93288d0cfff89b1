import random
import unicodedata

import gguf
import pytest
import tokenizers

from jaxis.errors import CheckpointError
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.gguf import gguf_tokenizer
from jaxis.tokenizer.sentencepiece import derive_merges
from jaxis.tokenizer.sentencepiece_file import Piece
from jaxis.tokenizer.split_rules import SPLIT_RULES
from tests.support.gguf_tokenizers import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
    train_sentencepiece,
    write_gguf,
    xlm_roberta,
)
from tests.support.tokenizer_families import TEXTS

TEXTS_WITHOUT_TOKENS = [text for text in TEXTS if not any(mark in text for mark in ("<s>", "</s>", "\x00"))]


def load(metadata):
    return Tokenizer(*gguf_tokenizer(metadata, "model.gguf"))


def random_texts(count, seed=0):
    choose = random.Random(seed)
    letters = [*map(chr, range(32, 127)), *"áß¿Ωж東京👩‍🌈́\t", *" " * 60, *"\n" * 8]
    return ["".join(choose.choices(letters, k=choose.randint(1, 50))) for _ in range(count)]


@pytest.fixture(scope="module")
def llama_processor():
    return train_sentencepiece()


@pytest.fixture(scope="module")
def gemma_processor():
    """Runs of spaces and newlines are pieces of their own, and a string gets no prefix."""
    runs = ["\n" * n for n in range(1, 10)] + ["▁" * n for n in range(2, 12)] + ["<b>", "</b>"]
    return train_sentencepiece(
        user_defined_symbols=runs, control_symbols=["<start_of_turn>", "<end_of_turn>"], add_dummy_prefix=False
    ), runs


@pytest.fixture(scope="module")
def llama_metadata(llama_processor):
    return sentencepiece_metadata(llama_processor, bos_token_id=1, eos_token_id=2, unknown_token_id=0)


@pytest.fixture(scope="module")
def gemma_metadata(gemma_processor):
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": False}
    return sentencepiece_metadata(*gemma_processor, **ids)


def test_ids_of_a_llama_vocabulary_equal_sentencepiece(llama_processor, llama_metadata):
    ours = load(llama_metadata)
    for text in [*TEXTS_WITHOUT_TOKENS, *random_texts(300)]:
        assert ours.encode(text, add_special_tokens=False) == llama_processor.encode(text), text


def test_ids_of_a_gemma_vocabulary_equal_sentencepiece(gemma_processor, gemma_metadata):
    ours = load(gemma_metadata)
    runs = [f"a{' ' * n}b" for n in range(40)] + ["\n" * n + "<b>x</b>" for n in range(30)] + [" " * 50]
    for text in [*TEXTS_WITHOUT_TOKENS, *random_texts(300), *runs]:
        assert ours.encode(text, add_special_tokens=False) == gemma_processor[0].encode(text), text


def test_ids_of_a_gemma_4_vocabulary_which_lists_its_merges_equal_sentencepiece(gemma_processor, gemma_metadata):
    """Its merges are those that transformers derives of the same vocabulary."""
    columns = [gemma_metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    pieces = [Piece(text.replace(" ", "▁"), *rest) for text, *rest in zip(*columns, strict=True)]
    merges = [" ".join(merge) for merge in derive_merges(pieces)]
    ours = load(edited(gemma_metadata, model="gemma4", tokens=[piece.text for piece in pieces], merges=merges))
    runs = [f"a{' ' * n}b" for n in range(40)] + ["\n" * n + "<b>x</b>" for n in range(30)] + [" " * 50]
    for text in [*TEXTS_WITHOUT_TOKENS, *random_texts(300), *runs]:
        assert ours.encode(text, add_special_tokens=False) == gemma_processor[0].encode(text), text
        assert ours.encode(text)[0] == 1
        assert ours.decode(ours.encode(text)) == text


def test_ids_of_a_unigram_vocabulary_are_those_of_transformers_xlm_roberta(tmp_path):
    reference, metadata = xlm_roberta(tmp_path)
    choose = random.Random(0)
    letters = [*map(chr, range(32, 127)), *"ßéΩжשלוםمرحباनमस्तेสวัสดี東京ＡＢ①½ﬁ…ｶﾞ한국👩‍🌈́\u3000\xa0\t\n", *" " * 60]
    texts = ["".join(choose.choices(letters, k=choose.randint(1, 60))) for _ in range(300)]
    texts += [text for text in TEXTS if "<" not in text]
    words = [token.replace("▁", " ") for token in metadata["tokenizer.ggml.tokens"][4:-1]]
    texts += ["".join(choose.choices(words, k=choose.randint(1, 20))) for _ in range(200)]
    # As converted from tokenizer.json: another value of this key, and a row for <mask>.
    other = dict(metadata)
    other["tokenizer.ggml.remove_extra_whitespaces"] = False
    other["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "<mask>"]
    other["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"][:-1], CONTROL]
    other["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"][:-1], 0.0]
    used = set()
    for ours in (load(metadata), load(other)):
        for text in [*texts, "", " ", f"a {metadata['tokenizer.ggml.tokens'][-1]} b"]:
            expected = reference.encode(text)
            assert ours.encode(text) == expected, text
            used.update(expected)
    assert len(used) > 300
    assert reference.unk_token_id in used


@pytest.mark.parametrize("name", ["llama_metadata", "gemma_metadata"])
def test_tokens_of_a_sentencepiece_vocabulary_decode_to_the_text(request, name):
    ours = load(request.getfixturevalue(name))
    for text in [*TEXTS_WITHOUT_TOKENS, *random_texts(100)]:
        token_ids = ours.encode(text)
        assert token_ids[0] == 1
        assert ours.decode(token_ids) == text


BYTE_LEVEL = {"llama3": ("llama-bpe", "<|begin_of_text|>"), "qwen3": ("qwen2", None)}


@pytest.mark.parametrize("family", BYTE_LEVEL)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_of_a_byte_level_vocabulary_equal_its_tokenizer_json(family_folder, family, add_special_tokens):
    original = tokenizers.Tokenizer.from_file(str(family_folder(family) / "tokenizer.json"))
    pre, bos = BYTE_LEVEL[family]
    ids = {} if bos is None else {"bos_token_id": original.token_to_id(bos)}
    ours = load(byte_level_metadata(original, pre, **ids))
    for text in [*TEXTS, *random_texts(100)]:
        expected = original.encode(text, add_special_tokens=add_special_tokens).ids
        assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, text
        assert ours.decode(expected) == original.decode(expected)
    assert ours.special_token_ids == {i for i, token in original.get_added_tokens_decoder().items() if token.special}


# By the patterns of the tokenizer.json of each family.
SPLITS = {
    "llama-bpe": ("it's 12345 DON'T\n\n  x", ["it", "'s", " ", "123", "45", " DON", "'T", "\n\n", " ", " x"]),
    "dbrx": ("it's 12345 DON'T\n\n  x", ["it", "'s", " ", "123", "45", " DON", "'T", "\n\n", " ", " x"]),
    "glm4": ("1234 (ok)\n", ["123", "4", " (", "ok", ")\n"]),
    "qwen2": ("it's 12 e\u0301t", ["it", "'s", " ", "1", "2", " ét"]),
    "qwen35": ("12 हिन्दी", ["1", "2", " हिन्दी"]),
    "tekken": ("helloWorld DON'T 12 a/\n/", ["hello", "World", " DON", "'T", " ", "1", "2", " a", "/\n/"]),
    "gpt-4o": ("helloWorld DON'T 1234 a/\n/", ["hello", "World", " DON'T", " ", "123", "4", " a", "/\n/"]),
    "llama4": ("helloWorld DON'T 1234", ["hello", "World", " DON'T", " ", "123", "4"]),
    "gpt-2": ("it's 1234 x\n\n  y", ["it", "'s", " 1234", " x", "\n\n ", " y"]),
    "olmo": ("e\u0301 1234", ["é", " 1234"]),
    "starcoder": ("x 1234\n", ["x", " ", "1", "2", "3", "4", "\n"]),
    "refact": ("x 12", ["x", " ", "1", "2"]),
    "smollm": ("x 12", ["x", " ", "1", "2"]),
    "command-r": ("e\u0301 12", ["é", " ", "1", "2"]),
    "mpt": ("e\u0301 1234", ["é", " 1234"]),
    "stablelm2": ("it's 12 x", ["it", "'s", " ", "1", "2", " x"]),
    "jais-2": ("it's 1234       x", ["it", "'s", " ", "123", "4", "    ", "  ", " x"]),
    "bloom": ("it's 12, x\n", ["it's", " 12", ",", " x", "\n"]),
    "deepseek-llm": ("x 12東京 ok! \r\n", ["x", " ", "1", "2", "東京", " ok", "!", " ", "\r", "\n"]),
    "deepseek-coder": ("x 12東京 ok!\n", ["x", " ", "1", "2", "東京", " ok", "!", "\n"]),
    "deepseek-v3": ("x 1234東京 ok!\n.net", ["x", " ", "123", "4", "東京", " ok", "!\n", ".net"]),
    "bailingmoe2": ("it's 12\r\n x", ["it", "'s", " ", "1", "2", "\r\n", " x"]),
    "minimax-m2": ("helloWorld DON'T 1234", ["hello", "World", " DON'T", " ", "123", "4"]),
    "seed-coder": ("it's 12 +\n x", ["it", "'s", " ", "1", "2", " +", "\n", " x"]),
    "kimi-k2": ("x 1234東京abc don't!\n", ["x", " ", "123", "4", "東京", "abc", " don't", "!\n"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_pre_tokenizer_key_says(family_folder, pre):
    original = tokenizers.Tokenizer.from_file(str(family_folder("llama3") / "tokenizer.json"))
    backend, _ = gguf_tokenizer(byte_level_metadata(original, pre), "model.gguf")
    text, expected = SPLITS[pre]
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = [text[slice(*offsets)] for _, offsets in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == expected


def test_every_pre_tokenizer_key_splits_in_a_way_that_is_tested():
    tested = [SPLIT_RULES[pre] for pre in SPLITS]
    assert all(rules in tested for rules in SPLIT_RULES.values())


def edited(metadata, **keys):
    """A copy with other values under tokenizer.ggml; None removes a key."""
    edits = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return {name: value for name, value in {**metadata, **edits}.items() if value is not None}


def with_tokens(metadata, **types):
    """A copy whose normal rows at the end are tokens of these names and types."""
    tokens, token_types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    for i, (token, token_type) in enumerate(types.items(), start=len(tokens)):
        tokens[i:], token_types[i:] = [token], [token_type]
    scores = metadata.get("tokenizer.ggml.scores")
    return edited(
        metadata,
        tokens=tokens,
        token_type=token_types,
        scores=scores and [*scores, *[0.0] * (len(tokens) - len(scores))],
    )


@pytest.fixture(scope="module")
def byte_level(family_folder):
    return byte_level_metadata(tokenizers.Tokenizer.from_file(str(family_folder("llama3") / "tokenizer.json")), "dbrx")


def test_a_beginning_is_added_as_the_file_or_llama_cpp_says(llama_metadata, byte_level):
    def added(metadata):
        tokenizer = load(metadata)
        return [tokenizer.token_text(i) for i in tokenizer.encode("")]

    ids = {"bos_token_id": byte_level["tokenizer.ggml.tokens"].index("<|begin_of_text|>"), "eos_token_id": 7}
    assert added(llama_metadata) == ["<s>"]
    assert added(edited(llama_metadata, bos_token_id=None, eos_token_id=None, unknown_token_id=None)) == ["<s>"]
    assert added(edited(llama_metadata, add_bos_token=False)) == []
    assert added(edited(llama_metadata, add_eos_token=True)) == ["<s>", "</s>"]
    assert added(edited(byte_level, **ids)) == []
    assert added(edited(byte_level, **ids, add_bos_token=True)) == ["<|begin_of_text|>"]
    assert added(edited(byte_level, **ids, pre="llama-bpe")) == ["<|begin_of_text|>"]
    assert added(edited(byte_level, **ids, pre="tekken")) == ["<|begin_of_text|>"]
    assert added(edited(byte_level, **ids, pre="llama-bpe", add_bos_token=False)) == []
    assert added(edited(byte_level, pre="llama-bpe")) == []
    with pytest.raises(CheckpointError, match="add_bos_token is true, but there is no bos_token_id"):
        load(edited(byte_level, add_bos_token=True))


def test_control_tokens_are_special_and_user_defined_ones_are_not(byte_level):
    metadata = with_tokens(byte_level, **{"<think>": USER_DEFINED, "[X]": CONTROL, "<unused9>": UNUSED})
    size = len(byte_level["tokenizer.ggml.tokens"])
    ours = load(metadata)
    assert ours.encode("a<think>[X]b") == [*ours.encode("a"), size, size + 1, *ours.encode("b")]
    assert ours.decode(ours.encode("a<think>[X]b")) == "a<think>b"
    assert size + 2 not in ours.encode("<unused9>")
    assert ours.token_to_id("<unused9>") == size + 2


def test_ids_are_rows_though_texts_are_empty_equal_or_not_utf8(llama_metadata):
    odd = ["", "", "\udcff\udcfe", "the", "the", "\udce6", "[X]"]
    size = len(llama_metadata["tokenizer.ggml.tokens"])
    metadata = edited(
        llama_metadata,
        tokens=llama_metadata["tokenizer.ggml.tokens"] + odd,
        scores=llama_metadata["tokenizer.ggml.scores"] + [-2000.0] * len(odd),
        token_type=llama_metadata["tokenizer.ggml.token_type"] + [NORMAL] * (len(odd) - 1) + [CONTROL],
    )
    ours = load(metadata)
    assert ours.vocab_size == size + len(odd)
    assert ours.encode("[X]")[1:] == [size + len(odd) - 1]
    assert ours.token_text(size + 4) == "the"
    for text in TEXTS_WITHOUT_TOKENS:
        assert ours.decode(ours.encode(text)) == text


def test_tokens_that_end_a_turn_stop_the_answer(llama_metadata, byte_level):
    size = len(byte_level["tokenizer.ggml.tokens"])
    assert load(llama_metadata).stop_token_ids == {2}
    metadata = with_tokens(byte_level, **{"<|im_end|>": CONTROL, "</s>": USER_DEFINED, "<|call|>": NORMAL})
    by_text = {size, *(byte_level["tokenizer.ggml.tokens"].index(t) for t in ("<|eot_id|>", "<|end_of_text|>"))}
    assert load(metadata).stop_token_ids == by_text
    keys = {"eos_token_id": 5, "eot_token_id": 6, "eom_token_id": 7}
    assert load(edited(metadata, **keys)).stop_token_ids == by_text | {5, 6, 7}


def test_a_harmony_message_is_not_the_end_of_the_answer(byte_level):
    size = len(byte_level["tokenizer.ggml.tokens"])
    harmony = with_tokens(byte_level, **dict.fromkeys(["<|return|>", "<|call|>", "<|end|>"], CONTROL))
    stops = load(harmony).stop_token_ids
    assert {size, size + 1} <= stops
    assert size + 2 not in stops
    assert size in load(with_tokens(byte_level, **{"<|end|>": CONTROL})).stop_token_ids


def test_mistral_templates_write_the_space_after_a_special_token(llama_metadata):
    metadata = with_tokens(llama_metadata, **{"[INST]": CONTROL})
    inst = len(llama_metadata["tokenizer.ggml.tokens"])
    text = load(llama_metadata).encode("the cat", add_special_tokens=False)
    assert load(metadata).encode("[INST] the cat") == [1, inst, *text]
    assert load(metadata).encode("the cat") == [1, *text]


def test_phi3_control_tokens_take_the_spaces_after_them(llama_metadata):
    metadata = with_tokens(llama_metadata, **{"<|user|>": CONTROL, "<|endoftext|>": CONTROL})
    text = "<|user|> \n the<|endoftext|> the"
    assert load(metadata).encode(text) != load(metadata | {"general.architecture": "phi3"}).encode(text)
    stripped = "<|user|>the<|endoftext|> the"
    assert load(metadata | {"general.architecture": "phi3"}).encode(text) == load(metadata).encode(stripped)


def test_chat_templates_see_the_special_tokens(llama_metadata):
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ unk_token }}",
    }
    ours = load({**llama_metadata, **templates})
    chat = [{"role": "user", "content": "the"}]
    assert ours.apply_chat_template(chat) == "<s>the</s>"
    assert ours.apply_chat_template(chat, tools=[]) == "<unk>"
    assert ours.encode_chat(chat) == [1, *ours.encode("the", add_special_tokens=False), 2]  # one <s>, not two
    assert not load(llama_metadata).has_chat_template


def test_a_tokenizer_json_in_the_file_is_taken_whole(byte_level, family_folder):
    text = (family_folder("qwen3") / "tokenizer.json").read_text(encoding="utf-8")
    ours = load({**byte_level, "tokenizer.huggingface.json": text})
    assert ours.encode("the cat <think>") == tokenizers.Tokenizer.from_str(text).encode("the cat <think>").ids


@pytest.mark.parametrize("pre", [None, "default", "falcon"])
def test_an_unknown_way_to_split_text_is_refused(byte_level, pre):
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.pre.*would give wrong tokens.*newer llama.cpp"):
        load(edited(byte_level, pre=pre))


@pytest.mark.parametrize(
    ("model", "reason"), [("rwkv", "kind 'rwkv'"), ("none", "no tokenizer"), (None, "no tokenizer")]
)
def test_other_kinds_of_tokenizers_are_refused_by_name(byte_level, model, reason):
    with pytest.raises(CheckpointError, match=reason):
        load(edited(byte_level, model=model))


BROKEN = {
    "tokens": [None, 5, "abc", [], [1, 2]],
    "token_type": [[1], "x", ["a"] * 5000],
    "merges": [None, 3, [1], ["nospace"], [" x"], ["a zzzzz"], ["\udcff b"]],
    "bos_token_id": [10**9, -1, "x", True, 1.5],
    "add_bos_token": [3, "yes"],
    "pre": [5, []],
    "model": [5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BROKEN.items() for value in values])
def test_broken_metadata_is_named_in_one_line(byte_level, name, value):
    with pytest.raises(CheckpointError) as error:
        load(edited(byte_level, **{name: value}))
    assert "model.gguf" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scores", [[0.0], "abc", ["a"] * 5000, [float("nan")] * 5000])
def test_broken_scores_are_named_in_one_line(llama_metadata, scores):
    with pytest.raises(CheckpointError, match=r"model.gguf: tokenizer.ggml.scores"):
        load(edited(llama_metadata, scores=scores))


def test_a_file_is_read_like_its_metadata(tmp_path, gemma_metadata):
    path = write_gguf(tmp_path / "model.gguf", gemma_metadata)
    from_file = Tokenizer.from_path(path)
    assert from_file is not None
    for text in TEXTS:
        assert from_file.encode(text) == load(gemma_metadata).encode(text)


@pytest.mark.parametrize("pre", [None, *SPLIT_RULES])
def test_ids_equal_llama_cpp(tmp_path, family_folder, llama_metadata, gemma_metadata, pre):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is an optional oracle: extra `bench`")
    files = [llama_metadata, gemma_metadata]
    if pre is not None:
        backend = tokenizers.Tokenizer.from_file(str(family_folder("llama3") / "tokenizer.json"))
        metadata = byte_level_metadata(backend, pre)
        if pre == "deepseek-llm":  # llama.cpp splits no digits there: the model has no merges of digits
            merges = metadata["tokenizer.ggml.merges"]
            metadata["tokenizer.ggml.merges"] = [merge for merge in merges if not merge.replace(" ", "").isdigit()]
        files = [metadata]
    texts = [
        *TEXTS,
        *random_texts(200),
        "١٢٣ 1234567 ½ Ⅷ x9y",
        "🏳️‍🌈 한국어 조선말",
        *(f"a{' ' * n}b" for n in range(40)),
    ]
    for i, metadata in enumerate(files):
        path = write_gguf(tmp_path / f"{i}.gguf", metadata)
        theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        ours = load(metadata)
        for text in texts:
            composed = unicodedata.normalize("NFC", text) if pre and SPLIT_RULES[pre].nfc else text
            expected = theirs.tokenize(composed.encode(), add_bos=pre is None, special=True)
            assert ours.encode(text) == expected, text


@pytest.mark.parametrize("model", ["none", None])
def test_a_file_without_a_tokenizer_has_none_as_a_folder_without_one(tmp_path, model):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    if model is not None:
        writer.add_tokenizer_model(model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert Tokenizer.from_path(tmp_path / "x.gguf") is None
