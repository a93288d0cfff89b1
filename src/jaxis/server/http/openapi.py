"""The OpenAPI document: FastAPI's, with errors, event streams, and API keys added."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from jaxis.server.http.api_keys import OPEN_PATHS


class ErrorObject(BaseModel):
    """Description of an error; `param` names the request's field that is at fault, if any."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorObject


_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait before trying again", "schema": {"type": "integer"}}}
_STATUSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field that cannot be honoured; `param` names it"},
    401: {"description": "A missing or wrong API key"},
    404: {"description": "Another model, or no such route"},
    408: {"description": "A body that stops coming"},
    413: {"description": "A body that is too large"},
    429: {"description": "The queue is full", "headers": _RETRY_AFTER},
    500: {"description": "A step of the engine failed"},
    503: {"description": "The server is shutting down, or its engine has failed", "headers": _RETRY_AFTER},
    504: {"description": "The answer took too long"},
    "default": {"description": "Any other error"},  # keeps FastAPI from documenting a 422, which is never sent
}
_REFERENCE = "#/components/schemas/{model}"
_ANSWER = {"description": "The answer; with `stream` as server-sent events", "content": {"text/event-stream": {}}}


_error_models: dict[str, type[BaseModel]] = {}


def error_response(model: type[BaseModel], **documented: Any) -> dict[str, Any]:
    """Returns the documentation of an error.

    FastAPI's own "model" key is not used: it builds a validator for each status of each route, which takes half of the
    time that routes need when a server starts, and nothing validates errors.
    """
    _error_models[model.__name__] = model
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
    return {"content": content, **documented}


def error_responses(*statuses: int | str, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Returns the documentation of errors with these statuses, whose bodies have this model."""
    return {status: error_response(model, **_STATUSES[status]) for status in statuses}


def generation_responses(model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    return error_responses(*_STATUSES, model=model) | {200: _ANSWER}


LOOKUP_ERRORS = error_responses(401, 404, "default")
ADMIN_ERRORS = error_responses(401, 503, "default") | {
    403: error_response(ErrorResponse, description="A key without `admin`")
}
TEXT_ERRORS = error_responses(400, 401, 404, 408, 413, "default")
GENERATION_ERRORS = error_responses(*_STATUSES)
GENERATION_RESPONSES = generation_responses()


def install_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Makes `app.openapi` return a document that names the API key where a path needs one."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_error_models(document)
            if with_keys:
                _add_security(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _add_error_models(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, model in _error_models.items():
        schema = model.model_json_schema(ref_template=_REFERENCE)
        schemas |= schema.pop("$defs", {}) | {name: schema}


def _add_security(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        "api_key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"api_key": []}, {"x_api_key": []}]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
