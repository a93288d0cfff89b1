"""Schemas as clients send them: values that jsonschema finds valid are accepted, and only they are written."""

import json
import random

import jsonschema
import numpy as np
import pytest

from jaxis import StructuredOutputs
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.json_schema import rewritten
from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer

NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
CAT = {"type": "object", "properties": {"k": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["k", "n"]}
DOG = {"type": "object", "properties": {"k": {"const": "dog"}, "n": {"type": "string"}}, "required": ["k", "n"]}
NODE = {"type": "object", "properties": {"v": {"type": "null"}}, "additionalProperties": False}


def tree(**child):
    """A recursive schema that says more of its child."""
    node = NODE | {"properties": {**NODE["properties"], "c": child}}
    return {"$ref": "#/$defs/N", "required": ["c"], "$defs": {"N": node, "L": {"items": {"$ref": "#/$defs/N"}}}}


# Each schema, and values of which jsonschema says whether they are valid.
SCHEMAS = [
    ({**NUMBERS, "propertyNames": {"type": "string"}}, [{"a": 1}, {"a": "1"}]),
    ({**NUMBERS, "propertyNames": {"pattern": "^[a-z]+$"}}, [{"a": 1}, {"A": 1}, {"a": "1"}]),
    ({**NUMBERS, "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}, {"a": 1}, {"abcd": 1}]),
    ({**NUMBERS, "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a", "b"]}}}, [{"a": 1}, {"c": 1}]),
    ({"type": "object", "propertyNames": False}, [{}, {"a": 1}]),
    (
        {"type": "object", "propertyNames": {"maxLength": 1}, "unevaluatedProperties": {"type": "number"}},
        [{"a": 1}, {"ab": 1}, {"a": "1"}],
    ),
    ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, [[1, 1], ["a"]]),
    ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}}, [[], ["c", "a"], ["a", "a"], ["d"]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1], [1, 1]]),
    ({"type": "array", "items": {"not": {}}}, [[], [1]]),
    ({"type": "array", "contains": {}, "minContains": 2}, [[1, 2], [1]]),
    ({"not": {"type": "null"}}, [1, "a", [], None]),
    ({"type": "string", "not": {"enum": ["ab", "a", ""]}}, ["b", "abc", "ac", "a", "ab", ""]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}]),
    (
        {"type": "object", "properties": {"a": True, "b": True}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1}],
    ),
    ({"type": "object", "dependentRequired": {}}, [{}, 1]),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": ["integer", "null"]}},
            "required": ["k", "n"],
            "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
            "then": {"properties": {"n": {"type": "integer"}}},
            "else": {"properties": {"n": {"type": "null"}}},
        },
        [{"k": "x", "n": 1}, {"k": "y", "n": None}, {"k": "x", "n": None}, {"k": "y", "n": 1}],
    ),
    ({"if": {}, "then": {"type": "integer"}}, [1, "a"]),
    ({"if": {"type": "string"}, "type": "integer"}, [1, "a"]),
    ({"properties": {"a": True}, "type": "object", "unevaluatedProperties": False}, [{"a": 1}, {"b": 1}]),
    (
        {"allOf": [{"$ref": "#/$defs/A"}], "properties": {"b": True}, "unevaluatedProperties": False}
        | {"type": "object", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
        [{"a": 1, "b": 1}, {"a": "1"}, {"c": 1}],
    ),
    ({"type": "string", "format": "password", "minLength": 1.0}, ["a", ""]),
    ({"type": "string", "pattern": "^[^[\\]]+$", "contentEncoding": "base64"}, ["a", "["]),
    ({"type": "object", "patternProperties": {"^[[a]$": {"type": "integer"}}}, [{"[": 1}, {"a": "1"}, {"b": "1"}]),
    ({"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)[a.]+$"}, ["a.a", ".a", "a..a"]),
    (
        {"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}], "$defs": {"C": CAT, "D": DOG}},
        [{"k": "cat", "n": 1}, {"k": "dog", "n": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False}
        | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": None}, {"b": None}, {}, {"a": None, "b": None}],
    ),
    (
        {"oneOf": [{"type": "object", "required": ["a"], "properties": {"a": {"type": "null"}}}, {"$ref": "#/$defs/B"}]}
        | {"$defs": {"B": {"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}}}}},
        [{"a": None}, {"b": ""}, {"a": None, "b": ""}, {"a": None, "b": 1}, {}],
    ),
    (
        {"anyOf": [{"type": "string"}, {"type": "null"}], "oneOf": [{"const": "a"}, {"type": "null"}]},
        ["a", None, "b", 1],
    ),
    ({"oneOf": [{"type": "string"}, {"enum": ["auto", "none"]}]}, ["a", "aut", "auto", 2]),
    (
        {"oneOf": [{"oneOf": [CAT, {"type": "null"}]}, {"anyOf": [DOG, {"type": "array"}]}]},
        [{"k": "cat", "n": 1}, {"k": 1}],
    ),
    (
        {
            "oneOf": [
                {"type": "array", "items": {"type": name}, "minItems": least}
                for name, least in (("string", 0), ("null", 1))
            ]
        },
        [[], ["a"], [None], ["a", None], 1],
    ),
    (
        {"oneOf": [{"type": "string"}, *({"type": "array", "items": {"type": kind}} for kind in ("string", "object"))]},
        ["", ["a"], [{}], [], ["a", {}], 1],
    ),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5, 2**62, 0.5]),
    ({"type": "number", "minimum": -1e308, "maximum": 1e308}, [0, -1.5, "a"]),
    ({"type": "integer", "maximum": 2**53 + 1, "exclusiveMinimum": 0.5}, [1, 2**53, 0]),
    ({"$ref": "#/$defs/List%5Bint%5D~1a%20%C3%A9", "$defs": {"List[int]/a é": {"type": "array"}}}, [[], 1]),
    (
        {
            "type": "object",
            "properties": {"a": {"$dynamicRef": "#"}, "n": {"type": "null"}},
            "unevaluatedProperties": False,
        },
        [{"a": {"n": None}}, {"a": {"n": 1}}, {"b": 1}],
    ),
    (
        {"allOf": [{"$dynamicRef": "#/$defs/A"}], "unevaluatedProperties": False, "type": "object"}
        | {"$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
        [{"a": 1}, {"a": "1"}, {"c": 1}],
    ),
    (
        {"oneOf": [{"allOf": [{"$ref": "#/$defs/C"}, {"title": "Cat"}]}, {"$ref": "#/$defs/D", "minProperties": 1}]}
        | {"$defs": {"C": CAT, "D": DOG}},
        [{"k": "cat", "n": 1}, {"k": "dog", "n": 1}],
    ),
    (tree(type="object", **{"$ref": "#/$defs/N"}), [{"c": {"v": None, "c": {}}}, {"c": {"c": 1}}, {"v": None}]),
    (
        tree(type=["object", "null"], allOf=[{"$ref": "#/$defs/N"}, {"required": ["v"]}]),
        [{"c": {"v": None, "c": {"v": None}}}, {"c": {"v": None, "c": {}}}, {"c": {}}, {"c": None}],
    ),
    (
        tree(type="array", maxItems=1, **{"$ref": "#/$defs/L"}),
        [{"c": []}, {"c": [{"c": [{"v": None}]}]}, {"c": [{"c": [{}, {}]}]}, {"c": [1]}],
    ),
    ({"$ref": "#one", "$defs": {"x": {"$anchor": "one", "type": "integer"}}}, [1, "a"]),
    ({"$id": "http://localhost/s", "$ref": "item", "$defs": {"x": {"$id": "item", "type": "integer"}}}, [1, "a"]),
    (
        {"type": "object", "properties": {"a": {"const": {"not": 1, "format": "iri"}}}},
        [{"a": {"not": 1, "format": "iri"}}, {"a": 1}],
    ),
    ({"enum": [{"$ref": "x"}, {"if": 1}], "default": {"uniqueItems": True}}, [{"$ref": "x"}, {"if": 2}]),
]


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.from_path(checkpoint())


@pytest.fixture(scope="module")
def eos(tokenizer):
    return tokenizer.token_to_id("<|im_end|>")


@pytest.fixture(scope="module")
def compiler(tokenizer, eos):
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [eos])


def permitted(matcher):
    return np.flatnonzero(np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little")).tolist()


def accepts(grammar, tokenizer, eos, text):
    matcher = grammar.new_matcher()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for i, token_id in enumerate(token_ids):
        if token_id not in permitted(matcher):
            return False
        matcher.follow(token_ids[: i + 1])
    return matcher.is_complete or eos in permitted(matcher)


def random_text(grammar, tokenizer, eos, rng):
    """Text that random tokens of the grammar spell; None if it has not ended in time."""
    matcher = grammar.new_matcher()
    token_ids = []
    closing = {token_id for text in '"}],01' for token_id in tokenizer.encode(text, add_special_tokens=False)}
    while len(token_ids) < 80:
        allowed = permitted(matcher)
        if matcher.is_complete or (eos in allowed and rng.random() < 0.5):
            return tokenizer.decode(token_ids)
        allowed = [token_id for token_id in allowed if token_id != eos]
        ends = [token_id for token_id in allowed if token_id in closing]
        token_ids.append(rng.choice(ends if ends and rng.random() < 0.6 else allowed))
        matcher.follow(token_ids)
    return None


@pytest.mark.parametrize(("schema", "values"), SCHEMAS, ids=lambda value: json.dumps(value)[:40])
def test_valid_values_are_accepted_and_random_texts_are_valid(compiler, tokenizer, eos, schema, values):
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compiler.compile(StructuredOutputs(json_schema=schema))
    verdicts = [validator.is_valid(value) for value in values]
    assert set(verdicts) == {True, False}
    assert [accepts(grammar, tokenizer, eos, json.dumps(value, ensure_ascii=False)) for value in values] == verdicts
    rng = random.Random(0)
    for _ in range(8):
        text = random_text(grammar, tokenizer, eos, rng)
        if text is not None:
            validator.validate(json.loads(text))


def test_documents_may_have_many_schemas(compiler):
    names = [f"n{i}" for i in range(1200)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    assert compiler.compile(StructuredOutputs(json_schema=schema))


def test_what_is_not_ensured_is_named():
    schema = {
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "b": {"type": "string", "format": "iri"},
            "c": {"format": "password", "const": "uniqueItems"},
        }
    }
    assert rewritten(schema, "json_schema")[1] == {"uniqueItems", "format.iri"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"pattern": r"\bfoo"}}}, r"#/properties/a/pattern='.*bfoo'.*word boundary"),
        ({"items": {"contains": {"type": "integer"}}}, "contains of #/items"),
        ({"not": {"pattern": "a"}}, "not of #"),
        ({"if": {"minimum": 1}, "then": {"type": "integer"}}, "if of #"),
        ({"$ref": "#/$defs/none"}, "there is no such place"),
        ({"$ref": "http://e.com/s"}, "nothing is ever fetched"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf of # is not supported.*use anyOf"),
        ({"not": {"$ref": "#"}}, "refers to that schema"),
        ({"$dynamicRef": "#"}, r"#/\$ref='#' is circular"),
        ({"allOf": [{"type": "string"}, {"$ref": "#"}]}, r"#/allOf/1/\$ref='#' is circular"),
        ({"oneOf": [{"type": "string"}, {"$ref": "#"}]}, r"#/oneOf/1/\$ref='#' is circular"),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            r"#/items/\$ref='#/\$defs/a' is circular",
        ),
        ({"const": 2**53 + 1}, "more than 53 bits"),
        ({"properties": {"a": None}}, "#/properties/a must be a schema"),
        ({"anyOf": [{"properties": {"a": True}}, {}], "unevaluatedProperties": False}, "unevaluatedProperties of #"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name_and_place(compiler, schema, message):
    with pytest.raises(RequestError, match=message) as caught:
        compiler.compile(StructuredOutputs(json_schema=schema))
    assert "\n" not in str(caught.value)
