"""A reason why jaxis cannot run a model as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Code = Literal["no_family", "refused", "unknown_key", "refused_tensor", "unfilled_parameter"]


@dataclass(frozen=True)
class ModelFinding:
    """One reason, as data.

    Attributes:
      code: "no_family": jaxis has no family of the architecture. "refused": the family refuses values of config.json.
        "unknown_key": a key could change logits, and the family does not read it. "refused_tensor": the loader refuses
        tensors. "unfilled_parameter": no tensor provides parameters.
      names: Architectures, or keys, or one pattern of similar tensors: `model.layers.[0-3].mlp.up_proj.weight`.
      sentence: Reason in words; of tensors, that of the first.
      count: Number of tensors or parameters of the pattern; 1 for other codes.
      like: Family that was asked in place of the missing one; None for the model's own.
    """

    code: Code
    names: tuple[str, ...]
    sentence: str
    count: int = 1
    like: str | None = None

    def __str__(self) -> str:
        about = "" if self.like is None else f"unlike {self.like}: "
        if self.code in ("no_family", "refused"):  # an error, which says of what
            return about + self.sentence
        number = "" if self.count == 1 else f"{self.count} x "
        return f"{about}{self.code.replace('_', ' ')}: {number}{', '.join(self.names)}: {self.sentence}"
