"""Fields of requests that have no effect: reported in the log and in a header, or refused if they change the answer."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from jaxis.nearest_name import misspelt_name, nearest_name
from jaxis.server.http.body import LenientModel, NotApplied
from jaxis.server.http.errors import RefusedFieldError, UnknownFieldError, UnsupportedFieldError

HEADER = "X-Jaxis-Ignored"
MAX_UNKNOWN_FIELDS = 128  # of one request
_MAX_NAME_CHARACTERS = 64
_MAX_LOGGED_NAMES = 1000
_MAX_HEADER_CHARACTERS = 2000  # proxies refuse headers of several thousand
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")
_logger = logging.getLogger(__name__)

# Place of a model in a request: the place of the outer model, its field, and the index in the field's list. None is the
# request itself. Only errors need places as text, and a request may have thousands.
_Place = tuple["_Place | None", str, int | None]


class IgnoredFields:
    """Checks requests for fields that are not applied. `strict` refuses every unknown field."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, request: BaseModel, more: Iterable[str] = ()) -> dict[str, str]:
        """Returns headers of the answer that name the request's ignored fields. The log names each field once.

        Raises:
          RefusedFieldError: A field would change the answer, or is most likely misspelt; or it is unknown, and unknown
            fields are refused.
        """
        names = ignored_fields(request, strict=self._strict)
        names += [name for name in map(_plain, more) if name not in names]
        for name in names:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED_NAMES:
                self._logged.add(name)
                if (meant := _nearest(request, name)) is None:
                    _logger.info("requests carry %s, which has no effect here", name)
                else:
                    _logger.warning("requests carry %s, which has no effect here: did you mean %s?", name, meant)
        return _header(names)

    def more(self, headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
        """Returns headers of `check` with more names, which the log has already."""
        return _header([*filter(None, [headers.get(HEADER)]), *sorted(map(_plain, names))])


def _header(names: Iterable[str]) -> dict[str, str]:
    text = ",".join(names)
    return {HEADER: text[:_MAX_HEADER_CHARACTERS]} if text else {}


def ignored_fields(request: BaseModel, *, strict: bool = False) -> list[str]:
    """Returns the names of a request's fields that have no effect, such as "user" or "messages.cache_control".

    Args:
      request: The request; fields of `LenientModel`s inside it count, too.
      strict: True if every unknown field is refused.

    Raises:
      RefusedFieldError: A field must not be ignored; see `IgnoredFields.check`.
    """
    names: set[str] = set()
    kinds: set[tuple[type[LenientModel], str]] = set()  # many messages may have the same field
    for prefix, place, model in _lenient_models(request):
        for name, value in model.unknown_fields.items():
            kinds.add((type(model), name))
            if len(kinds) > MAX_UNKNOWN_FIELDS:
                raise RefusedFieldError(
                    f"is unknown here, and so are more than {MAX_UNKNOWN_FIELDS} fields of the request: leave them out",
                    param=_shown(_path(place, name)),
                )
            if strict and name not in model.not_applied:
                raise _unknown(_path(place, name), "leave it out")
            if _is_ignored(model, place, name, value):
                names.add(prefix + name)
        for name in _declared(type(model)):
            if _is_ignored(model, place, name, getattr(model, name)):
                names.add(prefix + name)
    return sorted(set(map(_plain, names)))


def _is_ignored(model: LenientModel, place: _Place | None, name: str, value: object) -> bool:
    """Returns whether a field asks for something and has no effect.

    Raises:
      RefusedFieldError: The field would change the answer.
    """
    if value is None:
        return False
    rule = model.not_applied.get(name)
    if rule is None:
        if (meant := _misspelt(type(model), name)) is not None:
            raise _unknown(_path(place, name), f"did you mean {meant}?")
        return True
    if value in rule.neutral:
        return False
    if rule.advice is not None:
        raise _unsupported(_path(place, name), rule, rule.advice)
    return True


def _lenient_models(request: BaseModel) -> Iterator[tuple[str, _Place | None, LenientModel]]:
    """Yields the lenient models in a request, itself included.

    It runs in the event loop, over every block of every message, and therefore does no work for each field.

    Yields:
      Path to the model's fields without indices; place of the model; the model.
    """
    stack: list[tuple[str, _Place | None, Any]] = [("", None, request)]
    while stack:
        prefix, place, model = stack.pop()
        is_lenient, nested = _structure(type(model))
        if is_lenient:
            yield prefix, place, model
        for name in nested:
            value = getattr(model, name)
            if type(value) is list:
                inner = f"{prefix}{name}."
                stack += [(inner, (place, name, i), item) for i, item in enumerate(value)]
            elif isinstance(value, BaseModel):
                stack.append((f"{prefix}{name}.", (place, name, None), value))


@functools.cache
def _structure(kind: type) -> tuple[bool, tuple[str, ...]]:
    """Returns whether a class is a lenient model, and the names of its fields that may hold models."""
    if not issubclass(kind, BaseModel):
        return False, ()
    nested = (name for name, field in kind.model_fields.items() if _may_hold_models(field.annotation))
    return issubclass(kind, LenientModel), tuple(nested)


def _may_hold_models(annotation: Any) -> bool:
    if arguments := get_args(annotation):
        return any(map(_may_hold_models, arguments))
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _path(place: _Place | None, name: str) -> str:
    while place is not None:
        place, field, index = place
        name = f"{field}.{name}" if index is None else f"{field}[{index}].{name}"
    return name


@functools.cache
def _declared(model: type[LenientModel]) -> list[str]:
    return [name for name in model.not_applied if name in model.model_fields]


def _nearest(request: BaseModel, plain_path: str) -> str | None:
    """Returns the field that an unknown one resembles, though too little to be a misspelling; None if there is none."""
    for prefix, _, model in _lenient_models(request):
        for name in model.unknown_fields:
            if _plain(prefix + name) == plain_path:
                return nearest_name(name, _known(type(model)))
    return None


@functools.lru_cache(maxsize=1024)
def _misspelt(model: type[LenientModel], name: str) -> str | None:
    return misspelt_name(name, _known(model))


def _known(model: type[LenientModel]) -> set[str]:
    return {*model.model_fields, *model.not_applied}


def _unknown(path: str, advice: str) -> UnknownFieldError:
    return UnknownFieldError(f"is not a known parameter: {advice}", param=_shown(path))


def _unsupported(path: str, rule: NotApplied, advice: str) -> UnsupportedFieldError:
    neutral = f"other than {rule.neutral[0]!r} " if rule.neutral else ""
    return UnsupportedFieldError(f"{neutral}cannot be honoured: {advice}", param=_shown(path))


def _shown(path: str) -> str:
    return path if len(path) <= 2 * _MAX_NAME_CHARACTERS else path[: 2 * _MAX_NAME_CHARACTERS] + "..."


def _plain(path: str) -> str:
    return _UNPRINTABLE.sub("?", re.sub(r"\[\d+\]", "", path))[: 2 * _MAX_NAME_CHARACTERS]
