"""Bodies of requests: JSON read with limits, and models that are lenient with what they do not know."""

from __future__ import annotations

import functools
import itertools
import json
import re
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Annotated, Any, ClassVar, NoReturn, Protocol

from fastapi import Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from starlette.datastructures import Headers

from jaxis.sampling_params import Bounds

# Bodies of requests and answers: pydantic models that check strictly, and name what they do not apply.


MAX_INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]


def bounded(bounds: Bounds, *, high: float | None = None) -> Any:
    """A field that is None by default and has a parameter's bounds; `high` where the parameter itself has none."""
    return Field(None, ge=bounds.low, le=bounds.high if high is None else high)


@dataclass(frozen=True)
class NotApplied:
    """What becomes of a field that clients send and this server does not apply.

    A field that cannot change the answer is accepted. One that would change it is accepted at values that change
    nothing, and is otherwise refused, since a client could not tell that it was left out.

    Attributes:
      neutral: Values that ask for nothing; null always is one.
      advice: What to do instead; other values are refused with it. None accepts them, and names the field as ignored.
    """

    neutral: tuple[object, ...] = ()
    advice: str | None = None


class StrictModel(BaseModel):
    """Refuses unknown fields and converts nothing: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LenientModel(StrictModel):
    """Checks the fields that it declares, and accepts others: every release of a client may add some.

    `server.http.ignored_fields` names what a request carries in vain, and refuses what would change the answer.

    Attributes:
      not_applied: What becomes of fields that are not applied, declared or not; unknown ones that are not in it have
        no effect.
    """

    model_config = ConfigDict(extra="allow")
    not_applied: ClassVar[dict[str, NotApplied]] = {}
    _unknown_fields: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, _context: Any) -> None:
        """Pydantic's call: keeps fields that are not declared out of `model_dump`, and so out of prompts."""
        if extra := self.__pydantic_extra__:
            self._unknown_fields = dict(extra)
            extra.clear()

    @property
    def unknown_fields(self) -> Mapping[str, Any]:
        """The fields of this object, not of those inside it, that it does not declare."""
        # Not as an attribute, which is slow where it is private, and requests have thousands of objects.
        return (self.__pydantic_private__ or {}).get("_unknown_fields", {})


def new_id(kind: str) -> str:
    """A unique id, such as "chatcmpl-..."."""
    return f"{kind}-{uuid.uuid4().hex}"


def is_none(value: object) -> bool:
    """For fields that are left out of an answer when they hold nothing."""
    return value is None


def type_of(value: object) -> Any:
    """The `type` of an object of JSON, or of a model that was made of one."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def tag_by_type(tags: Mapping[str, str]) -> Callable[[Any], str | None]:
    """A discriminator of models that are told apart by their `type`.

    Args:
      tags: Type -> the tag of its model, which begins with a capital: error messages leave it out of paths.
    """

    def tag(value: object) -> str | None:
        kind = type_of(value)
        return tags.get(kind) if isinstance(kind, str) else None

    return tag


# Request bodies: JSON read strictly, so that no two readers of a body can understand it differently.


MAX_NESTING = 100  # JSON schemas and template arguments nest, and the code that walks them is recursive
LARGE_BYTES = 64 * 1024  # larger bodies are read in a thread: they take milliseconds
_TOO_DEEP = f"the body is nested deeper than {MAX_NESTING} levels: flatten it"
_CONTAINERS = (dict, list)
_OTHER_ENCODINGS = {  # by how they begin
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def wrapping_fault(headers: Headers) -> str | None:
    """What is wrong with how a body is sent, by the request's headers; None if nothing is, or there is no body."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return None
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        return f"the body is compressed (Content-Encoding: {encoding[:40]}): send it as it is"
    content_type = headers.get("content-type", "")
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_type() if content_type else ""
    # A page's script may send other types anywhere, without the browser asking first.
    if not (kind.startswith("application/") and kind.removeprefix("application/").split("+")[-1] == "json"):
        sent = f"it is {content_type[:100]!r}" if content_type else "there is none"
        return f"the Content-Type header must be application/json, and {sent}: send Content-Type: application/json"
    charset = str(message.get_param("charset", "utf-8")).lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        return f"the Content-Type header names charset={charset[:40]}: send JSON in UTF-8"
    return None


def parse_json(body: bytes) -> Any:
    """Decodes a JSON body.

    Raises:
      ValueError: It is empty, is not JSON in UTF-8, is nested too deep, names a key twice in an object, holds a number
        that JSON does not have (NaN, Infinity), or half of a surrogate pair.
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
    """What a route takes as its body, as FastAPI has it."""

    def validate(
        self, value: Any, values: dict[str, Any], *, loc: tuple[int | str, ...]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """The value as a model, and what is wrong with it."""
        ...


class StrictJSONRequest(Request):
    """A request whose JSON is read by `parse_json`, once.

    Args:
      request: The request as it came.
      body_field: What its route takes as its body; None takes none.
    """

    def __init__(self, request: Request, body_field: BodyField | None) -> None:
        super().__init__(request.scope, request.receive)
        self._body_field = body_field

    async def json(self) -> Any:
        """The body's value; HTTPException with status 400 if there is none."""
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
        """Raises RequestValidationError if the body is not what the route takes; FastAPI looks after dependencies."""
        if self._body_field is not None:
            _, errors = self._body_field.validate(await self.json(), {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors)


class StrictJSONRoute(APIRoute):
    """A route that gets StrictJSONRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's call."""
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
