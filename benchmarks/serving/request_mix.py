"""Requests of many kinds whose answers are the same every time: greedy, or sampled with a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MixItem:
    """One request.

    Attributes:
      name: For reports.
      path: The endpoint.
      body: Without `stream`.
    """

    name: str
    path: str
    body: dict[str, Any]


def request_mix() -> list[MixItem]:
    """The rows of requests.jsonl."""
    lines = Path(__file__).with_name("requests.jsonl").read_text(encoding="utf-8").splitlines()
    return [MixItem(**json.loads(line)) for line in lines]
