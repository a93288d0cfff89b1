"""Request bodies: JSON read strictly, so that no two readers of a body can understand it differently."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.exceptions import HTTPException
from fastapi.routing import APIRoute

MAX_NESTING = 100  # JSON schemas and template arguments nest, and the code that walks them is recursive
LARGE_BYTES = 64 * 1024  # larger bodies are read in a thread: they take milliseconds
_TOO_DEEP = f"the body is nested deeper than {MAX_NESTING} levels: flatten it"
_CONTAINERS = (dict, list)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """Decodes a JSON body.

    Raises:
      ValueError: It is not JSON in UTF-8, is nested too deep, names a key twice in an object, holds a number that JSON
        does not have (NaN, Infinity), or half of a surrogate pair.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 text: byte {error.start} is wrong") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
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


class StrictJSONRequest(Request):
    """A request whose JSON is read by `parse_json`."""

    async def json(self) -> Any:
        """The body's value; HTTPException with status 400 if there is none."""
        body = await self.body()
        try:
            if len(body) < LARGE_BYTES:
                return parse_json(body)
            # Reading millions of numbers holds the GIL for a tenth of a second: one such body at a time.
            return await self.app.state.context.preprocess(functools.partial(parse_json, body))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None


class StrictJSONRoute(APIRoute):
    """A route that gets StrictJSONRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's call."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictJSONRequest(request.scope, request.receive))

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
