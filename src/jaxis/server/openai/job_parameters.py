"""Translation of fields that OpenAI's endpoints share: to sampling parameters, and to a grammar of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.openai.fields import (
    EngineRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuredFields,
    StructuredOutputsParams,
)

# vLLM's names, in `structured_outputs` and after "guided_".
_KINDS = {"json_": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = {f"guided_{name.rstrip('_')}": kind for name, kind in _KINDS.items()}


def sampling_settings(request: SamplingFields) -> dict[str, Any]:
    """Returns a request's parameters by their names in SamplingParams; None for missing ones.

    Raises RequestError if a key of logit_bias is not a token id.
    """
    settings = {name: getattr(request, name) for name in SamplingFields.model_fields}
    if request.logit_bias is not None:
        settings["logit_bias"] = bias_by_token(request.logit_bias)
    if isinstance(request, EngineRequest) and request.kv_transfer_params:
        settings["extra_args"] = {"kv_transfer_params": request.kv_transfer_params}
    return settings


def bias_by_token(given: Mapping[str, float]) -> dict[int, float]:
    """Returns a request's logit_bias by token id. Raises RequestError if a key is not one."""
    return {_bias_token_id(key): bias for key, bias in given.items()}


def token_limit(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """Returns the limit of an answer's tokens, which has two names. Raises RequestError if they differ."""
    if max_tokens is not None and max_completion_tokens not in (None, max_tokens):
        raise RequestError("and max_completion_tokens are the same limit and differ: send only one", param="max_tokens")
    return max_tokens if max_completion_tokens is None else max_completion_tokens


def check_stream_options(request: GenerationRequest) -> None:
    """Raises RequestError if stream_options are given without stream=true."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("needs stream=true: add it, or leave the options out", param="stream_options")


def answer_grammar(request: StructuredFields) -> AnswerGrammar | None:
    """Returns the constraint on a request's answer; None for a free answer.

    Raises RequestError if the request has two constraints, or an invalid one.
    """
    constraints: dict[str, dict[str, Any]] = {}
    given = request.response_format
    if isinstance(given, JsonSchemaFormat) and given.json_schema.schema_ is not None:
        constraints["response_format.json_schema.schema"] = {"json_schema": given.json_schema.schema_}
    elif isinstance(given, JsonObjectFormat) and given.schema_ is not None:
        constraints["response_format.schema"] = {"json_schema": given.schema_}
    elif isinstance(given, JsonObjectFormat | JsonSchemaFormat):
        constraints["response_format"] = {"json_object": True}
    if request.structured_outputs is not None:
        constraints["structured_outputs"] = _kinds(request.structured_outputs)
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            constraints[name] = {kind: value}
    if len(constraints) > 1:
        first, second, *_ = constraints
        raise RequestError(f"constrains the answer, and so does {first}: send only one", param=second)
    return next((AnswerGrammar.of(field, **constraint) for field, constraint in constraints.items()), None)


def structured_grammar(field: str, given: StructuredOutputsParams) -> AnswerGrammar:
    """Returns the grammar of vLLM's `structured_outputs`.

    Raises RequestError if there is not exactly one constraint, or it is invalid.
    """
    return AnswerGrammar.of(field, **_kinds(given))


def _kinds(given: StructuredOutputsParams) -> dict[str, Any]:
    kinds = {kind: value for name, kind in _KINDS.items() if (value := getattr(given, name)) is not None}
    return kinds | ({"json_object": True} if given.json_object else {})


def _bias_token_id(key: str) -> int:
    # No leading zeros, since "7" and "07" would be one token with two biases.
    if not (key.isascii() and key.isdecimal() and len(key) < 12 and key == str(int(key))):
        raise RequestError(f"has the key {key[:40]!r}: keys are token ids such as '42'", param="logit_bias")
    return int(key)
