"""Constraints on an answer, under OpenAI's names and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxis.server.protocol.base import LenientModel, StrictModel

MAX_CHOICES = 4096
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(StrictModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A schema with its name.

    Attributes:
      name, description: Accepted without effect: the model does not see them.
      schema_: What the answer follows; None is any JSON object.
      strict: Accepted without effect: answers always follow the schema.
    """

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputsParams(StrictModel):
    """vLLM's field: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class StructuredFields(LenientModel):
    """Constraints that both completion endpoints accept: at most one of these.

    Attributes:
      response_format: OpenAI's field.
      structured_outputs: vLLM's.
      guided_json, guided_regex, guided_choice, guided_grammar: Older names of the same.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
