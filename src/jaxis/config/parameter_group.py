"""The base of Oumi's parameter groups: reads them, and reports fields that cannot be honoured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NoReturn, Self

from jaxis.config.oumi_objects import PydanticObject
from jaxis.errors import ConfigError
from jaxis.nearest_name import most_similar, nearest_name

_MISSING = "???"  # Oumi's value of fields that were not given


@dataclass(frozen=True)
class Unused:
    """A parameter of Oumi's that nothing here reads, so that no group has a field for it.

    Attributes:
      why: Reason, or the advice to the user.
      accepted: Values that are accepted silently, as are None, nothing and, without such values, false.
      is_refused: True if other values are an error; False if they change no result.
    """

    why: str
    accepted: tuple[Any, ...]
    is_refused: bool

    def accepts(self, value: Any) -> bool:
        """Returns whether a value is accepted silently."""
        return (
            value is None or value in self.accepted or (not value and (not self.accepted or isinstance(value, Sized)))
        )


def no_effect(why: str, *accepted: Any) -> Unused:
    """Makes the entry of a parameter that changes no result."""
    return Unused(why, accepted, is_refused=False)


def refused(why: str, *accepted: Any) -> Unused:
    """Makes the entry of a parameter that must have one of the accepted values."""
    return Unused(why, accepted, is_refused=True)


def number(default: float | None, low: float, high: float = float("inf")) -> Any:
    """Makes a field whose value is a number from `low` to `high`; or None, if that is the default."""
    return _checked(default, lambda group, name: group.check_number(name, low, high))


def whole(default: int | None, low: int, high: float = float("inf")) -> Any:
    """Makes a field whose value is an integer from `low` to `high`; or None, if that is the default."""
    return _checked(default, lambda group, name: group.check_number(name, low, high, whole=True))


def text(default: str | None, expected: str) -> Any:
    """Makes a field whose value is a string; or None, if that is the default. `expected` completes "must be"."""
    return _checked(default, lambda group, name: group.check(name, str, expected))


def choice(default: str | None, choices: Iterable[str]) -> Any:
    """Makes a field whose value is one of several strings; or None, if that is the default."""
    return _checked(default, lambda group, name: group.check_choice(name, tuple(choices)))


def _checked(default: Any, check: Callable[[Any, str], None]) -> Any:
    return dataclasses.field(default=default, metadata={_CHECK: check})


_CHECK = "check"


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """A group of parameters, each of which is applied, or refused with the reason.

    A few parameters never affect results. They are accepted, so that existing configurations run, and `notes` names
    them.

    Attributes:
      UNUSED: Parameters that are known, and are not fields.
    """

    UNUSED: ClassVar[Mapping[str, Unused]] = {}
    _named = ()  # those of UNUSED that were given and have no effect

    @classmethod
    def section(cls) -> str:
        """Returns the group's name in errors and YAML files, such as "model"."""
        raise NotImplementedError

    @classmethod
    def of(cls, value: object) -> Self:
        """Converts an object of this class, a mapping, or one of Oumi's objects with the same fields.

        Raises ConfigError if the value is something else, or sets a field that jaxis does not know.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            values = {str(key): item for key, item in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            known = {f.name for f in dataclasses.fields(cls)}
            values = {
                f.name: plain_value(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if f.name in known or getattr(value, f.name) != _default(f)
            }
            values = {name: item for name, item in values.items() if not (isinstance(item, str) and item == _MISSING)}
        else:
            raise ConfigError(f"{cls.section()} is {type(value).__name__}; give {cls.__name__}, or a mapping")
        unused = {name: values.pop(name) for name in cls.UNUSED.keys() & values.keys()}
        unknown = [name for name in values if name not in cls.__dataclass_fields__]
        if unknown:
            raise ConfigError(f"{cls.section()}.{unknown[0]} is not a known field: {cls._meant_by(unknown[0])}")
        named = [name for name, row in cls.UNUSED.items() if name in unused and not row.accepts(unused[name])]
        for name in named:
            if cls.UNUSED[name].is_refused:
                cls._refuse(name, unused[name], cls.UNUSED[name].why)
        group = cls(**values)
        object.__setattr__(group, "_named", tuple(named))
        return group

    @classmethod
    def groups(cls) -> tuple[type[ParameterGroup], ...]:
        """Returns all groups of a file, this one included, if this is the whole file; else nothing."""
        return ()

    @classmethod
    def _meant_by(cls, unknown: str) -> str:
        """Returns a hint at fields with similar names, in this section or another one of the same file."""
        files = [group.groups() for group in _subclasses(ParameterGroup) if cls in group.groups()]
        places: dict[str, list[str]] = {}
        for group in [cls, *itertools.chain(*files)]:
            section = "" if group.section() == "config" else f"{group.section()}."
            for field in dataclasses.fields(group):
                places.setdefault(field.name, []).append(f"{section}{field.name}")
        own = [f.name for f in dataclasses.fields(cls)]
        near = unknown if unknown in places else nearest_name(unknown, own) or nearest_name(unknown, places)
        if near is not None:
            return f"did you mean {' or '.join(dict.fromkeys(places[near]))}?"
        return f"the nearest ones are {', '.join(most_similar(unknown, own))}"

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if each.type == "bool":
                self.check(each.name, bool, "true or false")
            elif _CHECK in each.metadata and not (getattr(self, each.name) is None and each.default is None):
                each.metadata[_CHECK](self, each.name)

    def notes(self) -> list[str]:
        """Returns one line for each parameter that is set and has no effect on results."""
        return [f"{self.section()}.{name} has no effect: {self.UNUSED[name].why}" for name in self._named]

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises ConfigError for a field that is set and cannot be honoured."""
        self._refuse(name, getattr(self, name), why)

    @classmethod
    def _refuse(cls, name: str, value: object, why: str) -> NoReturn:
        raise ConfigError(f"{cls.section()}.{name}={value!r} cannot be honoured: {why}")

    def check(self, name: str, kind: type, expected: str, *, optional: bool = False) -> None:
        """Raises ConfigError if a field's value is of another type; `expected` completes "must be"."""
        value = getattr(self, name)
        if (value is None and optional) or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return
        raise ConfigError(f"{self.section()}.{name}={value!r} must be {expected}")

    def check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        """Raises ConfigError if a field has none of these values."""
        if getattr(self, name) not in choices:
            raise ConfigError(f"{self.section()}.{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")

    def check_number(self, name: str, low: float, high: float = float("inf"), *, whole: bool = False) -> None:
        """Raises ConfigError if a field is not a number from `low` to `high`."""
        value = getattr(self, name)
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            upper = f" to {high:g}" if high < float("inf") else ""
            raise ConfigError(f"{self.section()}.{name}={value!r} must be {kind} from {low:g}{upper}")


def _subclasses(group: type[ParameterGroup]) -> list[type[ParameterGroup]]:
    return [each for direct in group.__subclasses__() for each in (direct, *_subclasses(direct))]


def plain_value(value: object) -> Any:
    """Returns an enum's value, or a pydantic object as a dict; any other value unchanged."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PydanticObject) and not isinstance(value, type):
        return value.model_dump(mode="json", exclude_none=True)
    return value


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
