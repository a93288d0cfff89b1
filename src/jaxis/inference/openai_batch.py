"""Runs OpenAI batch files: one request per line in, one response per line out.

The server's own code reads the bodies and writes the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from jaxis.engine.grammar.delayed_grammar import Grammar
from jaxis.errors import RequestError
from jaxis.inference.batch import RowFailure
from jaxis.inference.run import with_row_seed
from jaxis.inference.source import Row
from jaxis.llm import LLM
from jaxis.outputs import RequestOutput
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.server.endpoints.chat import ChatCompletion
from jaxis.server.endpoints.completions import TextCompletion
from jaxis.server.endpoints.ignored_fields import IgnoredFields
from jaxis.server.endpoints.responses import ResponseRun
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.http.errors import ModelNotFoundError, api_error
from jaxis.server.protocol.chat import ChatCompletionRequest
from jaxis.server.protocol.completions import CompletionRequest
from jaxis.server.protocol.responses import ResponseRequest

RequestModel = TypeVar("RequestModel", bound=BaseModel)

CUSTOM_ID = "custom_id"
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
RESPONSES_URL = "/v1/responses"
_LINE_KEYS = {CUSTOM_ID, "method", "url", "body"}
_ENDPOINTS: dict[str, tuple[Any, Any, str]] = {
    CHAT_URL: (ChatCompletionRequest, ChatCompletion, "chatcmpl"),
    COMPLETIONS_URL: (CompletionRequest, TextCompletion, "cmpl"),
    RESPONSES_URL: (ResponseRequest, ResponseRun, "resp"),
}


def served_model(llm: LLM, names: Sequence[str], tool_call_parser: str, reasoning_parser: str) -> ServedModel:
    """The model as requests of a batch see it.

    Args:
      llm: The model.
      names: What requests call it.
      tool_call_parser: As of `jaxis serve`.
      reasoning_parser: The same.
    """
    model_type = llm.engine.vllm_config.model_config.hf_config.get("model_type")
    return ServedModel(
        names=tuple(names),
        tokenizer=llm.tokenizer,
        default_sampling_params=llm.get_default_sampling_params(),
        grammar_compiler=llm.engine.grammar_compiler,
        parsers=ModelParsers.select(llm.tokenizer, model_type, tool=tool_call_parser, reasoning=reasoning_parser),
    )


class BatchTask:
    """Runs the requests of a batch file.

    Args:
      model: The model.
      key: The run's key, from which requests without a seed get one.
    """

    def __init__(self, model: ServedModel, key: str) -> None:
        self._model = model
        self._key = key
        self._ignored_fields = IgnoredFields()

    def prepare(self, row: Row) -> tuple[TokenizedPrompt, SamplingParams, Grammar | None]:
        job = self._work(row).job
        if job.num_prompts > 1:
            raise RequestError(f"prompt holds {job.num_prompts} prompts: give each a line of its own in a batch")
        [prompt] = job.preprocess()
        grammar = job.compile_grammar(prompt) if job.compile_grammar else None
        return prompt, with_row_seed(job.params, self._key, row), grammar

    def answer(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        work = self._work(row)
        response = work.response([output]) if isinstance(work, TextCompletion) else work.response(output)
        return _line(row, 200, response.model_dump(mode="json"), None)

    def failure(self, row: Row, failure: RowFailure) -> dict[str, Any]:
        kind = "server_error" if failure.retryable or failure.type == "EngineError" else "invalid_request_error"
        error = {"message": failure.message, "type": kind, "param": None, "code": None}
        status = 500 if kind == "server_error" else 400
        return _line(row, status, {"error": error}, {"code": kind, "message": failure.message})

    def _work(self, row: Row) -> ChatCompletion | TextCompletion | ResponseRun:
        """The row's request, checked."""
        line = row.value
        if unknown := sorted(set(line) - _LINE_KEYS):
            raise RequestError(f"the row has the unknown key {unknown[0]!r}; known: {', '.join(sorted(_LINE_KEYS))}")
        if not isinstance(line.get(CUSTOM_ID), str) or not isinstance(line.get("body"), Mapping):
            raise RequestError('the row needs a "custom_id", a string, and a "body", an object')
        if line.get("method", "POST") != "POST":
            raise RequestError(f"method={line['method']!r} must be POST")
        url = line.get("url")
        if not isinstance(url, str) or url not in _ENDPOINTS:
            raise RequestError(f"url={url!r} must be one of {', '.join(_ENDPOINTS)}")
        request_model, work, prefix = _ENDPOINTS[url]
        request = _read(request_model, line["body"])
        self._ignored_fields.check(request)
        if request.stream:
            raise RequestError("stream=true is not supported in a batch: leave it out")
        if request.priority:
            raise RequestError("priority is not supported in a batch, which runs in its order: leave it out")
        try:
            return work(request, self._model, f"{prefix}-{row.id}")
        except ModelNotFoundError as error:
            raise RequestError(f"{error}; give it another name with --served-model-name, or leave it out") from None


def _read(request_model: type[RequestModel], body: Mapping[str, Any]) -> RequestModel:
    try:
        return request_model.model_validate(body)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestError(api_error(RequestValidationError(faults)).message) from None


def _line(row: Row, status_code: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    custom_id = row.value.get(CUSTOM_ID)
    return {
        "id": f"batch_req_{row.index}",
        CUSTOM_ID: custom_id if isinstance(custom_id, str) else None,
        "response": {"status_code": status_code, "request_id": f"req_{row.index}", "body": body},
        "error": error,
    }
