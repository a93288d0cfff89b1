"""Classes of tokens that differ by case, accents and white space only: against unicodedata."""

import re
import unicodedata

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxis.errors import CheckpointError
from jaxis.models.common.token_classes import TokenClasses

TEXTS = [
    "<pad>",
    "a",
    "A",
    " a",
    "\u00c1",
    "b",
    " ",
    "  ",
    "\n",
    "\t\n ",
    "\ufb01",
    "fi",
    "\u0130",
    "\uff21",
    "\u4e2d",
    "c ",
]
PARTS = ["\u00e4", "\u00b8"]  # two of the three bytes of a character, as byte-level files spell them


def class_of(text):
    """Form that all texts of a class have in common."""
    plain = "".join(c for c in unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text)) if not is_mark(c))
    plain = re.sub(r"[ \t\r\n]+", " ", plain.lower())
    return plain if plain == " " else plain.strip() or text


def is_mark(character):
    return unicodedata.category(character) == "Mn"


@pytest.fixture
def folder(tmp_path):
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled = [alphabet.pre_tokenize_str(text) for text in TEXTS]
    vocabulary = {"".join(part for part, _ in parts): i for i, parts in enumerate(spelled)}
    vocabulary |= {part: len(TEXTS) + i for i, part in enumerate(PARTS)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = alphabet, decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokens_that_differ_by_case_accents_and_white_space_are_of_a_class(folder):
    keys = [*map(class_of, TEXTS), *PARTS]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    classes = TokenClasses(str(folder), 20, len(numbers), filler=0)()
    assert classes.tolist() == [*(numbers[key] for key in keys), 0, 0], "rows without a token are the filler's"
    assert len({classes[i] for i in (1, 2, 3, 4, 13)}) == 1
    assert len({classes[i] for i in (6, 7, 8, 9)}) == 1
    assert classes[10] == classes[11]


WORDS = (
    "The the THE \xdcber \xfcber UBER uber na\xefve Naive NA\xcfVE \ufb01ne fine \uff26\uff49\uff4e\uff45 "
    "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1 \u0395\u039b\u039b\u0386\u0394\u0391 "
    "\u03b5\u03bb\u03bb\u03b1\u03b4\u03b1 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u041f\u0420\u0418\u0412\u0415\u0422 \u0439\u043e\u0434 "
    "\u0419\u041e\u0414 \u0438\u043e\u0434 \u4e2d\u6587 \u65e5\u672c\u8a9e \u304c\u304b \u30ac\u30ab \xbd "
    "1\u20442 \xb2 2 \u0130stanbul istanbul ISTANBUL cafe\u0301 caf\xe9 CAF\xc9 _x x \tx\n\n x  x ... \u2026"
)


def test_classes_of_a_trained_tokenizer_are_those_of_the_published_rule(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([WORDS, f" {WORDS}", WORDS.replace(" ", "")] * 3, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    texts = [backend.decode([i], skip_special_tokens=False) for i in range(backend.get_vocab_size())]
    keys = [backend.id_to_token(i) if "\ufffd" in text else class_of(text) for i, text in enumerate(texts)]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    assert len(keys) - len(numbers) > 40
    classes = TokenClasses(str(tmp_path), len(keys), len(numbers), filler=0)()
    assert classes.tolist() == [numbers[key] for key in keys]


def test_another_tokenizer_than_the_models_and_none_are_refused(folder, tmp_path_factory):
    with pytest.raises(CheckpointError, match="classes of tokens, but n-grams were trained with 99"):
        TokenClasses(str(folder), 20, 99, filler=0)()
    with pytest.raises(CheckpointError, match=r"add tokenizer\.json"):
        TokenClasses(str(tmp_path_factory.mktemp("none")), 20, 99, filler=0)()
