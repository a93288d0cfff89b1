"""The grammar compiler and its masks against Python's own matching of the same grammars."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
import regex

from jaxis import StructuredOutputs
from jaxis.engine.grammar import compiler as structured_output
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.errors import OverloadedError, RequestError
from jaxis.tokenizer import Tokenizer

PADDED_VOCAB_SIZE = 515  # of tiny checkpoints, and three more, so that it ends within a word


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.from_path(checkpoint())


@pytest.fixture(scope="module")
def eos(tokenizer):
    return tokenizer.token_to_id("<|im_end|>")


@pytest.fixture(scope="module")
def compiler(tokenizer, eos):
    return GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, [eos])


def permitted(mask):
    """The ids of the bits that are set."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(compiler, tokenizer, spec, text):
    """Whether a grammar lets this text be spelled and then end."""
    matcher = compiler.compile(spec).new_matcher()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for i, token_id in enumerate(token_ids):
        if token_id not in permitted(matcher.token_mask()):
            return False
        matcher.follow(token_ids[: i + 1])
    return bool(permitted(matcher.token_mask()) & {tokenizer.token_to_id("<|im_end|>")}) or matcher.is_complete


@pytest.mark.parametrize(
    "pattern", [r"(ab|a)*c?", r"the (cat|garden) [a-z]{1,6}\.", r"^-?\d{1,3}(,\d{3})*$", r"[^a]*e"]
)
def test_masks_hold_the_tokens_that_can_go_on_and_the_end_where_it_may_be(compiler, tokenizer, eos, pattern):
    matcher = compiler.compile(StructuredOutputs(regex=pattern)).new_matcher()
    random = np.random.default_rng(0)
    special = tokenizer.special_token_ids
    output, text = [], ""
    for _ in range(12):
        expected = set()
        for token_id in set(range(tokenizer.vocab_size)) - special:
            try:
                candidate = text + tokenizer.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                continue
            if candidate != text and regex.fullmatch(pattern, candidate, partial=True):
                expected.add(token_id)
        if regex.fullmatch(pattern, text):
            expected.add(eos)
        found = permitted(matcher.token_mask())
        ascii_only = {i for i in found if i in special or tokenizer.token_bytes(i).isascii()}
        assert ascii_only == {i for i in expected if i in special or tokenizer.token_bytes(i).isascii()}
        assert all(i < tokenizer.vocab_size for i in found)
        go_on = sorted(ascii_only - {eos})
        if not go_on:
            assert matcher.is_complete
            break
        output.append(int(random.choice(go_on)))
        text += tokenizer.token_bytes(output[-1]).decode()
        matcher.follow(output)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1, None]}}},
            [
                "{}",
                '{"a": 1}',
                '{"a": 1.5}',
                '{"a":-3,"b":null}',
                '{"a": 1, "b": "y"}',
                '{"c": [1, {}]}',
                "[]",
                '{"a": 1',
            ],
        ),
        (
            {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 10}, "minItems": 1, "maxItems": 2},
            ["[]", "[1]", "[10, 0.5]", "[11]", "[-1]", "[1, 2, 3]", '["1"]', "[1,\n  2]"],
        ),
        (
            {"anyOf": [{"type": "string", "pattern": "^a+$", "maxLength": 3}, {"const": {"k": [True]}}]},
            ['"aaa"', '"aaaa"', '"b"', '{"k": [true]}', '{"k": [false]}', "null"],
        ),
        (
            {
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {"next": {"$ref": "#/$defs/node"}},
                        "additionalProperties": False,
                    }
                },
                "$ref": "#/$defs/node",
            },
            ["{}", '{"next": {"next": {}}}', '{"next": 1}', '{"other": {}}'],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^n_": {"type": "integer"}},
                "additionalProperties": False,
                "maxProperties": 2,
            },
            ["{}", '{"n_a": 1}', '{"n_a": "1"}', '{"x": 1}', '{"n_a": 1, "n_b": 2}', '{"n_a": 1, "n_b": 2, "n_c": 3}'],
        ),
        # The order of keys is the order in which a schema's parts are put together, here too.
        (
            {"allOf": [{"items": [{"type": "integer"}, {"type": "string"}]}], "additionalItems": {"type": "boolean"}}
            | {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]},
            ["[1, true]", '[1, "hello"]', "[1]", "[true]"],
        ),
        ({"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0}, ["7", "49", "8", "-7", "0", "7777"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2024-13-01"', '"24-01-01"', '"today"']),
    ],
)
def test_a_schema_accepts_what_jsonschema_accepts(compiler, tokenizer, schema, texts):
    validator_class = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = validator_class(schema, format_checker=jsonschema.FormatChecker())
    spec = StructuredOutputs(json_schema=schema)
    verdicts = []
    for text in texts:
        try:
            verdicts.append(validator.is_valid(json.loads(text)))
        except json.JSONDecodeError:
            verdicts.append(False)
        assert accepts(compiler, tokenizer, spec, text) == verdicts[-1], text
    assert set(verdicts) == {True, False}


def test_choices_are_taken_literally(compiler, tokenizer):
    choices = ["a.c", "a", "(", "x|y", "\n\t\x00", "naïve\\", '"', "/"]
    spec = StructuredOutputs(choice=choices)
    for text in choices:
        assert accepts(compiler, tokenizer, spec, text), text
    for text in ["abc", "", "x", "y", "\n", "aa"]:
        assert not accepts(compiler, tokenizer, spec, text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'start: item ("," item)*\nitem: /[0-9]+/ | "(" start ")"',
        'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"',
    ],
    ids=["lark", "ebnf"],
)
def test_grammars(compiler, tokenizer, grammar):
    spec = StructuredOutputs(grammar=grammar)
    for text, is_valid in {"1,22": True, "(1,(2))": True, "(1": False, "1,": False, "a": False}.items():
        assert accepts(compiler, tokenizer, spec, text) == is_valid, text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json_schema": {"not": {"pattern": "a"}}}, "json_schema: not of # is not supported"),
        ({"json_schema": {"$ref": "http://localhost/x.json"}}, "nothing is ever fetched"),
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "is circular"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
        ({"json_schema": {"type": "object", "minProperties": 2}}, "minProperties=2 is not supported"),
        ({"json_schema": {"$id": "http://localhost/a", "$ref": "b.json"}}, "nothing is ever fetched"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"json_schema": {"type": "integer", "multipleOf": 99_999_989}}, "least common multiple"),
        ({"json_schema": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, "least common"),
        ({"json_schema": '{"type": "number", "multipleOf": 1e-300}'}, "least common multiple"),
        ({"json_schema": {"type": "integer", "minimum": 10**40}}, "minimum=1.00000e[+]40 is not supported"),
        ({"json_schema": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}}, "cannot be honoured"),
        ({"json_schema": {"type": "integer", "exclusiveMaximum": -(2**64)}}, "exclusiveMaximum=-1.84467e[+]19"),
        ({"grammar": 'start: %json {"multipleOf": 99999989}'}, "grammar: multipleOf"),
        ({"grammar": "start: %json x"}, "line 1: %json must be followed by a schema"),
        ({"grammar": 'start: "a'}, "grammar cannot be honoured: 1"),
        ({"grammar": "root ::= ("}, "not valid EBNF"),
        ({"grammar": "root ::= " + "(" * 5000}, "not valid EBNF"),
        ({"regex": "(a"}, "regex cannot be honoured: unclosed group"),
        ({"regex": r"(?=a)b"}, "look-around"),
        ({"regex": "(" * 2000 + ")" * 2000}, "regex cannot be honoured"),
    ],
)
def test_what_cannot_be_compiled_is_one_clear_error(compiler, given, message):
    with pytest.raises(RequestError, match=message) as caught:
        compiler.compile(StructuredOutputs(**given))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_without_a_tokenizer():
    with pytest.raises(RequestError, match="needs a tokenizer"):
        GrammarCompiler(None, 10, []).compile(StructuredOutputs(json_object=True))


def test_a_grammar_is_compiled_once_for_all_threads(tokenizer):
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, [])
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(compiler.compile, [StructuredOutputs(regex="[a-z]+")] * 8))
    assert len(set(map(id, grammars))) == 1
    others = [StructuredOutputs(regex=f"a{i}") for i in range(structured_output.MAX_CACHED_GRAMMARS)]
    compiled = [compiler.compile(spec) for spec in others]
    assert [compiler.compile(spec) for spec in others] == compiled
    assert compiler.compile(StructuredOutputs(regex="[a-z]+")) is not grammars[0]


def test_a_compilation_that_takes_too_long_is_given_up(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, [])
    monkeypatch.setattr(structured_output, "COMPILE_SECONDS", 0.05)
    go_on = threading.Event()
    compile_grammar = compiler._compile

    def compile_slowly(*given):
        while not go_on.is_set():  # uses the processor
            pass
        return compile_grammar(*given)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    with pytest.raises(RequestError, match=r"regex takes more than 0.05 s to compile"):
        compiler.compile(StructuredOutputs(regex="a"))
    go_on.set()
    assert compiler.compile(StructuredOutputs(regex="a"), limited=False).new_matcher().token_mask().any()


def test_preparing_the_vocabulary_and_waiting_for_others_is_no_part_of_the_limit(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, [])
    monkeypatch.setattr(structured_output, "COMPILE_SECONDS", 1.0)
    prepare = compiler._llguidance_tokenizer

    def prepare_slowly(tokenizer):
        while time.thread_time() < 1.5:
            pass
        return prepare(tokenizer)

    monkeypatch.setattr(compiler, "_llguidance_tokenizer", prepare_slowly)
    compiler.prepare()
    assert compiler.compile(StructuredOutputs(regex="a")).new_matcher().token_mask().any()


def test_small_grammars_pass_large_ones_of_which_not_all_wait(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, [])
    go_on = threading.Event()
    compile_grammar = compiler._compile

    def compile_slowly(spec, tokenizer):
        if len(spec.source) > 1000:
            go_on.wait(60)
        return compile_grammar(spec, tokenizer)

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    monkeypatch.setattr(structured_output, "MAX_WAITING", 5)
    large = [StructuredOutputs(choice=[f"{number}-{i}" for i in range(1000)]) for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        compiled = [pool.submit(compiler.compile, spec) for spec in large]
        for number in range(5):
            assert compiler.compile(StructuredOutputs(regex=f"a{number}")).new_matcher().token_mask().any()
        go_on.set()
        errors = [future.exception() for future in compiled]
    assert {type(error) for error in errors} == {type(None), OverloadedError}


def test_the_cache_is_bounded_by_what_its_grammars_take(tokenizer):
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, [])
    num_kept = structured_output.MAX_CACHED_CHARACTERS // 100_000
    specs = [
        StructuredOutputs(json_schema={"const": number, "description": "x" * 100_000}) for number in range(num_kept + 1)
    ]
    compiled = [compiler.compile(spec) for spec in specs]
    for spec, grammar in list(zip(specs, compiled, strict=True))[1:]:
        assert compiler.compile(spec) is grammar
    assert compiler.compile(specs[0]) is not compiled[0]


def test_without_an_end_token_a_grammar_ends_where_nothing_can_follow(tokenizer):
    matcher = GrammarCompiler(tokenizer, PADDED_VOCAB_SIZE, []).compile(StructuredOutputs(choice=["a"])).new_matcher()
    [a] = tokenizer.encode("a")
    assert permitted(matcher.token_mask()) == {a}
    assert not matcher.is_complete
    matcher.follow([a])
    assert matcher.is_complete


def test_special_stop_tokens_end_a_grammar_and_others_are_part_of_it(compiler, tokenizer, eos):
    [a] = tokenizer.encode("a")
    special = tokenizer.token_to_id("<|im_start|>")
    matcher = compiler.compile(StructuredOutputs(regex="a|aa")).new_matcher([a, special])
    assert not permitted(matcher.token_mask()) & {special, eos}
    matcher.follow([a])
    assert permitted(matcher.token_mask()) >= {a, special, eos}
    matcher.follow([a, special])
    assert matcher.is_complete
