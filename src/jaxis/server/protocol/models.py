"""/v1/models."""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    """A name under which the model is served.

    Attributes:
      root: The first of its names.
      max_model_len: Most tokens of a request, prompt and answer together.
      default_parameters: Sampling parameters of a request that leaves them out.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=lambda: int(time.time()))
    owned_by: str = "jaxis"
    root: str
    max_model_len: int
    default_parameters: dict[str, float]


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
