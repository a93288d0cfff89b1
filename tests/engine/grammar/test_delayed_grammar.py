"""A grammar that begins after the reasoning: which tokens are permitted where."""

import re

import numpy as np
import pytest
import tokenizers

from jaxis import LLM, SamplingParams, StructuredOutputs
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar, ReasoningTokens, ReasoningTracker
from jaxis.prompts import tokenize_chat
from jaxis.tokenizer import Tokenizer

EOS, OPEN, CLOSE, NEWLINE, A, B, FIRST, SECOND = range(8)
TOKENS = ["<eos>", "<think>", "</think>", "\n", "a", "b", "<first>", "<second>"]


@pytest.fixture(scope="module")
def grammar():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([token for token in TOKENS if token.startswith("<")])
    compiler = GrammarCompiler(Tokenizer(backend), 40, [EOS])  # a vocabulary padded to 40
    return compiler.compile(StructuredOutputs(regex="ab"))


def permitted(grammar, reasoning, *token_ids, alternatives=()):
    """What may come after these tokens, and whether the completion is complete; the same followed one by one."""
    at_once = DelayedGrammar(grammar, reasoning, alternatives).new_matcher()
    at_once.follow(token_ids)
    one_by_one = DelayedGrammar(grammar, reasoning, alternatives).new_matcher()
    for count in range(len(token_ids) + 1):
        one_by_one.follow(token_ids[:count])
        mask = one_by_one.token_mask()
    assert np.array_equal(mask, at_once.token_mask())
    assert at_once.is_complete == one_by_one.is_complete
    assert at_once.error is None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {int(i) for i in np.flatnonzero(bits)}, at_once.is_complete


def test_reasoning_that_the_prompt_opened(grammar):
    reasoning = ReasoningTokens(True, None, [[CLOSE]], [NEWLINE])
    free = set(range(40)) - {EOS}
    assert permitted(grammar, reasoning) == (free, False)
    assert permitted(grammar, reasoning, B, B, NEWLINE) == (free, False)
    assert permitted(grammar, reasoning, B, CLOSE) == ({NEWLINE, A}, False)
    assert permitted(grammar, reasoning, B, CLOSE, NEWLINE) == ({A}, False)
    assert permitted(grammar, reasoning, B, CLOSE, NEWLINE, A) == ({B}, False)
    assert permitted(grammar, reasoning, B, CLOSE, A) == ({B}, False)
    assert permitted(grammar, reasoning, B, CLOSE, A, B)[1]


def test_reasoning_that_the_model_may_open(grammar):
    reasoning = ReasoningTokens(False, OPEN, [[CLOSE]], [NEWLINE])
    assert permitted(grammar, reasoning) == ({OPEN, A}, False)
    assert permitted(grammar, reasoning, A) == ({B}, False)
    assert permitted(grammar, reasoning, A, B)[1]
    assert permitted(grammar, reasoning, OPEN)[0] == set(range(40)) - {EOS}
    assert permitted(grammar, reasoning, OPEN, A, CLOSE) == ({NEWLINE, A}, False)
    assert permitted(grammar, reasoning, OPEN, A, CLOSE, NEWLINE, A) == ({B}, False)


def test_a_closing_of_several_tokens(grammar):
    reasoning = ReasoningTokens(True, None, [[FIRST, SECOND], [CLOSE, FIRST]])
    for before in ([FIRST], [FIRST, A, SECOND], [SECOND, FIRST], [CLOSE], [FIRST, FIRST]):
        assert permitted(grammar, reasoning, *before)[0] == set(range(40)) - {EOS}
    for before in ([FIRST, SECOND], [FIRST, FIRST, SECOND], [A, CLOSE, FIRST]):
        assert permitted(grammar, reasoning, *before)[0] == {A}


def test_an_alternative_frees_what_follows(grammar):
    everything = set(range(40))
    assert permitted(grammar, None, alternatives=[FIRST, EOS]) == ({A, FIRST}, False)
    assert permitted(grammar, None, FIRST, alternatives=[FIRST]) == (everything, False)
    assert permitted(grammar, None, FIRST, B, A, alternatives=[FIRST]) == (everything, False)
    assert permitted(grammar, None, A, alternatives=[FIRST]) == ({B}, False)
    assert permitted(grammar, None, A, B, alternatives=[FIRST])[1]
    reasoning = ReasoningTokens(False, OPEN, [[CLOSE]], [NEWLINE])
    assert permitted(grammar, reasoning, alternatives=[FIRST]) == ({OPEN, A, FIRST}, False)
    assert permitted(grammar, reasoning, OPEN, CLOSE, alternatives=[FIRST]) == ({NEWLINE, A, FIRST}, False)
    assert permitted(grammar, reasoning, OPEN, CLOSE, NEWLINE, alternatives=[FIRST]) == ({A, FIRST}, False)
    assert permitted(grammar, reasoning, OPEN, CLOSE, NEWLINE, FIRST, alternatives=[FIRST]) == (everything, False)
    assert permitted(grammar, reasoning, OPEN, CLOSE, NEWLINE, A, alternatives=[FIRST]) == ({B}, False)


@pytest.mark.parametrize(
    ("opened", "token_ids", "expected"),
    [
        (True, [A, B, CLOSE, A, A], 3),
        (True, [A, B], 2),
        (False, [OPEN, A, CLOSE, OPEN, B], 3),
        (False, [OPEN], 1),
        (False, [A, OPEN, B, CLOSE], 0),
        (False, [], 0),
    ],
)
def test_tokens_of_reasoning_are_counted(opened, token_ids, expected):
    reasoning = ReasoningTokens(opened, None if opened else OPEN, [[CLOSE]])
    at_once, one_by_one = ReasoningTracker(reasoning), ReasoningTracker(reasoning)
    at_once.follow(token_ids)
    for count in range(len(token_ids) + 1):
        one_by_one.follow(token_ids[:count])
    assert (at_once.num_tokens, one_by_one.num_tokens) == (expected, expected)


def test_a_completion_is_free_up_to_its_grammar():
    spec = StructuredOutputs(regex="[0-9]{3}")
    with LLM(show_progress=False, max_num_seqs=4, kv_cache_memory="8MiB") as llm:
        prompt = tokenize_chat([{"role": "user", "content": "What is the capital of France?"}], llm.tokenizer).token_ids
        [free] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=30), progress=False)
        [stop] = llm.tokenizer.encode(".")
        end = free.outputs[0].token_ids.index(stop) + 1
        grammar = DelayedGrammar(
            llm.engine.grammar_compiler.compile(spec), ReasoningTokens(True, None, [[stop]], llm.tokenizer.encode(" "))
        )
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=spec, n=2)
        state = llm.engine.add_request("delayed", prompt, params, grammar=grammar)
        beside = llm.engine.add_request("beside", prompt, SamplingParams(temperature=0, max_tokens=30))
        while not (state.finished and beside.finished):
            llm.engine.step()
    assert beside.output().outputs[0].token_ids == free.outputs[0].token_ids
    for completion in state.output().outputs:
        assert completion.token_ids[:end] == free.outputs[0].token_ids[:end]
        before, _, after = completion.text.partition(".")
        assert "Paris" in before
        assert re.fullmatch(" ?[0-9]{3}", after)
        assert completion.finish_reason == "stop"
