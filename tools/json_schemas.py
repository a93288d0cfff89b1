"""Writes src/jaxis/cli/schemas: JSON Schemas of what commands print with --json, from their dataclasses."""

from __future__ import annotations

import dataclasses
import json
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
from jaxis.bringup.verify.verify import VerifyResult, WrongPart
from jaxis.calibration.evaluate import Evaluation
from jaxis.cli.quantize import QuantizedFiles
from jaxis.compilation.accelerators import Accelerator
from jaxis.doctor.examination import SCHEMA as DOCTOR_SCHEMA
from jaxis.doctor.examination import Examination
from jaxis.planning.layout import Layout
from jaxis.planning.local_plan import SCHEMA as LOCAL_PLAN_SCHEMA
from jaxis.planning.local_plan import LocalPlan
from jaxis.planning.plan import PlanOption, Step
from jaxis.planning.plan_summary import SCHEMA as PLAN_SCHEMA
from jaxis.planning.roofline import Bound, StepCost
from jaxis.training.memory_plan import SCHEMA as PLAN_TRAIN_SCHEMA
from jaxis.training.memory_plan import TrainingMemory
from jaxis.training.trainer import CheckedRun

FOLDER = Path(__file__).parents[1] / "src" / "jaxis" / "cli" / "schemas"
Schema = dict[str, Any]
STRING, BOOLEAN, INTEGER, NUMBER = ({"type": name} for name in ("string", "boolean", "integer", "number"))
STRINGS: Schema = {"type": "array", "items": STRING}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
CODES = ("checkpoint", "config", "internal", "interrupted", "other", "request", "usage")
ERROR = {
    "type": "object",
    "properties": {
        "code": {"enum": list(CODES)},
        "keys": STRINGS,
        "message": STRING,
    },
    "required": ["code", "keys", "message"],
    "additionalProperties": False,
}
REPORT: Schema = {"model": STRING, "made_at": STRING, "machine": {}, "passed": BOOLEAN}
REPORT |= {"checklist": OBJECTS, "analysis": {"type": "object"}, "verifications": OBJECTS, "conversions": OBJECTS}


def schemas() -> dict[str, str]:
    """Returns the text of each schema by the name of its file."""
    verified, fits = ("verified", "differs"), ("fits", "does_not_fit")
    found = {
        "analyze": _schema(ANALYZE_SCHEMA, ("can_run", "cannot_run"), _object(Analysis, can_run=BOOLEAN, fits=BOOLEAN)),
        "plan": _schema(PLAN_SCHEMA, (*fits, "fits_some"), _plan()),
        "plan-this": _schema(LOCAL_PLAN_SCHEMA, fits, _object(LocalPlan)),
        "plan-train": _schema(PLAN_TRAIN_SCHEMA, fits, _training_plan()),
        "verify": _schema(
            VERIFY_SCHEMA,
            verified,
            _object(
                VerifyResult, passed=BOOLEAN, failing_checks=STRINGS, findings=_array(_object(WrongPart)), notes=STRINGS
            ),
        ),
        "verify-against": _schema(AGAINST_SCHEMA, verified, _object(AgainstResult)),
        "new-model": _schema(1, ("written",), _object(CopiedModel)),
        "convert": _schema(1, ("converted",), _object(Conversion, destination=STRING)),
        "quantize": _schema(1, ("written", "evaluated"), _either(written=QuantizedFiles, evaluation=Evaluation)),
        "train": _schema(1, ("ready",), _object(CheckedRun)),
        "doctor": _schema(DOCTOR_SCHEMA, ("passed", "failed"), _object(Examination, passed=BOOLEAN)),
        "report": _schema(1, ("passed", "failed"), _object(**REPORT)),
    }
    return {name: json.dumps(schema, indent=2) + "\n" for name, schema in found.items()}


def _object(*printed: type, **more: Schema) -> Schema:
    """Describes an object with the fields of dataclasses and further ones."""
    properties: Schema = {}
    definitions: Schema = {}
    for each in printed:
        described = TypeAdapter(each).json_schema(mode="serialization")
        properties |= described["properties"]
        definitions |= described.get("$defs", {})
    properties |= more
    return {"type": "object", "properties": properties, "required": list(properties), "$defs": definitions}


def _either(**printed: type) -> Schema:
    return _object(**{name: {"anyOf": [_object(each), {"type": "null"}]} for name, each in printed.items()})


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _plan() -> Schema:
    step = _object(Step, StepCost, Bound, sent_bytes=NUMBER, binds=STRING)
    option = _object(PlanOption, Layout, fits=BOOLEAN, steps=_array(step))
    for described, name in ((step, "cost"), (step, "bound"), (option, "layout")):  # whose fields are the object's
        del described["properties"][name]
        described["required"].remove(name)
    plan = {"target": _object(Accelerator, num_devices=INTEGER), "options": _array(option)}
    plan |= {"context_len": INTEGER, "max_model_len": INTEGER, "prefill_tokens": INTEGER}
    plan |= {"fits": BOOLEAN, "verdict": STRING}
    return _object(model=STRING, architectures=STRINGS, plans=_array(_object(**plan)))


def _training_plan() -> Schema:
    names = {field.name for field in dataclasses.fields(TrainingMemory)} - {"num_devices"} | {"total", "available"}
    sizes = {f"{name}_bytes": INTEGER for name in sorted(names)}
    device = _object(devices=STRING, num_devices=INTEGER, fits=BOOLEAN, **sizes)
    return _object(row_tokens=INTEGER, rows=INTEGER, training=_array(device))


def _schema(version: int, statuses: tuple[str, ...], answer: Schema) -> Schema:
    """Describes a command's answer, or its error, with the definitions of all parts in one place."""
    ok = _object(schema={"const": version}, status={"enum": list(statuses)}, **answer["properties"])
    failed = _object(schema={"const": version}, status={"const": "error"}, error=ERROR) | {
        "additionalProperties": False
    }
    definitions: Schema = {}
    either = _collected([ok | {"$defs": answer["$defs"]}, failed], definitions)
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": either}
    return found | ({"$defs": dict(sorted(definitions.items()))} if definitions else {})


def _collected(described: Any, definitions: Schema) -> Any:
    """Returns a schema whose `$defs` are moved into `definitions`, and whose numbers may be the words of infinity."""
    if isinstance(described, list):
        return [_collected(each, definitions) for each in described]
    if not isinstance(described, dict):
        return described
    for name, each in described.get("$defs", {}).items():
        definitions[name] = _collected(each, definitions)
    found = {name: _collected(each, definitions) for name, each in described.items() if name != "$defs"}
    return found | {"type": ["number", "string"]} if found.get("type") == "number" else found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
