"""Keys that config.json files have under several names."""

from __future__ import annotations

from typing import Any

from jaxis.config.hf_config import HFConfig


def value_of_either(config: HFConfig, *names: str) -> Any:
    """The value of a key that has several names, of which config.json may have one or, with the same value, several.

    Args:
      config: Of the model.
      names: The key's; an error about a missing key names the first.

    Raises:
      ConfigError: None of them is there, or two have different values.
    """
    value = config[next((name for name in names if name in config), names[0])]
    for name in names:
        config.expect(name, value)
    return value
