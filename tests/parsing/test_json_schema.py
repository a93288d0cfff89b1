"""The types that a schema allows are those of the values that jsonschema finds valid."""

import random

import jsonschema
import pytest

from jaxis.parsing.json_schema import ANY_TYPE, admits, property_schema, resolved, type_of, types
from jaxis.parsing.schema_references import with_pointers

VALUES = [None, True, False, 0, 3, -2.0, 0.5, 1e300, "", "1", "true", [], [1], {}, {"a": 1}]
DEFINITIONS = {
    "zip": {"type": "string"},
    "a/b~c d%é": {"type": ["integer", "null"]},
    "inner": {"$defs": {"deep": {"const": "x"}}, "type": "boolean"},
    "pair": {"prefixItems": [{"type": "array"}]},
    "all": {"allOf": [{"$ref": "#/$defs/zip"}, {"title": "Zip"}]},
    "tree": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}]},
}
REFERENCES = [
    "#/$defs/zip",
    "#/$defs/a~1b~0c%20d%25%C3%A9",
    "#/$defs/inner/$defs/deep",
    "#/$defs/pair/prefixItems/0",
    "#/$defs/all",
    "#/$defs/tree",
    "#/definitions/zip",
    "#here",
    "https://example.com/tool.json#/$defs/zip",
]


def random_schema(rng, depth=0):
    """A schema that constrains types alone, and its references are good."""
    kinds = ["type", "types", "const", "enum", "ref", "bool"] + ["allOf", "anyOf", "oneOf", "not", "if", "both"] * (
        2 if depth < 3 else 0
    )
    names = sorted(ANY_TYPE)
    match rng.choice(kinds):
        case "type":
            return {"type": rng.choice(names), "description": "of it"}
        case "types":
            return {"type": rng.sample(names, rng.randrange(1, 4))}
        case "const":
            return {"const": rng.choice(VALUES)}
        case "enum":
            return {"enum": rng.sample(VALUES, 3)}
        case "ref":
            return {"$ref": rng.choice(REFERENCES)}
        case "bool":
            return rng.random() < 0.7
        case "not":
            return {"not": random_schema(rng, depth + 1)}
        case "if":
            return {keyword: random_schema(rng, depth + 1) for keyword in ("if", "then", "else")[: rng.randrange(2, 4)]}
        case "both":
            schemas = [random_schema(rng, depth + 1) for _ in range(2)]
            return {key: value for schema in schemas if isinstance(schema, dict) for key, value in schema.items()}
        case keyword:
            return {keyword: [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}


def document(schema):
    """A schema with what the references of `random_schema` lead to."""
    defined = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/tool.json",
        "$defs": DEFINITIONS,
        "definitions": {**DEFINITIONS, "anchored": {"$anchor": "here", "type": "number"}},
    }
    return {**defined, **schema} if isinstance(schema, dict) else {**defined, "allOf": [schema]}


def test_types_are_those_of_the_valid_values():
    rng, seen = random.Random(0), set()
    for _ in range(800):
        root = document(random_schema(rng))
        validator = jsonschema.Draft202012Validator(root)
        valid = frozenset(type_of(value) for value in VALUES if validator.is_valid(value))
        root = with_pointers(root)
        allowed = types(root, root)
        assert valid <= allowed, root
        seen.add(allowed)
        if "enum" not in str(root) and "const" not in str(root) and "oneOf" not in str(root):
            assert allowed == valid, root
    assert len(seen) > 40


def test_values_that_are_valid_are_admitted_and_listed_values_alone():
    rng, refused = random.Random(1), 0
    for _ in range(400):
        root = document(random_schema(rng))
        validator = jsonschema.Draft202012Validator(root)
        root = with_pointers(root)
        for value in VALUES:
            assert admits(root, root, value) or not validator.is_valid(value), (root, value)
            refused += not admits(root, root, value)
    assert refused > 1000
    root = {
        "$defs": {"a": {"anyOf": [{"enum": ["1", True]}, {"const": 2}, {"$ref": "#/$defs/a"}]}},
        "$ref": "#/$defs/a",
    }
    assert [value for value in ("1", 1, True, "true", 2, "2", 2.0) if admits(root, root, value)] == ["1", True, 2, 2.0]


def test_a_reference_is_what_it_leads_to():
    root = with_pointers(document({"properties": {name: {"$ref": name, "title": "It"} for name in REFERENCES}}))
    for schema in root["properties"].values():
        assert "$ref" not in resolved(schema, root)
        assert types(resolved(schema, root), root) == types(schema, root) != ANY_TYPE
    assert resolved({"$ref": "#"}, root) is root
    assert resolved({"$ref": "#/$defs/zip", "maxLength": 5}, root) == {"allOf": [{"maxLength": 5}, {"type": "string"}]}
    assert resolved({"$ref": "#/$defs/zip", "default": "5"}, root) == {"type": "string"}


@pytest.mark.parametrize(
    "reference", ["#/$defs/none", "#/$defs/zip/type", "#nowhere", "other.json#/a", "#/$defs/pair/prefixItems/7"]
)
def test_a_reference_to_nothing_allows_anything(reference):
    root = document({})
    assert resolved({"$ref": reference}, root) is True
    assert types({"$ref": reference}, root) == ANY_TYPE


def test_circles_of_references_end():
    root = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}, "c": {"$ref": "#/$defs/c"}}}
    root["$defs"]["list"] = {"anyOf": [{"type": "string"}, {"anyOf": [{"$ref": "#/$defs/list"}]}]}
    for name in "abc":
        assert types({"$ref": f"#/$defs/{name}"}, root) == ANY_TYPE
    assert resolved({"$ref": "#/$defs/c"}, root) is True
    assert types({"$ref": "#/$defs/list"}, root) == {"string"}
    assert property_schema({"$ref": "#/$defs/a"}, "x", root) is None


def test_a_schema_of_many_alternatives_is_read_once():
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    root = {"$defs": {**doubled, "d60": {"type": "string", "properties": {"x": {"type": "null"}}}}}
    assert types({"$ref": "#/$defs/d0"}, root) == {"string"}
    assert types(property_schema({"$ref": "#/$defs/d0"}, "x", root), root) == {"null"}


STRING, NUMBER = {"type": "string"}, {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"x": STRING}}, STRING),
        ({"$ref": "#/$defs/args"}, STRING),
        ({"allOf": [{"properties": {"y": NUMBER}}, {"$ref": "#/$defs/args"}]}, STRING),
        ({"anyOf": [{"properties": {"y": NUMBER}}, {"properties": {"x": STRING}}]}, STRING),
        ({"oneOf": [{"properties": {"x": NUMBER}}, {"properties": {"x": STRING}}]}, {"type": ["number", "string"]}),
        ({"patternProperties": {"^x": STRING}, "additionalProperties": NUMBER}, STRING),
        ({"patternProperties": {"^y": NUMBER, "(": NUMBER}, "additionalProperties": STRING}, STRING),
        ({"properties": {"x": True}, "additionalProperties": STRING}, True),
        ({"properties": {"x": {"minLength": 1}}, "patternProperties": {"x": STRING}}, STRING),
        ({"if": {"properties": {"y": {"const": 1}}}, "then": {"properties": {"x": STRING}}}, STRING),
        ({"dependentSchemas": {"y": {"properties": {"x": STRING}}}}, STRING),
        ({"properties": {"y": STRING}}, None),
        ({"properties": {"y": STRING}, "additionalProperties": False}, None),
        (False, None),
    ],
)
def test_a_property_is_found_wherever_its_schema_stands(schema, expected):
    root = {"$defs": {"args": {"type": "object", "properties": {"x": STRING}}}}
    found = property_schema(schema, "x", root)
    assert (found is None) == (expected is None)
    assert types(found, root) == types(expected, root)
