"""A document whose references are JSON pointers accepts what jsonschema accepts under the document as it was."""

import json
import random

import jsonschema
import pytest
from jsonschema.validators import validator_for

from jaxis.parsing.schema_references import target, with_pointers
from jaxis.parsing.tool_parsers.call_grammar import call_schema
from jaxis.parsing.tool_parsers.tools import function_tools

TREE = {
    "$id": "https://example.com/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}
OLD_TREE = {
    "$id": "tree",
    "$recursiveAnchor": True,
    "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$recursiveRef": "#"}}},
}
STRICT = {"properties": {"data": {"type": "integer"}}, "required": ["data"]}
NODES = [
    {"data": 1},
    {"data": "1"},
    {"data": 1, "children": [{"data": 2}]},
    {"data": 1, "children": [{"data": "2"}]},
    {"data": 1, "children": [{}]},
    1,
]
OLD = "https://json-schema.org/draft/2019-09/schema"
# Each document, and values that it tells apart.
DOCUMENTS = [
    (
        {"$dynamicAnchor": "node", "$ref": "tree", **STRICT, "$id": "https://example.com/strict", "$defs": {"t": TREE}},
        NODES,
    ),
    ({"$ref": "https://example.com/tree", "$defs": {"t": TREE}}, NODES),
    (
        {
            "$schema": OLD,
            "$id": "https://e.com/s",
            "$recursiveAnchor": True,
            "$ref": "tree",
            **STRICT,
            "$defs": {"t": OLD_TREE},
        },
        NODES,
    ),
    ({"$schema": OLD, "$id": "https://e.com/s", "$ref": "tree", **STRICT, "$defs": {"t": OLD_TREE}}, NODES),
    (
        {"type": "object", "properties": {"a": {"$dynamicRef": "#"}, "n": {"type": "null"}}},
        [{"a": {"n": None}}, {"a": {"n": 1}}, {"a": 1}],
    ),
    ({"properties": {"a": {"$dynamicRef": "#/$defs/x"}}, "$defs": {"x": {"type": "null"}}}, [{"a": None}, {"a": 1}]),
    (
        {"properties": {"a": {"$dynamicRef": "#x"}}, "$defs": {"x": {"$anchor": "x", "type": "null"}}},
        [{"a": None}, {"a": 1}],
    ),
    (
        {
            "$ref": "#one",
            "$dynamicRef": "#/$defs/two",
            "$defs": {"1": {"$anchor": "one", "minimum": 2}, "two": {"maximum": 3}},
        },
        [1, 2, 3, 4],
    ),
    (
        {
            "$id": "http://e.com/a/",
            "properties": {"x": {"$ref": "b"}},
            "$defs": {"b": {"$id": "b", "$ref": "#/$defs/c", "$defs": {"c": {"type": "null"}}}},
        },
        [{"x": None}, {"x": 1}],
    ),
    (
        {
            "properties": {"$ref": {"type": "null"}, "$id": {"$ref": "#/$defs/a~1b%25"}},
            "$defs": {"a/b%": {"$id": "urn:x", "type": "null"}},
        },
        [{"$id": None}, {"$id": 1}, {"$ref": 1}],
    ),
    (
        {"const": {"$ref": "#x", "$id": "y"}, "$defs": {"x": {"$anchor": "x"}}},
        [{"$ref": "#x", "$id": "y"}, {"$ref": "#/$defs/x"}],
    ),
]


def verdicts(schema, values):
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    return [kind(schema).is_valid(value) for value in values]


@pytest.mark.parametrize(("document", "values"), DOCUMENTS)
def test_each_kind_of_reference_leads_to_the_same_schema(document, values):
    expected = verdicts(document, values)
    assert set(expected) == {True, False}
    written = with_pointers(document)
    assert verdicts(written, values) == expected
    text = json.dumps({key: value for key, value in written.items() if key != "const"})
    assert not any(name in text for name in ('"$dynamicRef"', '"$recursiveRef"', '"$anchor"', '"#x"'))
    assert with_pointers(written) == written


def test_a_recursive_anchor_inside_a_document_without_ids_is_its_schemas():
    """As in OpenAI's OpenAPI document. With an id it is a resource, of which jsonschema knows what is meant."""
    filters = {key: value for key, value in OLD_TREE.items() if key != "$id"}
    document = {"$schema": OLD, "type": "object", "required": ["f"], "properties": {"f": {"$ref": "#/$defs/t"}}}
    values = [{"f": value} for value in (*NODES, {"children": [{"children": [1]}]}, {"children": [{"children": [{}]}]})]
    written = with_pointers({**document, "$defs": {"t": filters}})
    expected = verdicts({**document, "$defs": {"t": {"$id": "tree", **filters}}}, values)
    assert verdicts(written, values) == expected
    assert set(expected) == {True, False}


def test_random_documents_keep_their_verdicts():
    rng, num_named = random.Random(0), 0
    values = [None, True, 0, 5, "", "ab", [], [1], {}, {"a": 1}]
    for _ in range(400):
        leaves = [
            {"type": rng.choice(["null", "integer", "string", "array", "object"])},
            {"minimum": 3},
            {"minLength": 1},
        ]
        inner = {"$id": "inner", "$defs": {"x": rng.choice(leaves), "y": {"$anchor": "y", **rng.choice(leaves)}}}
        inner |= {"$ref": rng.choice(["#y", "#/$defs/x", "outer#z"])}
        names = ["inner", "inner#y", "inner#/$defs/x", "#z", "#/$defs/z", "outer", "#/$defs/inner/$defs/y"][:-2]
        options = [{rng.choice(["$ref", "$dynamicRef"]): rng.choice(names)} for _ in range(3)]
        schema = {rng.choice(["anyOf", "allOf", "oneOf"]): [*options, rng.choice(leaves)]}
        document = {"$id": "http://e.com/outer", **schema}
        document["$defs"] = {
            "inner": inner,
            "z": {rng.choice(["$anchor", "$dynamicAnchor"]): "z", **rng.choice(leaves)},
        }
        assert verdicts(with_pointers(document), values) == verdicts(document, values), document
        num_named += with_pointers(document) != document
    assert num_named == 400


def test_a_document_of_pointers_stays_as_it_is():
    document = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#"}}}}}
    assert with_pointers(document) is document


@pytest.mark.parametrize(
    "reference", ["#/$defs/none", "#none", "other.json", "/a", "", "#/$defs/list/1", "#/$defs/list"]
)
def test_a_reference_that_leads_nowhere_has_no_target(reference):
    assert target(reference, {"$defs": {"list": [True]}}) is None


def test_an_address_that_is_none_stays():
    document = {
        "$id": "http://[",
        "properties": {"a": {"$ref": "http://["}, "b": {"$ref": "http://]#b"}, "c": {"$ref": 1}},
    }
    written = with_pointers(document)["properties"]
    assert written == {"a": {"$ref": "#"}, "b": {"$ref": "http://]#b"}, "c": {"$ref": 1}}


def test_what_depends_on_the_way_to_it_stays():
    inner = {name: {"$id": name, "$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}} for name in ("a", "b")}
    assert '"$dynamicRef": "#n"' in json.dumps(with_pointers({"$defs": inner}))


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {"a": {"$dynamicRef": "#"}, "n": {"type": "null"}}}, [{"a": {"n": None}}, {"a": {"n": 1}}]),
        (
            {"properties": {"a": {"$ref": "#z"}}, "$defs": {"z": {"$anchor": "z", "type": "null"}}},
            [{"a": None}, {"a": 1}],
        ),
        (
            {"$id": "http://e.com/t", "properties": {"a": {"$ref": "t#/properties/b"}, "b": {"type": "null"}}},
            [{"a": None}, {"a": 1}],
        ),
    ],
)
def test_references_of_a_tool_lead_to_its_own_parameters_within_a_call(parameters, arguments):
    [tool] = function_tools(
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]
    )
    expected = verdicts(parameters, arguments)
    assert expected == [True, False]
    assert verdicts(call_schema(tool), [{"name": "f", "arguments": value} for value in arguments]) == expected
