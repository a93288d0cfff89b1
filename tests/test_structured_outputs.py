"""Arguments of a StructuredOutputs, and its refusals of others."""

import json

import pytest

from jaxis import SamplingParams, StructuredOutputs
from jaxis.errors import RequestError


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "has nothing: give exactly one of json_schema"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice"),
        ({"json_object": 1}, "json_object=1 must be true or false"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[" * 100_000}, "json_schema is not JSON"),
        ({"json_schema": [1]}, "must be a JSON object, not list"),
        ({"json_schema": {"enum": [float("nan")]}}, "cannot be written as JSON"),
        ({"json_schema": {"enum": [{1}]}}, "cannot be written as JSON"),
        ({"json_schema": nested(64)}, "more than 64 levels deep"),
        ({"json_schema": {"const": "x" * 200_000}}, "characters, and at most"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"regex": "a" * 9000}, "regex has 9000 characters, and at most 8192"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"grammar": "x" * 140_000}, "grammar has 140000 characters"),
        ({"choice": []}, "choice is empty"),
        ({"choice": "yes"}, "list of non-empty strings"),
        ({"choice": ["yes", ""]}, "list of non-empty strings"),
        ({"choice": ["a"] * 5000}, "5000 strings, and at most 4096"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(RequestError, match=message):
        StructuredOutputs(**given)


def test_equal_texts_are_the_same_grammar():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    as_dict, as_text = (
        StructuredOutputs(json_schema=schema),
        StructuredOutputs(json_schema=json.dumps(schema, indent=2)),
    )
    assert as_dict.source == as_text.source == '{"type":"object","properties":{"b":{},"a":{}}}'
    assert (as_dict.kind, StructuredOutputs(json_object=True).kind) == ("json_schema", "json_object")
    assert StructuredOutputs(json_schema=nested(63)).source.startswith('{"items":')


def test_in_sampling_params():
    with pytest.raises(RequestError, match="must be a StructuredOutputs, not dict"):
        SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="leave ignore_eos out"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)
