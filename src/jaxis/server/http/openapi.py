"""The OpenAPI document: FastAPI's, plus what the middleware adds."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from jaxis.server.http.auth import OPEN_PATHS


def install_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Makes `app.openapi` return a document that names the API key where one is needed."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            if with_keys:
                _add_security(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _add_security(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        "api_key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"api_key": []}, {"x_api_key": []}]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
