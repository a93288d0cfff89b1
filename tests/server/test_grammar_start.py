"""Which tokens tell a grammar that the reasoning is over."""

import pytest
import tokenizers

from jaxis.engine.grammar.delayed_grammar import ReasoningTokens
from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.server.generation.grammar import reasoning_tokens
from jaxis.tokenizer import Tokenizer

SPECIAL = ["<|channel|>", "<|message|>", "<|constrain|>"]
TAGS = ["<think>", "</think>"]
COHERE = ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"]
CHARACTERS = {chr(code): code for code in range(127)}


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(CHARACTERS, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_tokens(TAGS)
    backend.add_special_tokens(SPECIAL + COHERE)
    return Tokenizer(backend)


def test_tags(tokenizer):
    parser = get_reasoning_parser("qwen3")
    opening, closing = (tokenizer.token_to_id(tag) for tag in TAGS)
    gap = [ord("\n"), ord(" ")]
    assert reasoning_tokens(parser, "Hi", tokenizer) == ReasoningTokens(False, opening, [[closing]], gap)
    assert reasoning_tokens(parser, "Hi<think>\n", tokenizer) == ReasoningTokens(True, None, [[closing]], gap)
    assert reasoning_tokens(parser, "Hi<think>\n\n</think>\n\n", tokenizer) is None
    assert reasoning_tokens(None, "Hi", tokenizer) is None
    plain = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(CHARACTERS, [])))
    assert reasoning_tokens(parser, "Hi<think>", plain) is None


def test_channels(tokenizer):
    found = reasoning_tokens(get_reasoning_parser("openai_gptoss"), "<|start|>assistant", tokenizer)
    texts = ["".join(tokenizer.token_text(i) for i in ids) for ids in found.closings]
    assert found.opened
    assert texts == ["<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"]


def test_the_marker_of_the_answer_may_come_before_the_form(tokenizer):
    opening, closing, answer = (tokenizer.token_to_id(marker) for marker in COHERE)
    found = reasoning_tokens(get_reasoning_parser("cohere_command3"), "Hi", tokenizer)
    assert found == ReasoningTokens(False, opening, [[closing]], [ord("\n"), ord(" "), answer])
