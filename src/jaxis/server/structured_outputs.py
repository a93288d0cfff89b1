"""From the fields that say an answer's form to StructuredOutputs."""

from __future__ import annotations

from typing import Any

from jaxis.errors import RequestError
from jaxis.server.errors import ParameterError
from jaxis.server.protocol.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredFields
from jaxis.structured_outputs import StructuredOutputs

# vLLM's names, in its structured_outputs and after "guided_".
_KINDS = {"json_": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = {f"guided_{name.rstrip('_')}": kind for name, kind in _KINDS.items()}


def structured_outputs(request: StructuredFields) -> tuple[str, StructuredOutputs] | None:
    """The form that a request asks for, and the field that says it; None leaves the answer free.

    Raises:
      ParameterError: Two fields say one, or what one says is no form.
    """
    forms = _forms(request)
    if len(forms) > 1:
        fields = [field for field, _ in forms]
        raise ParameterError(fields[1], f"{' and '.join(fields)} both say the form of the answer: send one of them")
    if not forms:
        return None
    [(field, settings)] = forms
    return field, make_structured_outputs(field, settings)


def make_structured_outputs(field: str, settings: dict[str, Any]) -> StructuredOutputs:
    """StructuredOutputs from a request's field.

    Raises:
      ParameterError: They are no form; the field is named.
    """
    try:
        return StructuredOutputs(**settings)
    except RequestError as error:
        raise field_error(field, error) from None


def field_error(field: str, error: RequestError) -> ParameterError:
    """An error about StructuredOutputs, or about making a grammar of them, with the name of the request's field."""
    message = str(error)
    for kind in ("json_schema", "json_object", "regex", "choice", "grammar"):
        message = message.removeprefix(f"structured_outputs.{kind}")
    if message == str(error):
        message = ": " + message
    return ParameterError(field.partition(".")[0], field + message)


def response_format_settings(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Arguments of StructuredOutputs; None for free text."""
    if isinstance(response_format, JsonSchemaFormat) and response_format.json_schema.schema_ is not None:
        return {"json_schema": response_format.json_schema.schema_}
    return {"json_object": True} if isinstance(response_format, JsonObjectFormat | JsonSchemaFormat) else None


def _forms(request: StructuredFields) -> list[tuple[str, dict[str, Any]]]:
    """Each field that says a form, with arguments of StructuredOutputs."""
    forms = []
    if (settings := response_format_settings(request.response_format)) is not None:
        is_schema = isinstance(request.response_format, JsonSchemaFormat)
        forms.append(("response_format.json_schema.schema" if is_schema else "response_format", settings))
    if (given := request.structured_outputs) is not None:
        settings = {kind: value for name, kind in _KINDS.items() if (value := getattr(given, name)) is not None}
        if given.json_object:
            settings["json_object"] = True
        forms.append(("structured_outputs", settings))
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            forms.append((name, {kind: value}))
    return forms
