"""A thinking budget: where the end of the model's thinking is forced, for each way of marking it."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
import tokenizers

from jaxis import LLM, SamplingParams, StructuredOutputs
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar
from jaxis.engine.grammar.mark_tracker import MarkTracker
from jaxis.engine.grammar.thinking_budget import ThinkingBudget
from jaxis.errors import RequestError
from jaxis.kernels.sampling.tiles import TILE
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.parsing.reasoning_parsers import REASONING_PARSERS
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks
from jaxis.parsing.reasoning_parsers.tags import ThinkReasoningParser
from jaxis.tokenizer import Tokenizer
from tests.support.drafters import drafters, drafting

# By hand: what opens the thinking of each format and what then ends it; whatever else ends it.
THINK = {"<think>": "</think>"}
PHRASES = {f"Here{s} my thought process:": f"Here{s} my response:" for s in (" is", "'s")}
FORMATS = {
    "apertus": ({"<|inner_prefix|>": "<|inner_suffix|>"}, ()),
    "cohere_command3": ({"<|START_THINKING|>": "<|END_THINKING|>"}, ()),
    "cohere_command4": ({"<|START_THINKING|>": "<|END_THINKING|>"}, ()),
    "deepseek_r1": (THINK, ()),
    "ernie45": (THINK, ()),
    "gemma4": ({"<|channel>thought": "<channel|>"}, ()),
    "glm45": (THINK, ("<tool_call>",)),
    "granite": (THINK | PHRASES, ()),
    "hunyuan_a13b": (THINK, ()),
    "hy_v3": (THINK, ()),
    "hy_v4": (THINK, ()),
    "inkling": (
        {"<|content_thinking|>": "<|end_message|>"},
        ("<|content_model_end_sampling|>", "<|message_model|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    ),
    "kimi_k2": (THINK, ("<|tool_calls_section_begin|>",)),
    "kimi_k3": ({"<|open|>think<|sep|>": "<|close|>think<|sep|><|open|>response<|sep|>"}, ()),
    "minicpm": ({"<|thought_start|>": "<|thought_end|>"}, ()),
    "minimax_m2": (THINK, ()),
    "minimax_m3": ({"<mm:think>": "</mm:think>"}, ()),
    "mistral": ({"[THINK]": "[/THINK]"}, ()),
    "muse_glimmer": ({"to=self<|message|>": "<|eom|>"}, ("<|eot|>", "<|start|>")),
    "openai_gptoss": (
        {"<|channel|>analysis<|message|>": "<|end|>"},
        ("<|return|>", "<|call|>", "<|start|>", "<|channel|>"),
    ),
    "qwen3": (THINK, ()),
    "seed_oss": ({"<seed:think>": "</seed:think>"}, ()),
}
# Of formats in which thinking may come again, what then stands before the word that it must not begin with.
AGAIN = {
    "openai_gptoss": ("<|channel|>", "analysis"),
    "muse_glimmer": ("to=", "self"),
    "inkling": ("<|message_model|>", "<|content_thinking|>"),
}
ADDED = (
    *("<|inner_prefix|>", "<|inner_suffix|>", "<|START_THINKING|>", "<|END_THINKING|>", "<think>", "</think>"),
    *("<|channel>", "<channel|>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>"),
    *("<|tool_calls_section_begin|>", "<|thought_start|>", "<|thought_end|>", "<mm:think>", "</mm:think>"),
    *("<|open|>", "<|close|>", "<|sep|>"),
    *("<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", "<|content_model_end_sampling|>"),
)
WORDS = ("assistant", "analysis", "anal", "final", "self", "user", "thought", "process", " is", "a<", "</t")


@pytest.fixture(scope="module", params=["marks are tokens", "marks are ordinary text"])
def tokenizer(request):
    characters = {chr(code): code for code in range(127)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(characters, []))
    backend.decoder = tokenizers.decoders.Fuse()
    if request.param == "marks are tokens":
        backend.add_special_tokens(list(ADDED))
        backend.add_tokens(list(WORDS))
    return Tokenizer(backend)


def thought(pieces, openings, closings, *, opened, repeats):
    """Of tokens as strings: whether thinking goes on, how many tokens it has so far, and the end of the newest.

    A plain definition: it searches the whole text.
    """
    text, starts = "".join(pieces), np.cumsum([0, *map(len, pieces)])[:-1]
    at, count, goes_on, end = 0, 0, opened, next(iter(openings.values()))
    begin = 0
    while True:
        if not goes_on:
            if repeats:
                found = [(where, opening) for opening in openings if (where := text.find(opening, at)) >= 0]
            else:
                where = len(text) - len(text.lstrip())
                found = [(where, opening) for opening in openings if text.startswith(opening, where)]
            if not found:
                return False, count, end
            where, opening = min(found)
            begin, end, goes_on = where + len(opening), openings[opening], True
        closed = [(where, closing) for closing in closings if (where := text.find(closing, begin)) >= 0]
        if not closed:
            return True, count + sum(start >= begin for start in starts), end
        at, closing = min(closed)
        count += sum(begin <= start < at + len(closing) for start in starts)
        goes_on = False
        if not repeats:
            return False, count, end


def allowed_ids(mask):
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize("opened", [False, True])
def test_every_token_is_free_or_forced_as_a_replay_says(name, opened, tokenizer):
    openings, more = FORMATS[name]
    closings = [*openings.values(), *more]
    vocab_size = tokenizer.vocab_size + 3
    everything = set(range(vocab_size))
    prompt = "Hi " + next(iter(openings)) if opened else "Hi"
    marks = REASONING_PARSERS[name].marks(prompt)
    script = [*openings, *closings, "<|start|>assistant", " to=self", " to=user<|message|>", "<|channel|>final"]
    script += AGAIN.get(name, ())[:1] * 4
    num_forced = num_refused = 0
    for seed in range(12):
        draw = random.Random(seed)
        budget = draw.choice([0, 1, 2, 3, 5, 9])
        matcher = ThinkingBudget(marks, budget, tokenizer, vocab_size).new_matcher()
        pieces, token_ids, planned = [], [], []
        if not opened:
            planned = tokenizer.encode(draw.choice(["", "\n "]) + draw.choice(list(openings)), add_special_tokens=False)
        for _ in range(60):
            matcher.follow(token_ids)
            mask = matcher.token_mask()
            assert np.array_equal(matcher.fork().token_mask(), mask)
            goes_on, count, end = thought(pieces, openings, closings, opened=opened, repeats=name in AGAIN)
            expected = everything
            if count >= budget and goes_on:
                ids = tokenizer.encode(end, add_special_tokens=False)
                begun = [n for n in range(len(ids)) if n <= count and (not n or token_ids[-n:] == ids[:n])]
                expected = {ids[max(begun)]}
                num_forced += 1
            elif count >= budget and name in AGAIN and "".join(pieces).endswith(AGAIN[name][0]):
                word = AGAIN[name][1]
                texts = {i: tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}
                toward = {
                    i for i, t in texts.items() if t and (word.startswith(t.lstrip()) or t.lstrip().startswith(word))
                }
                expected = everything - toward
                num_refused += 1
            assert allowed_ids(mask) == expected
            if not planned and draw.random() < 0.3:
                planned = tokenizer.encode(draw.choice(script), add_special_tokens=False)
            token_id = planned.pop(0) if planned else draw.randrange(tokenizer.vocab_size)
            if token_id not in expected:
                token_id, planned = draw.choice(sorted(expected)), []
            token_ids.append(token_id)
            pieces.append(tokenizer.token_bytes(token_id).decode())
    assert num_forced >= 6
    assert num_refused > 0 or name not in AGAIN


def test_every_format_has_a_row():
    assert FORMATS.keys() == REASONING_PARSERS.keys()


OPEN, CLOSE, NEWLINE, A, B, EOS = range(6)


@pytest.fixture(scope="module")
def compiler():
    tokens = ["<think>", "</think>", "\n", "a", "b", "<eos>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([token for token in tokens if token.startswith("<")])
    return GrammarCompiler(Tokenizer(backend), 40, [EOS])


def permitted(budget, *token_ids):
    matcher = budget.new_matcher()
    matcher.follow(token_ids)
    return allowed_ids(matcher.token_mask())


def test_a_grammar_comes_after_the_end_that_the_budget_forces(compiler):
    marks = ThinkReasoningParser.marks("Hi")
    grammar = DelayedGrammar(compiler.compile(StructuredOutputs(regex="ab")), compiler.tokenizer, marks)
    budget = ThinkingBudget(marks, 1, compiler.tokenizer, compiler.vocab_size, grammar)
    assert permitted(budget) == {OPEN, A}
    assert permitted(budget, OPEN) == set(range(40)) - {EOS}
    assert permitted(budget, OPEN, B) == {CLOSE}
    assert permitted(budget, OPEN, B, CLOSE) == {NEWLINE, A}
    assert permitted(budget, OPEN, B, CLOSE, A) == {B}
    matcher = budget.new_matcher()
    matcher.follow([OPEN, B, CLOSE, A, B])
    assert matcher.is_complete


def test_a_grammar_that_holds_the_thinking_goes_before_the_budget(compiler):
    grammar = compiler.compile(StructuredOutputs(grammar='start: <think> "a" "b"? </think> "b"'))
    budget = ThinkingBudget(ThinkReasoningParser.marks("Hi"), 0, compiler.tokenizer, compiler.vocab_size, grammar)
    assert permitted(budget) == {OPEN}
    assert permitted(budget, OPEN) == {A}  # the grammar's only way
    assert permitted(budget, OPEN, A) == {CLOSE}
    assert permitted(budget, OPEN, A, CLOSE) == {B}


@pytest.mark.parametrize(
    ("prompt", "token_ids", "expected"),
    [
        ("<think>", [A, B, CLOSE, A, A], 3),
        ("<think>", [A, B], 2),
        ("", [OPEN, A, CLOSE, OPEN, B], 3),
        ("", [NEWLINE, OPEN], 1),
        ("", [A, OPEN, B, CLOSE], 0),
        ("", [], 0),
    ],
)
def test_tokens_of_thinking_are_counted(compiler, prompt, token_ids, expected):
    marks = ThinkReasoningParser.marks(prompt)
    at_once, one_by_one = MarkTracker(marks, compiler.tokenizer), MarkTracker(marks, compiler.tokenizer)
    at_once.follow(token_ids)
    for count in range(len(token_ids) + 1):
        one_by_one.follow(token_ids[:count])
    assert (at_once.num_tokens, one_by_one.num_tokens) == (expected, expected)


def test_each_message_of_thinking_is_counted(tokenizer):
    marks = REASONING_PARSERS["openai_gptoss"].marks("<|start|>assistant")
    texts = ["<|channel|>analysis<|message|>", "ab<|end|>", "<|start|>assistant<|channel|>final<|message|>c"]
    again = ["<|start|>assistant", "<|channel|>analysis<|message|>", "a<|end|>"]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in (*texts[:2], *again, texts[2])]
    tracker = MarkTracker(marks, tokenizer)
    tracker.follow([token_id for token_ids in encoded for token_id in token_ids])
    assert tracker.num_tokens == sum(len(encoded[i]) for i in (0, 1, 3, 4))


# On the embedded model, which "thinks" up to a full stop.


class SentenceParser(ThinkReasoningParser):
    opening = "?"
    closings = (" So there.",)


@pytest.fixture(scope="module")
def llm():
    with LLM(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, kv_cache_memory="16MiB", show_progress=False
    ) as llm:
        llm.engine._grammars.__dict__["_parsers"] = ModelParsers(reasoning=SentenceParser)
        yield llm


PROMPTS = ["What is the capital of France?", "Where does the cat sleep?", "Hello there", "1 2 3 4 5 6 7?"]
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True}


def ids_of(llm, prompts, *params):
    return [[list(each.token_ids) for each in o.outputs] for o in llm.generate(prompts, list(params), progress=False)]


def test_the_end_is_forced_after_the_budget_and_the_model_goes_on(llm):
    end = llm.tokenizer.encode(" So there.", add_special_tokens=False)
    assert len(end) > 1
    for more in ({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}, {**SAMPLED, "top_k": 3, "min_tokens": 9}):
        [[free]] = ids_of(llm, PROMPTS[:1], SamplingParams(**more))
        for budget in (0, 7):
            [[cut]] = ids_of(llm, PROMPTS[:1], SamplingParams(**more, thinking_token_budget=budget))
            assert cut[: budget + len(end)] == free[:budget] + end
            assert len(cut) == 24
            # What follows is what the model says to the text so far.
            seeded = {**more, "max_tokens": 1, "min_tokens": 0}
            if more["temperature"] == 0.0:
                prompt = llm.tokenizer.encode(PROMPTS[0]) + cut[: budget + len(end)]
                [[after]] = ids_of(llm, [prompt], SamplingParams(**seeded))
                assert after[0] == cut[budget + len(end)]
    for each in (None, -1, 1000):
        [[same]] = ids_of(llm, PROMPTS[:1], SamplingParams(**SAMPLED, thinking_token_budget=each))
        assert same == ids_of(llm, PROMPTS[:1], SamplingParams(**SAMPLED))[0][0]


def test_the_same_tokens_in_any_batch_and_with_drafts(llm):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = [
        SamplingParams(**SAMPLED, thinking_token_budget=5, logprobs=2),
        SamplingParams(**SAMPLED, thinking_token_budget=0, frequency_penalty=0.5),
        SamplingParams(**SAMPLED, thinking_token_budget=3, n=2),
        SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=11, bad_words=[" So"]),
    ]
    alone = [ids_of(llm, [prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    beside = SamplingParams(
        temperature=0.8, seed=1, max_tokens=40, structured_outputs=StructuredOutputs(json_schema=schema)
    )
    together = ids_of(llm, [*PROMPTS, "x"], *params, beside)
    assert together[:4] == alone
    answers = {tuple(llm.tokenizer.encode(prompt)): found for prompt, found in zip(PROMPTS, alone, strict=True)}
    for drafter in (each for kind, each in drafters(answers, 300).items() if kind in ("right", "changing")):
        with drafting(llm.engine, drafter, 5) as speculation:
            assert [ids_of(llm, [p], each)[0] for p, each in zip(PROMPTS, params, strict=True)] == alone
            assert ids_of(llm, [*PROMPTS, "x"], *params, beside) == together
        assert speculation.counts.num_drafts > 0


class WordParser(ThinkReasoningParser):
    opening = "?"
    closings = (" the",)


def replay(llm, prompt, params, end):
    """What a request with a budget generates: a plain sampler in NumPy, over logits of the whole sequence each time."""
    budget, grace = params.thinking_token_budget, params.thinking_budget_grace_period
    ids, output, is_over = llm.tokenizer.encode(end, add_special_tokens=False), [], False
    while len(output) < params.max_tokens:
        logits = llm.compute_logits([*llm.tokenizer.encode(prompt), *output], path="paged")[-1].astype(np.float64)
        token_id = (
            int(logits.argmax()) if params.greedy else drawn(logits / params.temperature, params.seed, len(output))
        )
        next_of_end = ids[max(n for n in range(len(ids)) if not n or output[-n:] == ids[:n])]
        is_likely = logits[next_of_end] >= logits.max() - np.log(20)
        if not is_over and (len(output) >= budget + grace or (grace and len(output) >= budget and is_likely)):
            token_id = next_of_end
        output.append(token_id)
        is_over = is_over or end in llm.tokenizer.decode(output)
    return output


def drawn(logits, seed, step):
    """The Gumbel-max trick, first for a tile of tokens, then for one of them."""
    key = jax.random.fold_in(jax.random.wrap_key_data(np.array([seed, 0], np.uint32), impl="threefry2x32"), step)
    num_tiles = -(-len(logits) // TILE)
    bits = np.asarray(jax.random.bits(key, (num_tiles + TILE,), np.uint32)).astype(np.float64)
    noise = -np.log(-np.log1p(-np.minimum(bits * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)))
    tiles = np.full((num_tiles, TILE), -np.inf)
    tiles.reshape(-1)[: len(logits)] = logits
    tile = int((np.log(np.exp(tiles - logits.max()).sum(1)) + noise[:num_tiles]).argmax())
    return tile * TILE + int((tiles[tile] + noise[num_tiles:]).argmax())


@pytest.mark.parametrize("parser", [SentenceParser, WordParser])
def test_hard_and_soft_budgets_are_those_of_a_plain_replay_in_any_batch_and_with_drafts(llm, parser, monkeypatch):
    monkeypatch.setitem(llm.engine._grammars.__dict__, "_parsers", ModelParsers(reasoning=parser))
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[3], PROMPTS[1]]
    common = {"max_tokens": 14, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, thinking_token_budget=4, **common),
        SamplingParams(temperature=0, thinking_token_budget=2, thinking_budget_grace_period=11, **common),
        SamplingParams(temperature=1, seed=5, thinking_token_budget=3, **common),
        SamplingParams(temperature=0.8, seed=6, thinking_token_budget=1, thinking_budget_grace_period=6, **common),
    ]
    expected = [replay(llm, prompt, each, parser.closings[0]) for prompt, each in zip(prompts, params, strict=True)]
    assert [ids_of(llm, [prompt], each)[0][0] for prompt, each in zip(prompts, params, strict=True)] == expected
    assert [found for [found] in ids_of(llm, prompts, *params)] == expected
    if parser is WordParser:  # the model is inclined to say it at one place, before it would be forced
        [end] = llm.tokenizer.encode(parser.closings[0], add_special_tokens=False)
        assert expected[1].index(end) == 10
    answers = {}
    for prompt, found in zip(prompts, expected, strict=True):
        answers[tuple(llm.tokenizer.encode(prompt))] = [found]
    for drafter in (each for kind, each in drafters(answers, 300).items() if kind in ("right", "changing")):
        with drafting(llm.engine, drafter, 5) as speculation:
            assert [found for [found] in ids_of(llm, prompts, *params)] == expected
        assert speculation.counts.num_drafts > 0


def test_a_budget_that_cannot_be_kept_is_refused(llm):
    with pytest.raises(RequestError, match=r"thinking_token_budget.* none of the tokens"):
        llm.generate(PROMPTS[:1], SamplingParams(thinking_token_budget=2, allowed_token_ids=[7, 8]), progress=False)
    marks = ReasoningMarks(opened=True, openings=("<a>",), ends=("</a>",), closings=("</b>",))
    with pytest.raises(RequestError, match=r"no tokens for '</a>'"):
        ThinkingBudget(marks, 2, llm.tokenizer, 500)
    llm.engine._grammars.__dict__["_parsers"] = ModelParsers()
    with pytest.raises(RequestError, match=r"thinking_token_budget.* not known how the model marks its thinking"):
        llm.generate(PROMPTS[:1], SamplingParams(thinking_token_budget=2), progress=False)
