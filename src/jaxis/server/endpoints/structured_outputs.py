"""Converts the request's fields that constrain an answer to StructuredOutputs."""

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
class AnswerGrammar:
    """What an answer must match.

    Attributes:
      field: The request's field that gives it, such as "response_format.json_schema.schema".
      structured_outputs: The constraint that it specifies.
    """

    field: str
    structured_outputs: StructuredOutputs

    @classmethod
    def of(cls, field: str, settings: Mapping[str, Any]) -> AnswerGrammar:
        """Builds one from arguments of StructuredOutputs.

        Raises:
          ParameterError: The arguments are invalid.
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
        """Compiles the grammar, which may take seconds.

        Raises:
          ParameterError: It cannot be honoured.
        """
        try:
            return compiler.compile(self.structured_outputs)
        except RequestError as error:
            raise _field_error(self.field, error) from None


def answer_grammar(request: StructuredFields) -> AnswerGrammar | None:
    """What the request constrains its answer to; None leaves the answer free.

    Raises:
      ParameterError: Two fields constrain it, or the one that does is invalid.
    """
    grammars = _grammars(request)
    if len(grammars) > 1:
        fields = " and ".join(grammars)
        raise ParameterError(list(grammars)[1], f"{fields} both constrain the format of the answer: send only one")
    return next((AnswerGrammar.of(field, settings) for field, settings in grammars.items()), None)


def _grammars(request: StructuredFields) -> dict[str, dict[str, Any]]:
    """Each field that constrains the answer -> arguments of StructuredOutputs."""
    grammars = _response_format(request.response_format)
    if (given := request.structured_outputs) is not None:
        settings = {kind: value for name, kind in _KINDS.items() if (value := getattr(given, name)) is not None}
        grammars["structured_outputs"] = settings | ({"json_object": True} if given.json_object else {})
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            grammars[name] = {kind: value}
    return grammars


def _response_format(response_format: ResponseFormat | None) -> dict[str, dict[str, Any]]:
    if isinstance(response_format, JsonSchemaFormat) and response_format.json_schema.schema_ is not None:
        return {"response_format.json_schema.schema": {"json_schema": response_format.json_schema.schema_}}
    if isinstance(response_format, JsonObjectFormat | JsonSchemaFormat):
        return {"response_format": {"json_object": True}}
    return {}


def _field_error(field: str, error: RequestError) -> ParameterError:
    """Rephrases an error about StructuredOutputs in terms of the request's field."""
    message = str(error)
    own_name = next((name for kind in KINDS if message.startswith(name := f"structured_outputs.{kind}")), None)
    message = f"{field}: {message}" if own_name is None else field + message.removeprefix(own_name)
    return ParameterError(field.partition(".")[0], message)
