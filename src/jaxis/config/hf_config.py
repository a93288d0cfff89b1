"""A checkpoint's config.json, read so that no key can be overlooked.

A model reads the keys it needs, and names those it does not need (`ignore`) and those it supports with one value only
(`expect`); `unread_keys` then lists the others that could change its logits, by the rules of `key_rules`. A config that
says something the model does not do is an error, not a wrong answer.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxis.config.expert_counts import EXPERTS_PER_TOKEN, NUM_EXPERTS
from jaxis.config.key_rules import judge
from jaxis.config.quantization_files import config_path, read_config
from jaxis.config.reference import reference_of
from jaxis.config.usual_keys import own_names, with_defaults
from jaxis.errors import ConfigError


@dataclass(frozen=True)
class KeyUse:
    """Use of one key of a config.

    Attributes:
      key: The key as config.json has it; one of a nested object is written with dots.
      use: "used": read. "default": read, and null or equal to the reader's default. "neutral": cannot change logits, of
        any model or of this one (`HFConfig.ignore`). "ignored": a tool's key, not the model's. "unread": could change
        logits, and no code read it. "refused", in an analysis: the family cannot honour it.
      because: Reason why an unread key could change logits.
    """

    key: str
    value: Any
    use: Literal["used", "default", "neutral", "ignored", "unread", "refused"]
    because: str = ""


class _MissingKeyError(ConfigError, KeyError, AttributeError):
    """A required key is absent. Also a KeyError and AttributeError, so that `getattr(config, key, default)` works."""

    def __str__(self) -> str:  # KeyError's would put the message in quotes
        return str(self.args[0])


class HFConfig(Mapping[str, Any]):
    """A read-only view of a config that records every key read.

    `config.hidden_size`, `config["hidden_size"]` and `config.get("hidden_size", default)` read a key. A nested object
    is an HFConfig too. A required key that is null counts as absent; `get` says what others are. `key in config` and
    iterating over keys are not reading.
    """

    __slots__ = ("_ignored", "_path", "_read", "_spellings", "_values", "source")

    def __init__(
        self,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        source: str = "the model's config",
        _path: str = "",
    ) -> None:
        """Wraps a parsed config, named `source` in errors.

        `overrides` are set before anything reads the config; None removes the key. A key of a nested object is written
        with dots, e.g. `text_config.hidden_size`. Raises ConfigError if a path goes through a key that is not an
        object.
        """
        self.source = source
        self._path = _path
        # Key -> whether every reader so far assumes, without the key, the value that it has.
        self._read: dict[str, bool] = {}
        self._ignored: set[str] = set()
        given = with_overrides(values, overrides or {}, source)
        # A usual key -> what the file calls it, or would.
        self._spellings = {usual: own for own, usual in own_names(given).items() if usual not in given}
        plain = with_defaults(given)
        self._values = {
            key: HFConfig(value, source=source, _path=f"{_path}{key}.") if isinstance(value, dict) else value
            for key, value in plain.items()
        }

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> HFConfig:
        """Reads `folder`/config.json, and the file beside it with the quantization of the weights, if there is one.

        Raises CheckpointError if there is no such file, or it is not a JSON object, and ConfigError if an override's
        path goes through a key that is not an object, or the two files contradict each other.
        """
        return cls(read_config(folder), overrides, source=str(config_path(folder)))

    def with_values(self, values: Mapping[str, Any]) -> HFConfig:
        """Returns this config with other values; a key of an existing nested object is written with dots.

        A key that is read in either counts as read in both.
        """
        changed = copy.copy(self)
        changed._values = dict(self._values)
        for dotted, value in values.items():
            key, _, rest = dotted.partition(".")
            changed._values[key] = changed._values[key].with_values({rest: value}) if rest else value
        return changed

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            name = self._as_written(key)
            raise _MissingKeyError(
                f"{self.source} has no {name!r}, which the model needs: "
                f"add it to the file, or give hf_overrides={{{name!r}: ...}}",
                keys=[name],
            )
        self._read[key] = False
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key in HFConfig.__slots__:  # copy and pickle probe for these before they are set
            raise AttributeError(key)
        return self[key]

    def get(self, key: str, default: object = None) -> Any:
        """Returns the key's value, or `default` if it is absent. Records the key as read either way.

        Null has the meaning of the reference. If the reference keeps null, the result is None, of a switch False, or
        `default` if that is "off" too. If it computes a value or refuses null, the result is `default`. Without a
        reference, null is kept, but in nested objects, such as those of RoPE, it is `default`.
        """
        value = self._values.get(key)
        # An object is not compared, which would count all of its keys as read.
        self._read[key] = self._read.get(key, True) and not isinstance(value, HFConfig) and value == default
        if value is not None:
            return value
        if not default or key not in self._values or not self._null_stays(key):
            return default
        return False if default is True else None

    def _null_stays(self, key: str) -> bool:
        """Returns whether null in the file means no value instead of the default."""
        reference = reference_of(self._values.get("model_type"))
        if reference is None:
            return self._path in ("", "text_config.")
        name = self._spellings.get(key, key)
        return reference.aliases.get(name, name) in reference.nulls

    def expect(self, key: str, *expected: Any) -> None:
        """Reads a key with only one supported set of values; the key may be absent.

        Raises ConfigError if it has another value.
        """
        value = self.get(key, expected[0])
        if value not in expected:
            raise self.fault(key, why=f"of which only {' or '.join(map(repr, expected))} is supported")

    def expect_all(self, **expected: Any) -> None:
        """Reads keys with only one supported value each, as `expect` does."""
        for key, value in expected.items():
            self.expect(key, value)

    def fault(self, *keys: str, why: str) -> ConfigError:
        """Returns the error of values that cannot be honoured: "config.json has n_heads=3 and n_groups=2, WHY".

        Absent keys are not shown.
        """
        present = [key for key in keys if self._plain(key) is not None] or keys
        shown = " and ".join(f"{self._as_written(key)}={self._plain(key)!r}" for key in present)
        return ConfigError(f"{self.source} has {shown}, {why}", keys=map(self._as_written, keys))

    def ignore(self, *keys: str, because: str) -> None:
        """Declares that the model knows keys, which may be absent, and that their (nested) values have no effect.

        Other readers may still use it: a layer ignores what only layers of another kind need. Raises ValueError without
        a reason.
        """
        if not because:
            raise ValueError(f"{', '.join(map(repr, keys))} is ignored without a reason")
        self._ignored.update(keys)

    def get_text_config(self) -> HFConfig:
        """Returns the text decoder's config: the nested `text_config` of a multimodal model, else this one."""
        text_config = self._values.get("text_config")
        return self["text_config"] if isinstance(text_config, HFConfig) else self

    def read_object(self, key: str) -> dict[str, Any] | None:
        """Returns a nested object as a dict, all of it recorded as read; None if it is absent.

        Raises ConfigError if the key's value is not an object.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, HFConfig):
            raise self.fault(key, why="expected an object")
        for nested in value:
            if isinstance(value.get(nested), HFConfig):
                value.read_object(nested)
        return value.to_dict()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self._values.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"HFConfig({self.to_dict()!r}, source={self.source!r})"

    def to_dict(self) -> dict[str, Any]:
        """Returns a deep copy as a dict, nulls included. Does not count as reading."""
        return {
            key: value.to_dict() if isinstance(value, HFConfig) else copy.deepcopy(value)
            for key, value in self._values.items()
        }

    def unread_keys(self) -> list[str]:
        """Returns keys that are set, that no code read, and that could change logits, sorted.

        A nested object that was read is followed: its unread keys are given with dots, e.g. `rope_scaling.factor`.
        """
        return sorted(use.key for use in self.key_uses() if use.use == "unread")

    def ignored_keys(self) -> list[str]:
        """Returns keys that are set, that no code read, and that only other tools know, sorted; nested ones too."""
        return sorted(use.key for use in self.key_uses() if use.use == "ignored")

    def key_uses(self) -> list[KeyUse]:
        """Returns the use of each key so far, nulls included; a nested object that was read is followed."""
        uses: list[KeyUse] = []
        for key, value in self._values.items():
            if key in self._read and isinstance(value, HFConfig):
                uses += value.key_uses()
                continue
            plain, because = self._plain(key), ""
            if value is None:
                use = "default"
            elif key in self._read:
                use = "default" if self._read[key] else "used"
            elif key in self._ignored or self._repeats_what_was_read(key, plain):
                use = "neutral"
            else:
                verdict = judge(key, plain, self._values.get("model_type"), self._plain)
                use, because = verdict.use, verdict.because
            uses.append(KeyUse(self._as_written(key), plain, use, because))
        return uses

    def _as_written(self, key: str) -> str:
        """Returns the file's name of a key, with the objects that contain it."""
        return self._path + self._spellings.get(key, key)

    def _repeats_what_was_read(self, key: str, value: Any) -> bool:
        """Returns whether a key repeats a number that was read under another name."""
        return any(
            other in self._read and self._plain(other) == value
            for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN)
            if key in names
            for other in names
        )

    def _plain(self, key: str) -> Any:
        """Returns a key's value, an object as a dict, without reading it; None if it is absent."""
        value = self._values.get(key)
        return value.to_dict() if isinstance(value, HFConfig) else value


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns a deep copy of a parsed config with other values; see `HFConfig`."""
    changed = copy.deepcopy(dict(values))
    for dotted, value in overrides.items():
        *parents, key = dotted.split(".")
        target = changed
        for parent in parents:
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                raise ConfigError(
                    f"the override {dotted!r} goes through {parent!r}, which is not an object in {source}"
                )
        target[key] = copy.deepcopy(value)
    return changed
