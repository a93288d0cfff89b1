"""Writes src/jaxis/cli/schemas: JSON Schemas of what commands print with --json, from their dataclasses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from jaxis.bringup.analyze.analysis import SCHEMA as ANALYZE_SCHEMA
from jaxis.bringup.analyze.analysis import Analysis
from jaxis.bringup.convert.partial_folder import Conversion
from jaxis.bringup.new_model import CopiedModel
from jaxis.bringup.verify.against import SCHEMA as AGAINST_SCHEMA
from jaxis.bringup.verify.against import AgainstResult
from jaxis.bringup.verify.verify import SCHEMA as VERIFY_SCHEMA
from jaxis.bringup.verify.verify import VerifyResult

FOLDER = Path(__file__).parents[1] / "src" / "jaxis" / "cli" / "schemas"
STRINGS = {"type": "array", "items": {"type": "string"}}
OBJECTS = {"type": "array", "items": {"type": "object"}}
BOOLEAN = {"type": "boolean"}
ERROR = {
    "type": "object",
    "properties": {
        "code": {"enum": ["config", "checkpoint", "request", "other"]},
        "keys": STRINGS,
        "message": {"type": "string"},
    },
    "required": ["code", "keys", "message"],
    "additionalProperties": False,
}
REPORT = {"model": {"type": "string"}, "made_at": {"type": "string"}, "machine": {}, "passed": BOOLEAN}
REPORT |= {"checklist": OBJECTS, "analysis": {"type": "object"}, "verifications": OBJECTS, "conversions": OBJECTS}


def schemas() -> dict[str, str]:
    """Returns the text of each schema by the name of its file."""
    verified = ("verified", "differs")
    return {
        "analyze": _schema(ANALYZE_SCHEMA, ("can_run", "cannot_run"), Analysis, {"can_run": BOOLEAN, "fits": BOOLEAN}),
        "verify": _schema(
            VERIFY_SCHEMA, verified, VerifyResult, {"passed": BOOLEAN, "failing_checks": STRINGS, "notes": STRINGS}
        ),
        "verify-against": _schema(AGAINST_SCHEMA, verified, AgainstResult, {}),
        "new-model": _schema(1, ("written",), CopiedModel, {}),
        "convert": _schema(1, ("converted",), Conversion, {"destination": {"type": "string"}}),
        "report": _schema(1, ("passed", "failed"), None, REPORT),
    }


def _schema(version: int, statuses: tuple[str, ...], printed: type | None, more: Mapping[str, Any]) -> str:
    fields = {} if printed is None else TypeAdapter(printed).json_schema(mode="serialization")
    properties = {"schema": {"const": version}, "status": {"enum": list(statuses)}, **more}
    properties |= fields.get("properties", {})
    answer = {"type": "object", "properties": properties, "required": list(properties)}
    error = {"schema": {"const": version}, "status": {"const": "error"}, "error": ERROR}
    failed = {"type": "object", "properties": error, "required": list(error), "additionalProperties": False}
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": [answer, failed]}
    if definitions := fields.get("$defs"):
        found["$defs"] = definitions
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
