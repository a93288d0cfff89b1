"""The chat page at /: static files of the package, without secrets, which load nothing from other hosts.

Clients of some protocols also look for a server at /, and get its greeting.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_FOLDER = Path(__file__).parent.parent / "static"
_HEADERS = {
    # Model output is untrusted. Only the page's own scripts run and only its own files are loaded, and HTML gets into
    # the page only through DOMPurify ("trusted types").
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser revalidates each time, so an upgrade shows at once
}


class _PageFiles(StaticFiles):
    """The page's files, with its headers."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response


def chat_page_paths() -> frozenset[str]:
    """Returns the paths of the page and of its files, which need no key."""
    files = (file.relative_to(_FOLDER).as_posix() for file in _FOLDER.rglob("*") if file.is_file())
    return frozenset({"/", "/favicon.ico", *(f"/static/{file}" for file in files)})


def add_chat_page(app: FastAPI, greeting: str = "") -> None:
    """Serves the page at /, its files under /static, and its icon at /favicon.ico.

    Args:
      app: The application.
      greeting: Answer at / unless a browser asks; "" is the page in any case.
    """
    files = _PageFiles(directory=_FOLDER)

    async def chat_page(request: Request) -> Response:
        if greeting and "text/html" not in request.headers.get("accept", ""):
            return _greeting(greeting)
        page = await files.get_response("index.html", request.scope)
        page.headers["Vary"] = "Accept"
        return page

    async def icon(request: Request) -> Response:
        return await files.get_response("icon.svg", request.scope)

    app.add_api_route("/", chat_page, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
    # Browsers look here for the icon before they have read the page, and for pages that name none.
    app.add_api_route("/favicon.ico", icon, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
    app.mount("/static", files)


def add_greeting(app: FastAPI, greeting: str) -> None:
    """Answers at / to clients that look there for a server."""

    async def greet() -> Response:
        return _greeting(greeting)

    app.add_api_route("/", greet, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _greeting(text: str) -> Response:
    return PlainTextResponse(text, headers={"Vary": "Accept"})
