"""The least number of tokens of a string, from its bytes: never more than it has, and enough to refuse megabytes."""

import random
import unicodedata

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ContextLengthError
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.length_bound import LengthBound
from tests.support.tokenizer_families import CORPUS, FAMILIES, TEXTS

# Characters that Unicode's forms or lower case make shorter, and runs that one token may stand for.
SHRINKING = [
    "\u212a" * 9,
    "\U0001d400" * 9,
    "\u1fef" * 9,
    "a\u030a\u0301" * 9,
    "\U0001d7ca\u0308\u0301" * 9,
    "K\u0327" * 9,
]
RUNS = [" " * 500, "\n" * 300, "=" * 300, " \n" * 200, "a b " * 99, "\u3000" * 50, "x" + " " * 400 + "x"]


@pytest.fixture(scope="module", params=[*FAMILIES, "embedded"])
def tokenizer(request, tmp_path_factory):
    if request.param == "embedded":
        return Tokenizer.from_path(EMBEDDED_MODEL)
    return Tokenizer.from_path(FAMILIES[request.param](tmp_path_factory.mktemp("families") / request.param))


def assert_sound(bound, backend):
    chosen = random.Random(5)
    pieces = [*TEXTS, *SHRINKING, *RUNS, *CORPUS[:20], *backend.get_vocab()]
    texts = [*pieces, *("".join(chosen.choices(pieces, k=8)) for _ in range(300))]
    for text in texts:
        assert bound.least_num_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids), text


def test_no_text_has_fewer_tokens(tokenizer):
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    bound = LengthBound.of(backend)
    assert bound.bytes_per_token < 500
    assert_sound(bound, backend)
    assert bound.least_num_tokens("a b " * 1_700_000) > 10_000


@pytest.mark.slow
def test_unicodes_forms_shrink_no_character_to_less_than_a_quarter():
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        for code in [*range(0xD800), *range(0xE000, 0x30000)]:
            character = chr(code)
            formed = unicodedata.normalize(form, character).lower()
            assert len(character.encode()) <= 4 * 3 * len(formed.encode())
            spelled = unicodedata.normalize("NFD", character)
            assert len(spelled.encode()) <= 4 * len(unicodedata.normalize(form, spelled).encode())


def byte_level(vocabulary=None):
    alphabet = vocabulary or {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_a_token_that_takes_the_space_around_it_in():
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    text = "<|end|>" + " " * 100_000
    assert len(backend.encode(text).ids) == 1
    bound = LengthBound.of(backend)
    assert bound.least_num_tokens(text) == 1
    assert bound.least_num_tokens("a b " * 10_000) > 2_000
    assert_sound(bound, backend)


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.StripAccents()),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex("a+"), "a")),
        lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.Replace("a", "")])),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel()]),
        ),
    ],
)
def test_there_is_no_bound_where_text_may_be_dropped(change):
    backend = byte_level()
    change(backend)
    assert LengthBound.of(backend).least_num_tokens("a" * 1_000_000) == 0


@pytest.mark.parametrize("model", [models.BPE({"a": 0}, []), models.WordLevel({"a": 0, "?": 1}, unk_token="?")])
def test_there_is_no_bound_where_the_unknown_is_dropped_or_folded(model):
    assert LengthBound.of(tokenizers.Tokenizer(model)).least_num_tokens("b" * 1_000_000) == 0
    vocabulary = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet()[1:])}
    assert LengthBound.of(byte_level(vocabulary)).least_num_tokens("b" * 1_000_000) == 0


def test_a_limited_tokenizer_refuses_before_it_reads(monkeypatch):
    tokenizer = Tokenizer.from_path(EMBEDDED_MODEL)
    limited = tokenizer.limited_to(2048)
    assert limited.encode("Hello there") == tokenizer.encode("Hello there")
    longest = max(tokenizer.vocabulary, key=len)
    fits = tokenizer.decode([tokenizer.token_to_id(longest)] * 2047)
    assert len(limited.encode(fits)) == 2047
    monkeypatch.setattr(limited, "_backend", None)
    with pytest.raises(ContextLengthError, match=r"at least 1\d{5} tokens, .* length is 2048 tokens"):
        limited.encode("a b " * 1_700_000)
