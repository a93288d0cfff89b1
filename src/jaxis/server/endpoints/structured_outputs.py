"""From the fields that say an answer's form to StructuredOutputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxis.errors import RequestError
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredFields
from jaxis.structured_outputs import KINDS, StructuredOutputs

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarCompiler

# vLLM's names, in its structured_outputs and after "guided_".
_KINDS = {"json_": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = {f"guided_{name.rstrip('_')}": kind for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
      field: The request's field that says it, such as "response_format.json_schema.schema".
      structured_outputs: What it says.
    """

    field: str
    structured_outputs: StructuredOutputs

    @classmethod
    def of(cls, field: str, settings: Mapping[str, Any]) -> AnswerForm:
        """A form from arguments of StructuredOutputs.

        Raises:
          ParameterError: They are none.
        """
        try:
            return cls(field, StructuredOutputs(**settings))
        except RequestError as error:
            raise _field_error(field, error) from None

    @property
    def param(self) -> str:
        """The field at the top of the request."""
        return self.field.partition(".")[0]

    def compile(self, compiler: GrammarCompiler) -> CompiledGrammar:
        """The form compiled, which may take seconds.

        Raises:
          ParameterError: It cannot be honoured.
        """
        try:
            return compiler.compile(self.structured_outputs)
        except RequestError as error:
            raise _field_error(self.field, error) from None


def answer_form(request: StructuredFields) -> AnswerForm | None:
    """The form that a request asks for; None leaves the answer free.

    Raises:
      ParameterError: Two fields say one, or what one says is none.
    """
    forms = _forms(request)
    if len(forms) > 1:
        raise ParameterError(list(forms)[1], f"{' and '.join(forms)} both say the form of the answer: send only one")
    return next((AnswerForm.of(field, settings) for field, settings in forms.items()), None)


def _forms(request: StructuredFields) -> dict[str, dict[str, Any]]:
    """Each field that says a form, with arguments of StructuredOutputs."""
    forms = _response_format(request.response_format)
    if (given := request.structured_outputs) is not None:
        settings = {kind: value for name, kind in _KINDS.items() if (value := getattr(given, name)) is not None}
        forms["structured_outputs"] = settings | ({"json_object": True} if given.json_object else {})
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            forms[name] = {kind: value}
    return forms


def _response_format(response_format: ResponseFormat | None) -> dict[str, dict[str, Any]]:
    if isinstance(response_format, JsonSchemaFormat) and response_format.json_schema.schema_ is not None:
        return {"response_format.json_schema.schema": {"json_schema": response_format.json_schema.schema_}}
    if isinstance(response_format, JsonObjectFormat | JsonSchemaFormat):
        return {"response_format": {"json_object": True}}
    return {}


def _field_error(field: str, error: RequestError) -> ParameterError:
    """An error about StructuredOutputs under the name of the request's field."""
    message = str(error)
    own_name = next((name for kind in KINDS if message.startswith(name := f"structured_outputs.{kind}")), None)
    message = f"{field}: {message}" if own_name is None else field + message.removeprefix(own_name)
    return ParameterError(field.partition(".")[0], message)
