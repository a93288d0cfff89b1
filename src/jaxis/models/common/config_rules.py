"""Rules for keys of config.json that a family does not compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxis.config.hf_config import HFConfig


class ConfigRules:
    """Mix-in of model classes.

    Attributes:
      supported_values: Keys of config.json, each with the values that are supported; it may be absent.
      ignored_keys: A key of config.json or several, without effect, and the reason.
    """

    supported_values: ClassVar[Sequence[tuple[Any, ...]]] = ()
    ignored_keys: ClassVar[Sequence[tuple[str | tuple[str, ...], str]]] = ()

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        """Declares keys of config.json that are unused (`ignore`) or supported with some values only (`expect`).

        Families whose rules are more than the attributes override it. Raises ConfigError if a key has another value.
        """
        for key, *values in cls.supported_values:
            config.expect(key, *values)
        for keys, because in cls.ignored_keys:
            config.ignore(*([keys] if isinstance(keys, str) else keys), because=because)
