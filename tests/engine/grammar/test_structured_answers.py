"""Structured output through the whole engine: against a slow oracle, beside other parameters and other requests."""

import json

import jsonschema
import pytest
import regex

from jaxis import SamplingParams, StructuredOutputs
from jaxis.errors import RequestError

PROMPT = "the cat reads"
SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 500}, "maxItems": 4},
    {"anyOf": [{"enum": ["red", "green", None]}, {"type": "string", "pattern": "^[a-f]{2,5}$"}]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
]


def complete(llm, spec, **params):
    """The one completion of PROMPT."""
    params = {"temperature": 0.0, "max_tokens": 20} | params
    [output] = llm.generate(PROMPT, SamplingParams(structured_outputs=spec, **params))
    [completion] = output.outputs
    return completion


def oracle(llm, pattern, max_tokens):
    """Greedy tokens among those whose text is still the beginning of a match, each tried in turn."""
    [eos] = llm.engine.eos_token_ids
    special = llm.tokenizer.special_token_ids
    prompt = llm.tokenizer.encode(PROMPT)
    output, text = [], b""

    def may_follow(token_id):
        if token_id == eos:
            return bool(regex.fullmatch(pattern, text))
        more = llm.tokenizer.token_bytes(token_id)
        return bool(more) and token_id not in special and bool(regex.fullmatch(pattern, text + more, partial=True))

    while len(output) < max_tokens:
        logits = llm.compute_logits(prompt + output, path="paged")[-1]
        token_id = next((i for i in logits.argsort()[::-1].tolist() if may_follow(i)), None)
        if token_id is None:
            break
        output.append(token_id)
        if token_id == eos:
            break
        text += llm.tokenizer.token_bytes(token_id)
    return output


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pattern", ["[a-z ]{3,30}\\.", "(ab?)*(the|cat)+ [0-9]{2,}", "[ -Z]*(\\.|!)", "no|nothing"])
def test_greedy_equals_an_oracle_that_tries_every_token(llm, pattern):
    completion = complete(llm, StructuredOutputs(regex=pattern))
    assert completion.token_ids == oracle(llm, pattern.encode(), 20)
    if completion.finish_reason == "stop":
        assert regex.fullmatch(pattern, completion.text)


def test_whatever_ends_by_itself_is_valid(batching_llm):
    specs = [StructuredOutputs(json_schema=schema) for schema in SCHEMAS]
    params = [
        SamplingParams(temperature=1.0, max_tokens=60, n=4, seed=seed, structured_outputs=spec)
        for seed in range(3)
        for spec in specs
    ]
    num_ended = 0
    for output, one in zip(batching_llm.generate([PROMPT] * len(params), params), params, strict=True):
        for completion in output.outputs:
            assert completion.finish_reason in ("stop", "length")
            if completion.finish_reason == "stop":
                jsonschema.validate(json.loads(completion.text), one.structured_outputs.json_schema)
                num_ended += 1
    assert num_ended > 24
    assert len({completion.text for completion in output.outputs}) > 1


def test_ids_end_with_end_of_sequence_where_nothing_else_can_follow(llm):
    choice, [eos] = StructuredOutputs(choice=["b"]), llm.engine.eos_token_ids
    ids = [*llm.tokenizer.encode("b"), eos]

    completion = complete(llm, choice, logprobs=0, logprobs_mode="processed_logprobs")
    assert completion.token_ids == ids
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("b", "stop", None)
    assert [entry[token_id].logprob for token_id, entry in zip(ids, completion.logprobs, strict=True)] == [0.0, 0.0]

    assert complete(llm, choice, max_tokens=1).finish_reason == "length"
    # Without a token that ends it, the answer ends where nothing can follow.
    assert complete(llm, choice, allowed_token_ids=ids[:1]).token_ids == ids[:1]


def test_beside_other_parameters(llm):
    tokenizer = llm.tokenizer
    choice = StructuredOutputs(choice=["a", "aa", "aaaa", "b", "the cat"])
    [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")

    assert complete(llm, choice, logit_bias={b: 100.0}).text == "b"
    assert complete(llm, choice, logit_bias={b: 100.0}, bad_words=["b"]).text != "b"
    assert complete(llm, choice, allowed_token_ids=[a], min_tokens=3).text == "aaaa"
    # What the grammar needs wins over what would leave nothing.
    only = StructuredOutputs(choice=["b"])
    assert complete(llm, only, bad_words=["b"], min_tokens=9).text == "b"
    assert complete(llm, only, frequency_penalty=2.0, repetition_penalty=1.5).text == "b"
    with pytest.raises(RequestError, match="allowed_token_ids has none of the tokens"):
        complete(llm, only, allowed_token_ids=[a])

    letters = StructuredOutputs(regex="[ab]*")
    cut = complete(llm, letters, logit_bias={a: 50.0}, stop=["aaa"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("", "stop", "aaa")
    [start] = [
        i for i in tokenizer.special_token_ids if tokenizer.decode([i], skip_special_tokens=False) == "<|im_start|>"
    ]
    ended = complete(llm, letters, logit_bias={start: 100.0}, stop_token_ids=[start], min_tokens=2)
    assert len(ended.text) >= 2
    assert (ended.token_ids[-1], ended.stop_reason) == (start, start)

    free = complete(llm, None, logprobs=20).logprobs[0]
    forced = complete(llm, StructuredOutputs(regex="[^a-z ]{2}"), logprobs=20).logprobs[0]
    sampled, *others = forced
    assert sampled != next(iter(free))
    for token_id in set(others) & set(free):
        assert forced[token_id].logprob == pytest.approx(free[token_id].logprob, abs=1e-5)
        assert forced[token_id].rank == free[token_id].rank
    repeated = complete(llm, letters, logit_bias={a: 1.0}, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=12)
    assert set(repeated.text) == {"a", "b"}


def test_a_fault_is_the_fault_of_its_request_alone(batching_llm):
    engine = batching_llm.engine
    prompt = batching_llm.tokenizer.encode(PROMPT)
    valid = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputs(regex="[a-z]+"))
    [alone] = batching_llm.generate(PROMPT, valid)
    [b] = batching_llm.tokenizer.encode("b")
    stuck = SamplingParams(temperature=0, allowed_token_ids=[b], structured_outputs=StructuredOutputs(regex="b{2}a"))
    good, bad = engine.add_request("good", prompt, valid), engine.add_request("bad", prompt, stuck)
    broken = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))
    with pytest.raises(RequestError, match="unclosed group"):
        engine.add_request("broken", prompt, broken)
    while engine.has_unfinished:
        engine.step()
    assert good.output().outputs[0].token_ids == alone.outputs[0].token_ids
    assert isinstance(bad.error, RequestError)
    assert "allowed_token_ids has none of the tokens" in str(bad.error)


def test_a_limit_met_on_the_way_fails_the_request_and_is_forgotten(llm):
    spec = StructuredOutputs(regex="[a-z]+[0-9]")
    grammar = llm.engine.grammar_compiler.compile(spec)
    matcher = grammar.new_matcher()
    matcher.follow(llm.tokenizer.encode("!"))  # as if a limit were met: llguidance stays in error
    assert matcher.error is not None
    assert not matcher.token_mask().any()
    assert llm.engine.grammar_compiler.compile(spec) is not grammar
    assert complete(llm, spec, max_tokens=4).token_ids
