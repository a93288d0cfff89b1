"""Which adapter a request uses, as users say it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter of a request, under vLLM's names.

    Attributes:
      lora_name: For humans. The same name with another path, or other files there, means other weights.
      lora_int_id: vLLM's; without an effect.
      lora_path: The adapter's folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]
