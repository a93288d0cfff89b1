"""Places where a grammar begins after the reasoning, for formats whose marks are tokens, several tokens, or text."""

import pytest
import tokenizers

from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.server.generation.grammar import marks_before_answer
from jaxis.tokenizer import Tokenizer

SPECIAL = ["<|channel|>", "<|message|>", "<|constrain|>", "<|channel>", "<channel|>"]
TAGS = ["<think>", "</think>"]
CHARACTERS = {chr(code): code for code in range(127)}


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(CHARACTERS, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_tokens(TAGS)
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def test_tags(tokenizer):
    parser = get_reasoning_parser("qwen3")
    found = marks_before_answer(parser, "Hi", tokenizer)
    assert (found.opened, found.openings, found.closings) == (False, ("<think>",), ("</think>",))
    assert marks_before_answer(parser, "Hi<think>\n", tokenizer).opened
    assert marks_before_answer(parser, "Hi<think>\n\n</think>\n\n", tokenizer) is None
    assert marks_before_answer(None, "Hi", tokenizer) is None


def test_channels(tokenizer):
    found = marks_before_answer(get_reasoning_parser("openai_gptoss"), "<|start|>assistant", tokenizer)
    assert found.opened
    assert found.closings == ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")
    found = marks_before_answer(get_reasoning_parser("gemma4"), "Hi", tokenizer)
    assert found.openings == ("<|channel>thought",)  # a token, and then text


def test_words_open_the_reasoning_only_where_the_prompt_asks_for_them(tokenizer):
    """An answer may begin with the same words."""
    parser = get_reasoning_parser("granite")
    found = marks_before_answer(parser, "Hi", tokenizer)
    assert (found.openings, found.ends) == (("<think>",), ("</think>",))
    found = marks_before_answer(parser, "Write your thoughts after 'Here is my thought process:'. Hi", tokenizer)
    assert found.openings == ("<think>", "Here is my thought process:")
    assert found.ends == ("</think>", "Here is my response:")
    plain = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(CHARACTERS, [])))
    assert marks_before_answer(parser, "Hi", plain) is None
    assert marks_before_answer(parser, "Think between <think> and </think>. Hi", plain).openings == ("<think>",)
