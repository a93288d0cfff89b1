"""The adapter of a request, as users give it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """Adapter of a request, under vLLM's names.

    Attributes:
      lora_name: Name for users. The same name with another path, or with changed files, means other weights.
      lora_int_id: Accepted as in vLLM; without effect.
      lora_path: Folder of the adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]
