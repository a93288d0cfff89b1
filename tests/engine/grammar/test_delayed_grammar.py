"""A grammar that begins after the reasoning: which tokens are permitted where."""

import dataclasses
import random
import re

import numpy as np
import pytest
import regex
import tokenizers

from jaxis import LLM, SamplingParams, StructuredOutputs
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks
from jaxis.prompts import tokenize_chat
from jaxis.tokenizer import Tokenizer

EOS, OPEN, CLOSE, NEWLINE, A, B, FIRST, SECOND = range(8)
TOKENS = ["<eos>", "<think>", "</think>", "\n", "a", "b", "<first>", "<second>"]


def grammar_compiler():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([token for token in TOKENS if token.startswith("<")])
    return GrammarCompiler(Tokenizer(backend), 40, [EOS])  # a vocabulary padded to 40


@pytest.fixture(scope="module")
def grammar():
    compiler = grammar_compiler()
    return compiler.compile(StructuredOutputs(regex="ab")), compiler.tokenizer


def marks(*, opened, closings=("</think>",), **more):
    openings = ("",) if opened else ("<think>",)
    return ReasoningMarks(opened, openings, closings[:1], tuple(closings), **more)


def permitted(grammar, marks, *token_ids, alternatives=()):
    """What may come after these tokens, and whether the completion is complete; the same followed one by one."""
    compiled, tokenizer = grammar
    at_once = DelayedGrammar(compiled, tokenizer, marks, alternatives).new_matcher()
    at_once.follow(token_ids)
    one_by_one = DelayedGrammar(compiled, tokenizer, marks, alternatives).new_matcher()
    for count in range(len(token_ids) + 1):
        one_by_one.follow(token_ids[:count])
        mask = one_by_one.token_mask()
        one_by_one = one_by_one.fork()
    assert np.array_equal(mask, at_once.token_mask())
    assert at_once.is_complete == one_by_one.is_complete
    assert at_once.error is None
    return allowed_ids(mask), at_once.is_complete


def allowed_ids(mask):
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def test_reasoning_that_the_prompt_opened(grammar):
    before = marks(opened=True)
    free = set(range(40)) - {EOS}
    assert permitted(grammar, before) == (free, False)
    assert permitted(grammar, before, B, B, NEWLINE) == (free, False)
    assert permitted(grammar, before, B, CLOSE) == ({NEWLINE, A}, False)
    assert permitted(grammar, before, B, CLOSE, NEWLINE) == ({A}, False)
    assert permitted(grammar, before, B, CLOSE, NEWLINE, A) == ({B}, False)
    assert permitted(grammar, before, B, CLOSE, A) == ({B}, False)
    assert permitted(grammar, before, B, CLOSE, A, B)[1]


def test_reasoning_that_the_model_may_open(grammar):
    before = marks(opened=False)
    assert permitted(grammar, before) == ({OPEN, A}, False)
    assert permitted(grammar, before, A) == ({B}, False)
    assert permitted(grammar, before, A, B)[1]
    assert permitted(grammar, before, OPEN)[0] == set(range(40)) - {EOS}
    assert permitted(grammar, before, OPEN, A, CLOSE) == ({NEWLINE, A}, False)
    assert permitted(grammar, before, OPEN, A, CLOSE, NEWLINE, A) == ({B}, False)


def test_a_closing_of_several_tokens(grammar):
    before = marks(opened=True, closings=("<first><second>", "</think><first>"))
    for token_ids in ([FIRST], [FIRST, A, SECOND], [SECOND, FIRST], [CLOSE], [FIRST, FIRST]):
        assert permitted(grammar, before, *token_ids)[0] == set(range(40)) - {EOS}
    for token_ids in ([FIRST, SECOND], [FIRST, FIRST, SECOND], [A, CLOSE, FIRST]):
        assert permitted(grammar, before, *token_ids)[0] == {NEWLINE, A}


def test_an_opening_of_several_tokens(grammar):
    before = dataclasses.replace(marks(opened=False), openings=("<first>a",))
    assert permitted(grammar, before) == ({FIRST, A}, False)
    assert permitted(grammar, before, FIRST) == ({A}, False)
    assert permitted(grammar, before, FIRST, A)[0] == set(range(40)) - {EOS}
    assert permitted(grammar, before, FIRST, A, CLOSE) == ({NEWLINE, A}, False)
    both = dataclasses.replace(before, openings=("aa",))  # it begins as the grammar's text does
    assert permitted(grammar, both) == ({A}, False)
    assert permitted(grammar, both, A) == ({A, B}, False)
    assert permitted(grammar, both, A, B)[1]
    assert permitted(grammar, both, A, A, B, CLOSE, A) == ({B}, False)


def test_a_marker_may_come_between(grammar):
    before = marks(opened=True, answer_openings=("<second>",))
    assert permitted(grammar, before, CLOSE) == ({NEWLINE, SECOND, A}, False)
    assert permitted(grammar, before, CLOSE, SECOND) == ({A}, False)


def test_an_alternative_frees_what_follows(grammar):
    everything = set(range(40))
    assert permitted(grammar, None, alternatives=[FIRST, EOS]) == ({A, FIRST}, False)
    assert permitted(grammar, None, FIRST, alternatives=[FIRST]) == (everything, False)
    assert permitted(grammar, None, FIRST, B, A, alternatives=[FIRST]) == (everything, False)
    assert permitted(grammar, None, A, alternatives=[FIRST]) == ({B}, False)
    assert permitted(grammar, None, A, B, alternatives=[FIRST])[1]
    before = marks(opened=False)
    assert permitted(grammar, before, alternatives=[FIRST]) == ({OPEN, A, FIRST}, False)
    assert permitted(grammar, before, OPEN, CLOSE, alternatives=[FIRST]) == ({NEWLINE, A, FIRST}, False)
    assert permitted(grammar, before, OPEN, CLOSE, NEWLINE, alternatives=[FIRST]) == ({A, FIRST}, False)
    assert permitted(grammar, before, OPEN, CLOSE, NEWLINE, FIRST, alternatives=[FIRST]) == (everything, False)
    assert permitted(grammar, before, OPEN, CLOSE, NEWLINE, A, alternatives=[FIRST]) == ({B}, False)


def test_a_call_interrupts_the_reasoning_where_one_may_come(grammar):
    everything = set(range(40))
    interrupted = {"closings": ("</think>", "<first>"), "interruptions": ("<first>",)}
    before = marks(opened=True, **interrupted)
    assert permitted(grammar, before, B)[0] == everything - {EOS, FIRST}  # no call may come
    assert permitted(grammar, before, B, alternatives=[FIRST])[0] == everything - {EOS}
    assert permitted(grammar, before, B, FIRST, alternatives=[FIRST]) == (everything, False)
    compiler = grammar_compiler()
    calls = compiler.compile(StructuredOutputs(grammar='start: <first> "a" <second>')), compiler.tokenizer
    assert permitted(calls, before, B)[0] == everything - {EOS}
    assert permitted(calls, before, B, FIRST) == ({A}, False)
    assert permitted(calls, before, B, CLOSE) == ({NEWLINE, FIRST}, False)
    assert permitted(calls, before, B, CLOSE, FIRST) == ({A}, False)


PIECES = ["</t", "hink>", "ink>\n", "nk>{", "<think>a", "<thi", "</think>x", "a}", "\n\n", "{a", "<<"]


@pytest.mark.parametrize("is_token", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_of_marks_that_are_text_every_token_is_allowed_that_a_definition_allows(is_token, opened):
    """Whatever tokens spell them: no token holds the end of the reasoning and the beginning of what must match."""
    vocabulary = [*"\n ab<>{}/think", *PIECES]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<eos>": 0} | {t: i + 1 for i, t in enumerate(vocabulary)}, [])
    )
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<eos>"])
    if is_token:
        backend.add_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(backend)
    texts = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size)]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    delayed = DelayedGrammar(
        compiler.compile(StructuredOutputs(regex=r"\{[ab]{1,3}\}")), tokenizer, marks(opened=opened)
    )

    def fits(pieces):
        """Whether text may begin with these tokens."""
        text, opening = "".join(pieces), "" if opened else "<think>"
        if not opened and pieces[0] == "<think>":
            pieces = pieces[1:]
        elif not opened and not (text.startswith(opening) or opening.startswith(text)):
            return regex.fullmatch(r"\{[ab]{1,3}\}", text, partial=True) is not None
        elif is_token and not opened:
            return False  # a mark that is a token is written as that token
        for count in range(len(pieces)):
            _, closing, rest = "".join(pieces[: count + 1]).removeprefix(opening).partition("</think>")
            if closing:
                after = pieces[count + 1 :]
                if not rest and after[:1] in (["\n"], [" "]):
                    after = after[1:]
                return not rest.strip() and regex.fullmatch(r"\{[ab]{1,3}\}", "".join(after), partial=True) is not None
        return True

    num_closed, aim = 0, "</think>{ab}"
    for seed in range(25):
        rng, token_ids, pieces = random.Random(seed), [], []
        matcher = delayed.new_matcher()
        for count in range(24):
            matcher.follow(token_ids)
            if matcher.is_complete:
                num_closed += 1
                break
            allowed = allowed_ids(matcher.token_mask())
            assert allowed - {0} == {i for i in range(1, len(texts)) if fits([*pieces, texts[i]])}, pieces
            text = "".join(pieces)
            done = max(length for length in range(len(aim)) if text.endswith(aim[:length]))
            toward = [i for i in sorted(allowed) if i and aim[done:].startswith(texts[i])] if count > 1 else []
            token_ids.append(rng.choice(toward or sorted(allowed - {0})))
            pieces.append(texts[token_ids[-1]])
    assert num_closed >= 3


def test_a_completion_is_free_up_to_its_grammar():
    spec = StructuredOutputs(regex="[0-9]{3}")
    with LLM(show_progress=False, max_num_seqs=4, kv_cache_memory="8MiB") as llm:
        prompt = tokenize_chat([{"role": "user", "content": "What is the capital of France?"}], llm.tokenizer).token_ids
        [free] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=30), progress=False)
        [stop] = llm.tokenizer.encode(".")
        end = free.outputs[0].token_ids.index(stop) + 1
        grammar = DelayedGrammar(
            llm.engine.grammar_compiler.compile(spec), llm.tokenizer, marks(opened=True, closings=(".",))
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
        assert re.fullmatch(r"\s?[0-9]{3}", after)
        assert completion.finish_reason == "stop"
