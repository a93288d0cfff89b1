"""A request in OpenAI's form, read from JSON: every parameter is applied, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxis.errors import RequestError
from jaxis.inference.conversation import Message
from jaxis.inference.sampling import RESERVED_TEMPLATE_ARGUMENTS, to_logit_bias
from jaxis.sampling_params import SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

# Under the same name in SamplingParams.
_SAMPLING = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
]
_COMMON = {*_SAMPLING, "model", "max_tokens", "logit_bias", "logprobs"}
# They name the caller or tune a service's billing and storage; nothing about the answer.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_CHAT = {
    *_COMMON,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
}
_COMPLETIONS = {*_COMMON, "prompt"}
# What a client may send although it says nothing.
_DEFAULTS = {
    "stream": False,
    "stream_options": None,
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "echo": False,
    "suffix": None,
    "best_of": 1,
}


@dataclass(frozen=True)
class BatchRequest:
    """What a request asks for.

    Attributes:
      url: `CHAT_URL` or `COMPLETIONS_URL`.
      model: The model that it names, or None.
      sampling: Fields of SamplingParams that it sets.
      messages: Of a chat, as chat templates take them.
      template_arguments: Further arguments of rendering them.
      prompt: Of a completion: text or token ids.
    """

    url: str
    model: str | None
    sampling: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    template_arguments: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[int] = ""

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The checkpoint's recommendation with what the request sets.

        Raises:
          RequestError: A value is out of range.
        """
        max_tokens = None if self.url == CHAT_URL else SamplingParams().max_tokens
        return replace(defaults, **{"max_tokens": max_tokens, **self.sampling})


def parse_request(url: object, body: Mapping[str, Any]) -> BatchRequest:
    """Reads a request.

    Raises:
      RequestError: Another URL, or a parameter that cannot be honoured.
    """
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RequestError(f"url={url!r} must be {CHAT_URL} or {COMPLETIONS_URL}")
    known = _CHAT if url == CHAT_URL else _COMPLETIONS
    given = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                given[name] = value
        elif name in _DEFAULTS:
            if value is not None and value != _DEFAULTS[name]:
                raise RequestError(f"body.{name}={value!r} is not supported in a batch: leave it out")
        elif name not in _WITHOUT_EFFECT:
            raise RequestError(f"body.{name} is no parameter that jaxis knows: leave it out")
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise RequestError(f"body.model={model!r} must be a string")
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    if "max_tokens" in given:
        sampling["max_tokens"] = given["max_tokens"]
    if "logit_bias" in given:
        sampling["logit_bias"] = to_logit_bias(given["logit_bias"])
    if url == COMPLETIONS_URL:
        return BatchRequest(url, model, sampling | _completion_logprobs(given), prompt=_prompt(given.get("prompt")))
    if "max_completion_tokens" in given:
        sampling["max_tokens"] = given["max_completion_tokens"]
    sampling |= _chat_logprobs(given)
    messages = given.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError('body.messages must be a list of {"role", "content"}')
    parsed = [Message.from_dict(message, f"body.messages[{i}]").for_template() for i, message in enumerate(messages)]
    return BatchRequest(url, model, sampling, parsed, _template_arguments(given))


def _template_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = given.get("chat_template_kwargs", {})
    if not isinstance(kwargs, Mapping):
        raise RequestError("body.chat_template_kwargs must be an object")
    if taken := sorted(RESERVED_TEMPLATE_ARGUMENTS & set(kwargs)):
        raise RequestError(f"body.chat_template_kwargs holds {taken[0]!r}, which is no variable of a template's own")
    arguments = dict(kwargs)
    for name in ("reasoning_effort", "add_generation_prompt", "continue_final_message"):
        if name in given:
            arguments[name] = given[name]
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(f"body.tool_choice={choice!r} is not supported in a batch: use auto or none")
    if "tools" in given and choice == "auto":
        arguments["tools"] = given["tools"]
    return arguments


def _chat_logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise RequestError(f"body.logprobs={wanted!r} must be true or false")
    if top is not None and not wanted:
        raise RequestError("body.top_logprobs needs logprobs=true")
    return {"logprobs": top or 0} if wanted else {}


def _completion_logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": given["logprobs"]} if "logprobs" in given else {}


def _prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        return _prompt(prompt[0])
    raise RequestError("body.prompt must be one text, or one list of token ids; give several prompts a row each")
