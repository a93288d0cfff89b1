"""Facts about the inputs of an engine's prompts, for the server's process. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FEATURE = "inputs"
"""Name of the feature, which is the request's argument that it reads."""


@dataclass(frozen=True)
class InputInfo:
    """Facts about the inputs of an engine's prompts; an engine without them has the defaults.

    Attributes:
      max_inputs: Most inputs of a prompt by kind, as in `InputEncoder`.
      request_bytes: Size that a request with such inputs may need.
      files: Folder or file that defines the preprocessing of inputs.
    """

    max_inputs: dict[str, int] = field(default_factory=dict)
    request_bytes: int = 0
    files: str = ""

    @classmethod
    def of(cls, features: Mapping[str, Any]) -> InputInfo:
        """Returns the facts among those of an engine's features."""
        return cls(**features.get(FEATURE, {}))
