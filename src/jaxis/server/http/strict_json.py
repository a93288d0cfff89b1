from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, NoReturn, Protocol

from fastapi import Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers

MAX_NESTING = 100  # JSON schemas and template arguments nest, and the code that walks them is recursive
LARGE_BYTES = 64 * 1024  # larger bodies take milliseconds, so they are read in a thread
_TOO_DEEP = f"the body is nested deeper than {MAX_NESTING} levels: flatten it"
_CONTAINERS = (dict, list)
_OTHER_ENCODINGS = {  # by their first bytes
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def wrapping_fault(headers: Headers) -> str | None:
    """Returns the error in the headers of a request's body; None if there is no error or no body."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return None
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        return f"the body is compressed (Content-Encoding: {encoding[:40]}): send it as it is"
    content_type = headers.get("content-type", "")
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_type() if content_type else ""
    # Other types can be sent by a web page's script to any host, without the browser asking first.
    if not (kind.startswith("application/") and kind.removeprefix("application/").split("+")[-1] == "json"):
        sent = f"it is {content_type[:100]!r}" if content_type else "there is none"
        return f"the Content-Type header must be application/json, and {sent}: send Content-Type: application/json"
    charset = str(message.get_param("charset", "utf-8")).lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        return f"the Content-Type header names charset={charset[:40]}: send JSON in UTF-8"
    return None


def parse_json(body: bytes) -> Any:
    """Decodes a JSON body strictly, so that no two readers of a body can understand it differently.

    Raises ValueError if the body is empty, is not JSON in UTF-8, is nested too deep, names a key twice in an object,
    holds a number that JSON does not have (NaN, Infinity), or holds half of a surrogate pair.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        name = next((name for start, name in _OTHER_ENCODINGS.items() if body.startswith(start)), None)
        found = f"is not UTF-8 text: byte {error.start} is wrong" if name is None else f"is {name}: send JSON in UTF-8"
        raise ValueError(f"the body {found}") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ValueError("the body is empty: send a JSON object") from None
        raise ValueError(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        if "digits" in str(error):  # Python's own message advises changing a Python setting
            raise ValueError("the body holds an integer of thousands of digits") from None
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_nesting(value)
    if _SURROGATE_ESCAPE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"the body holds the lone surrogate {half!a}: send valid Unicode") from None
    return value


class BodyField(Protocol):
    """A route's body parameter in FastAPI."""

    def validate(
        self, value: Any, values: dict[str, Any], *, loc: tuple[int | str, ...]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Returns the value as a model, and its errors."""
        ...


class StrictJSONRequest(Request):
    """A request whose JSON is read once, by `parse_json`; `body_field` is the body of its route, if it takes one."""

    def __init__(self, request: Request, body_field: BodyField | None) -> None:
        super().__init__(request.scope, request.receive)
        self._body_field = body_field

    async def json(self) -> Any:
        """Returns the body's value; raises HTTPException with status 400 if it has none."""
        if not hasattr(self, "_value"):
            body = await self.body()
            try:
                if len(body) < LARGE_BYTES:
                    self._value = parse_json(body)
                else:
                    # Reading millions of numbers holds the GIL for a tenth of a second: one such body at a time.
                    self._value = await self.app.state.parts.run_in_worker(functools.partial(parse_json, body))
            except ValueError as error:
                raise HTTPException(400, str(error)) from None
        return self._value

    async def check_body(self) -> None:
        """Raises RequestValidationError if the route does not accept the body. FastAPI checks dependencies."""
        if self._body_field is not None:
            body = await self.json()
            _, errors = self._body_field.validate(body, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors, body=body)


class StrictJSONRoute(APIRoute):
    """A route whose handler gets a StrictJSONRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, body_field = super().get_route_handler(), self.body_field

        async def handle(request: Request) -> Response:
            if body_field is not None and (fault := wrapping_fault(request.headers)) is not None:
                raise HTTPException(400, fault)
            answered = StrictJSONRequest(request, body_field)
            return await request.app.state.parts.models.answer(answered, handler)

        return handle


def _check_nesting(value: object) -> None:
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_NESTING):
        children = itertools.chain.from_iterable(item.values() if type(item) is dict else item for item in level)
        level = [child for child in children if type(child) in _CONTAINERS]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the body names {key[:100]!a} twice in one object: send it once")
            seen.add(key)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the body holds {name}, which is not a JSON number")
