"""Converts a request's fields to SamplingParams."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxis.sampling_params import SamplingParams
from jaxis.server.endpoints.chat_tools import ChatTools
from jaxis.server.endpoints.structured_outputs import AnswerGrammar, answer_grammar
from jaxis.server.http.errors import ParameterError
from jaxis.server.protocol.base import GenerationRequest, SamplingFields
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.completions import CompletionRequest

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


def chat_sampling_params(
    request: ChatCompletionRequest, defaults: SamplingParams, tools: ChatTools
) -> tuple[SamplingParams, AnswerGrammar | None]:
    """A chat request's parameters over the model's defaults, and the answer's grammar; None if it is free.

    Raises:
      RequestError: It cannot be honoured; the field is named.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise ParameterError("top_logprobs", "top_logprobs needs logprobs=true: add it")
    more: dict[str, Any] = {"max_tokens": _max_tokens(request)}
    if request.logprobs:
        more["logprobs"] = request.top_logprobs or 0
    if request.prediction is not None:
        more["prediction"] = request.prediction.text
    grammar = answer_grammar(request)
    if grammar is not None and tools.grammar is not None:
        raise ParameterError(
            grammar.param, f"{grammar.field} leaves no room for the call that tool_choice demands: send only one"
        )
    grammar = grammar or tools.grammar
    return _sampling_params(request, defaults, more, grammar), grammar


def completion_sampling_params(
    request: CompletionRequest, defaults: SamplingParams
) -> tuple[SamplingParams, AnswerGrammar | None]:
    """The same for a completion request.

    Raises:
      RequestError: It cannot be honoured; the field is named.
    """
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ParameterError("best_of", f"best_of={request.best_of} is not supported: leave it out, and choose from n")
    max_tokens = _max_tokens(request)
    if max_tokens == 0 and not request.echo:
        raise ParameterError("max_tokens", "max_tokens=0 generates nothing: send at least 1, or echo=true")
    max_tokens = COMPLETION_MAX_TOKENS if max_tokens is None else max(1, max_tokens)
    more: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": request.logprobs}
    if request.prediction is not None:
        more["prediction"] = request.prediction.text
    if request.echo and request.logprobs is not None:
        more["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    grammar = answer_grammar(request)
    return _sampling_params(request, defaults, more, grammar), grammar


def check_stream_options(request: GenerationRequest) -> None:
    """Raises RequestError if stream_options are given without stream=true."""
    if request.stream_options is not None and not request.stream:
        raise ParameterError("stream_options", "stream_options needs stream=true: add it, or leave the options out")


def _max_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise ParameterError(
            "max_tokens", "max_tokens and max_completion_tokens are the same limit and differ: send only one"
        )
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _sampling_params(
    request: SamplingFields, defaults: SamplingParams, more: dict[str, Any], grammar: AnswerGrammar | None
) -> SamplingParams:
    settings = {name: getattr(request, name) for name in SamplingFields.model_fields}
    if request.logit_bias is not None:
        settings["logit_bias"] = {_bias_token_id(key): bias for key, bias in request.logit_bias.items()}
    _check_stops([request.stop] if isinstance(request.stop, str) else request.stop or [])
    transfer = request.kv_transfer_params if isinstance(request, GenerationRequest) else None
    if transfer:
        settings["extra_args"] = {"kv_transfer_params": transfer}
    settings = {name: value for name, value in (settings | more).items() if value is not None}
    min_tokens, max_tokens = settings.get("min_tokens", defaults.min_tokens), settings.get("max_tokens")
    # The request's limit overrides the model's default, and a proxy's for a prefill the client's own.
    is_prefill = transfer is not None and transfer.get("do_remote_decode") is True
    if max_tokens is not None and ("min_tokens" not in settings or is_prefill):
        settings["min_tokens"] = min(min_tokens, max_tokens)
    if grammar is not None:
        settings["structured_outputs"] = grammar.structured_outputs
    return dataclasses.replace(defaults, **settings)


def _bias_token_id(key: str) -> int:
    # No leading zeros: "7" and "07" would be one token with two biases.
    if not (key.isascii() and key.isdecimal() and len(key) < 12 and key == str(int(key))):
        raise ParameterError("logit_bias", f"logit_bias has the key {key[:40]!r}: keys are token ids such as '42'")
    return int(key)


def _check_stops(stops: list[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise ParameterError("stop", f"stop holds {len(stops)} strings: send at most {MAX_STOPS}")
    if any(not stop for stop in stops):
        raise ParameterError("stop", "stop holds an empty string: leave it out")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise ParameterError("stop", f"stop holds a string of more than {MAX_STOP_CHARACTERS} characters: shorten it")
