"""OpenAI's batch files: a request a line in, a response a line out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxis.errors import RequestError
from jaxis.inference.batch import RowFailure
from jaxis.inference.openai_request import COMPLETIONS_URL, BatchRequest, parse_request
from jaxis.inference.run import with_row_seed
from jaxis.inference.source import Row
from jaxis.llm import LLM
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.prompts import TokenizedPrompt, tokenize_chat, tokenize_prompt
from jaxis.sampling_params import SamplingParams

CUSTOM_ID = "custom_id"
# Of a token that cannot be: JSON has no infinity.
_LEAST_LOGPROB = -9999.0
_LINE_KEYS = {CUSTOM_ID, "method", "url", "body"}


class BatchTask:
    """Runs the requests of a batch file.

    Args:
      llm: The model.
      served_model_names: What a request's "model" may be.
      key: The run's, from which requests without a seed get one.
    """

    def __init__(self, llm: LLM, served_model_names: list[str], key: str) -> None:
        self._tokenizer = llm.tokenizer
        self._defaults = llm.get_default_sampling_params()
        self._served_model_names = served_model_names
        self._key = key

    def prepare(self, row: Row) -> tuple[TokenizedPrompt, SamplingParams]:
        request = self._request(row)
        params = with_row_seed(request.sampling_params(self._defaults), self._key, row)
        if request.url == COMPLETIONS_URL:
            return tokenize_prompt(request.prompt, self._tokenizer, "body.prompt"), params
        return tokenize_chat(request.messages, self._tokenizer, **request.template_arguments), params

    def answer(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        request = self._request(row)
        num_prompt_tokens = len(output.prompt_token_ids)
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        is_chat = request.url != COMPLETIONS_URL
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [
                _chat_choice(completion, request.sampling.get("logprobs", 0)) if is_chat else _text_choice(completion)
                for completion in output.outputs
            ],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt_tokens + num_tokens,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
            },
        }
        return _line(row, 200, body, None)

    def failure(self, row: Row, failure: RowFailure) -> dict[str, Any]:
        kind = "server_error" if failure.retryable or failure.type == "EngineError" else "invalid_request_error"
        error = {"message": failure.message, "type": kind, "param": None, "code": None}
        status = 500 if kind == "server_error" else 400
        return _line(row, status, {"error": error}, {"code": kind, "message": failure.message})

    def _request(self, row: Row) -> BatchRequest:
        line = row.value
        if unknown := sorted(set(line) - _LINE_KEYS):
            raise RequestError(f"the row has the unknown key {unknown[0]!r}; known: {', '.join(sorted(_LINE_KEYS))}")
        if not isinstance(line.get(CUSTOM_ID), str) or not isinstance(line.get("body"), Mapping):
            raise RequestError('the row needs a "custom_id", a string, and a "body", an object')
        if line.get("method", "POST") != "POST":
            raise RequestError(f"method={line['method']!r} must be POST")
        request = parse_request(line.get("url"), line["body"])
        if request.model is None:
            return replace(request, model=self._served_model_names[0])
        if request.model not in self._served_model_names:
            raise RequestError(
                f"body.model={request.model!r} is not the model that runs ({', '.join(self._served_model_names)}): "
                "name it so with --served-model-name, or leave it out"
            )
        return request


def _line(row: Row, status_code: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    custom_id = row.value.get(CUSTOM_ID)
    return {
        "id": f"batch_req_{row.index}",
        CUSTOM_ID: custom_id if isinstance(custom_id, str) else None,
        "response": {"status_code": status_code, "request_id": f"req_{row.index}", "body": body},
        "error": error,
    }


def _chat_choice(completion: CompletionOutput, num_top: int) -> dict[str, Any]:
    logprobs = None
    if completion.logprobs is not None:
        logprobs = {
            "content": [_token_logprobs(position, num_top) for position in completion.logprobs],
            "refusal": None,
        }
    return {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text},
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _text_choice(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if completion.logprobs is not None:
        # The sampled token stands first in each position.
        sampled = [next(iter(position.values())) for position in completion.logprobs]
        offsets = [0]
        for token in sampled:
            offsets.append(offsets[-1] + len(token.decoded_token or ""))
        logprobs = {
            "tokens": [token.decoded_token for token in sampled],
            "token_logprobs": [_finite(token) for token in sampled],
            "top_logprobs": [
                {token.decoded_token: _finite(token) for token in position.values()} for position in completion.logprobs
            ],
            "text_offset": offsets[:-1],
        }
    return {
        "index": completion.index,
        "text": completion.text,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _token_logprobs(position: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    def entry(token: Logprob) -> dict[str, Any]:
        text = token.decoded_token or ""
        return {"token": text, "logprob": _finite(token), "bytes": list(text.encode("utf-8", "replace"))}

    tokens = list(position.values())
    by_rank = sorted(tokens, key=lambda token: token.rank)
    return {**entry(tokens[0]), "top_logprobs": [entry(token) for token in by_rank[:num_top]]}


def _finite(token: Logprob) -> float:
    return max(token.logprob, _LEAST_LOGPROB)
