"""What the server's owner looks at: the chat page, health, metrics and the version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from jaxis.server.context import Parts
from jaxis.server.http.api_keys import current_api_key
from jaxis.server.http.openapi import ADMIN_ERRORS, LOOKUP_ERRORS
from jaxis.version import __version__

# For operators: health checks, version, metrics, and what changes the server's state.


router = APIRouter()
_JSON = {"application/json": {"schema": {"type": "object", "properties": {"status": {"type": "string"}}}}}
_UP_OR_NOT: dict[int | str, dict[str, Any]] = {
    200: {"content": _JSON},
    503: {"description": "Not now", "content": _JSON},
}


@router.get("/health", responses=_UP_OR_NOT)
async def health(parts: Parts) -> Response:
    """200 while the engine makes progress or has nothing to do; 503 tells a supervisor to restart the server."""
    if parts.models.is_making_progress:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "the engine makes no progress"}, status_code=503)


@router.get("/ping", responses=_UP_OR_NOT)
@router.post("/ping", responses=_UP_OR_NOT)
async def ping(parts: Parts) -> Response:
    """The same as /health, where Amazon SageMaker looks for it."""
    return await health(parts)


@router.get("/load", responses=LOOKUP_ERRORS)
async def load(parts: Parts) -> dict[str, int]:
    """How many completions run or wait, for load balancers; under vLLM's name."""
    contexts = [entry.context for entry in parts.models.entries()]
    return {"server_load": sum(context.engine.num_reserved for context in contexts if context is not None)}


@router.get("/ready", responses=_UP_OR_NOT)
async def ready(parts: Parts) -> Response:
    """200 while new requests are welcome; 503 during shutdown too."""
    if parts.models.is_accepting and parts.models.is_making_progress:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready"}, status_code=503)


@router.get("/version", responses=LOOKUP_ERRORS)
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@router.get("/metrics", response_class=Response, responses=LOOKUP_ERRORS | {200: {"content": {"text/plain": {}}}})
async def metrics(parts: Parts) -> Response:
    """Metrics for Prometheus."""
    return Response(parts.server_metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def check_admin() -> None:
    """Answers 403 to keys without `admin`."""
    key = current_api_key.get()
    if key is None or not key.admin:
        raise HTTPException(
            403, "this needs a key with admin: true in the file of --api-key-file: make one with jaxis new-key --admin"
        )


class Success(BaseModel):
    """It was done."""

    success: bool = True


@router.post("/reset_prefix_cache", responses=ADMIN_ERRORS, dependencies=[Depends(check_admin)])
async def reset_prefix_cache(parts: Parts) -> Success:
    """Empties the prefix cache, of all loaded models: requests from now on find nothing in it. Under vLLM's name."""
    for entry in parts.models.entries():
        if entry.context is not None:
            entry.context.engine.reset_prefix_cache()
    return Success()


# The chat page at /: static files of the package. They hold no secrets and load nothing from other hosts.
#
# Clients of Ollama look for a server at / too, and are told that there is one.


_FOLDER = Path(__file__).parent.parent / "static"
_HEADERS = {
    # Model output is untrusted. Only the page's own scripts run and only its own files are loaded, and HTML gets into
    # the page only through DOMPurify ("trusted types").
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser revalidates each time, so an upgrade shows at once
}


class _PageFiles(StaticFiles):
    """The files, with the page's headers."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Starlette's call."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response


def chat_page_paths() -> frozenset[str]:
    """The paths of the page and of its files: all of them are open to everybody."""
    files = (file.relative_to(_FOLDER).as_posix() for file in _FOLDER.rglob("*") if file.is_file())
    return frozenset({"/", "/favicon.ico", *(f"/static/{file}" for file in files)})


def add_chat_page(app: FastAPI, *, greets_ollama: bool = False) -> None:
    """Serves the page at /, its files under /static, and its icon at /favicon.ico.

    Args:
      app: The application.
      greets_ollama: Answer at / as Ollama does, unless a browser asks.
    """
    files = _PageFiles(directory=_FOLDER)

    async def chat_page(request: Request) -> Response:
        if greets_ollama and "text/html" not in request.headers.get("accept", ""):
            return _ollama_greeting()
        page = await files.get_response("index.html", request.scope)
        page.headers["Vary"] = "Accept"
        return page

    async def icon(request: Request) -> Response:
        return await files.get_response("icon.svg", request.scope)

    app.add_api_route("/", chat_page, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
    # Where browsers look for the icon before they have read the page, and for pages that name none.
    app.add_api_route("/favicon.ico", icon, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
    app.mount("/static", files)


def add_ollama_greeting(app: FastAPI) -> None:
    """Answers at / as Ollama does: its clients look there for a server."""

    async def greeting() -> Response:
        return _ollama_greeting()

    app.add_api_route("/", greeting, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _ollama_greeting() -> Response:
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})
