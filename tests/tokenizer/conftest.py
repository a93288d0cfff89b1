import pytest
from transformers import AutoTokenizer

from jaxis.tokenizer import Tokenizer
from tests.support.tokenizer_families import FAMILIES


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory):
    """Family name -> its folder, made once."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {}

    def folder(family):
        if family not in made:
            made[family] = FAMILIES[family](root / family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def load_pair(family_folder):
    """Family name -> (our tokenizer, transformers' own)."""
    made = {}

    def pair(family):
        if family not in made:
            folder = family_folder(family)
            made[family] = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
        return made[family]

    return pair
