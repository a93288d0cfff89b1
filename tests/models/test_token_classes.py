"""Classes of tokens that differ by case, accents and white space only: against unicodedata."""

import re
import unicodedata

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

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


def test_another_tokenizer_than_the_models_and_none_are_refused(folder, tmp_path_factory):
    with pytest.raises(CheckpointError, match="classes of tokens, but n-grams were trained with 99"):
        TokenClasses(str(folder), 20, 99, filler=0)()
    with pytest.raises(CheckpointError, match=r"add tokenizer\.json"):
        TokenClasses(str(tmp_path_factory.mktemp("none")), 20, 99, filler=0)()
