"""OpenAI batch files: one request per line in, one response per line out.

The server's own code reads the bodies and writes the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from jaxis.engine.grammar.matcher import Grammar
from jaxis.errors import RequestError
from jaxis.inference.batch import RowFailure
from jaxis.inference.run import with_row_seed
from jaxis.jsonl.source import Row
from jaxis.llm import LLM
from jaxis.outputs import RequestOutput
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.errors import OPENAI_ERRORS, ErrorDialect, ModelNotFoundError, api_error
from jaxis.server.http.ignored_fields import IgnoredFields
from jaxis.server.openai.chat_answer import ChatAnswer
from jaxis.server.openai.chat_job import chat_job
from jaxis.server.openai.chat_schema import ChatCompletionRequest
from jaxis.server.openai.completions import CompletionAnswer, CompletionRequest, completion_job
from jaxis.server.openai.response_answer import ResponseAnswer
from jaxis.server.openai.response_errors import RESPONSE_ERRORS
from jaxis.server.openai.response_job import response_job
from jaxis.server.openai.response_schema import ResponseRequest
from jaxis.server.respond import AnswerWriter

RequestModel = TypeVar("RequestModel", bound=BaseModel)

CUSTOM_ID = "custom_id"
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
RESPONSES_URL = "/v1/responses"
_LINE_KEYS = {CUSTOM_ID, "method", "url", "body"}


class _Endpoint(NamedTuple):
    """Classes and functions that read and answer the requests of a URL."""

    request_model: type[Any]
    job: Callable[[Any, ServedModel], GenerationJob]
    writer: Callable[[Any, GenerationJob], AnswerWriter]
    errors: ErrorDialect = OPENAI_ERRORS


_ENDPOINTS = {
    CHAT_URL: _Endpoint(ChatCompletionRequest, chat_job, ChatAnswer),
    COMPLETIONS_URL: _Endpoint(CompletionRequest, completion_job, CompletionAnswer),
    RESPONSES_URL: _Endpoint(ResponseRequest, response_job, ResponseAnswer, RESPONSE_ERRORS),
}


def served_model(llm: LLM, names: Sequence[str], tool_call_parser: str, reasoning_parser: str) -> ServedModel:
    """Returns the model as requests of a batch see it, with parsers as for `jaxis serve`."""
    model_type = llm.engine.vllm_config.model_config.hf_config.get("model_type")
    return ServedModel(
        names=tuple(names),
        tokenizer=llm.tokenizer,
        default_sampling_params=llm.get_default_sampling_params(),
        grammar_compiler=llm.engine.grammar_compiler,
        parsers=ModelParsers.select(llm.tokenizer, model_type, tool=tool_call_parser, reasoning=reasoning_parser),
        images=llm.images,
    )


class BatchTask:
    """Runs the requests of a batch file; requests without a seed get one from the run's `key`."""

    def __init__(self, model: ServedModel, key: str) -> None:
        self._model = model
        self._key = key
        self._ignored_fields = IgnoredFields()

    def prepare(self, row: Row) -> tuple[TokenizedPrompt, SamplingParams, Grammar | None]:
        endpoint, request = self._request(row)
        try:
            job = self._job(endpoint, request)
            if job.prompts.num_prompts > 1:
                raise RequestError(
                    f"holds {job.prompts.num_prompts} prompts: give each a line of its own in a batch", param="prompt"
                )
            [prompt] = job.tokenize()
            grammar = job.compile_grammar(prompt)
            return prompt, with_row_seed(job.params_with(grammar), self._key, row), grammar
        except RequestError as error:
            raise endpoint.errors.own(error) from None

    def answer(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        endpoint, request = self._request(row)
        writer = endpoint.writer(request, self._job(endpoint, request))
        # Nobody watched the answer's tokens arrive, so a file's rows have no timings.
        return _line(row, 200, writer.whole([output]).model_dump(mode="json", exclude={"timings"}), None)

    def failure(self, row: Row, failure: RowFailure) -> dict[str, Any]:
        kind = "server_error" if failure.retryable or failure.type == "EngineError" else "invalid_request_error"
        error = {"message": failure.message, "type": kind, "param": None, "code": None}
        status = 500 if kind == "server_error" else 400
        return _line(row, status, {"error": error}, {"code": kind, "message": failure.message})

    def _request(self, row: Row) -> tuple[_Endpoint, Any]:
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
        endpoint = _ENDPOINTS[url]
        request = _read(endpoint.request_model, line["body"])
        self._ignored_fields.check(request)
        if request.stream:
            raise RequestError("stream=true is not supported in a batch: leave it out")
        if request.priority:
            raise RequestError("priority is not supported in a batch, which runs in its order: leave it out")
        return endpoint, request

    def _job(self, endpoint: _Endpoint, request: Any) -> GenerationJob:
        try:
            return endpoint.job(request, self._model)
        except ModelNotFoundError as error:
            raise RequestError(f"{error}; give it another name with --served-model-name, or leave it out") from None


def _read(request_model: type[RequestModel], body: Mapping[str, Any]) -> RequestModel:
    try:
        return request_model.model_validate(body)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestError(api_error(RequestValidationError(faults, body=body)).message) from None


def _line(row: Row, status_code: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    custom_id = row.value.get(CUSTOM_ID)
    return {
        "id": f"batch_req_{row.index}",
        CUSTOM_ID: custom_id if isinstance(custom_id, str) else None,
        "response": {"status_code": status_code, "request_id": f"req_{row.index}", "body": body},
        "error": error,
    }
