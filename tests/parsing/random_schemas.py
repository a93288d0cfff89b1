"""Random functions with random schemas."""

from jaxis.parsing.tool_parsers.tools import FunctionTool

NAMES = ["city", "days", "unit", "flags", "note", "where", "limit", "kind"]
DEFINITIONS = {
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/point"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "zip": {"type": "string", "maxLength": 4},
    "unit/s": {"enum": ["m/s", "km/h", "1"], "title": "Unit"},
}


def random_schema(rng, depth=0):
    """The schema of a value."""
    simple = [
        {"type": "string"},
        {"type": "string", "enum": ["metric", "imperial", "a/b"]},
        {"type": "string", "maxLength": rng.randrange(1, 6)},
        {"type": "string", "minLength": 2},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "integer"},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null"]},
        {"enum": ["x", 3, None]},
        {"const": "fixed"},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
        {"$ref": "#/$defs/point"},
        {"$ref": "#/$defs/zip"},
        {"allOf": [{"$ref": "#/$defs/unit~1s"}]},
        {"allOf": [{"$ref": "#/$defs/zip"}, {"type": "string", "minLength": 2}]},
        {"anyOf": [{"$ref": "#/$defs/zip"}, {"$ref": "#/$defs/unit~1s"}]},
        {"anyOf": [{"$ref": "#/$defs/unit~1s"}, {"type": "null"}]},
    ]
    if depth > 1 or rng.random() < 0.7:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 3} | (
            {} if rng.random() < 0.5 else {"minItems": 1}
        )
    return random_object(rng, depth + 1)


def random_object(rng, depth=0):
    """The schema of an object."""
    names = rng.sample(NAMES, rng.randrange(0 if depth == 0 else 1, 4))
    properties = {name: {**random_schema(rng, depth), "description": "of %json ::= use"} for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def random_tools(rng):
    """One to three functions."""
    names = rng.sample(["get_weather", "now", "send", "look_up"], rng.randrange(1, 4))
    return [
        FunctionTool(name, "Does it.", {**random_object(rng), "$defs": DEFINITIONS, "title": name}) for name in names
    ]
