"""Measures the difference between two sets of values, and defines its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

TOP_K = 10
_ROWS_AT_ONCE = 64  # of logits in float64


@dataclass(frozen=True)
class Gates:
    """Limits for one data type. None is no limit.

    Attributes:
      module_error: Largest relative error of one module given the reference's input.
      module_tokens: Share of the tokens for which `module_error` must hold. In low precision, a router's close
        decisions differ for some tokens.
    """

    relative_error: float | None
    max_kl_nats: float | None
    mean_kl_nats: float
    module_error: float
    module_tokens: float = 1.0


VerifyDType = Literal["float32", "bfloat16"]

GATES: dict[VerifyDType, Gates] = {
    "float32": Gates(relative_error=1e-4, max_kl_nats=1e-6, mean_kl_nats=1e-6, module_error=1e-4),
    "bfloat16": Gates(relative_error=None, max_kl_nats=None, mean_kl_nats=1e-2, module_error=2e-2, module_tokens=0.9),
}


@dataclass(frozen=True)
class LogitsComparison:
    """Logits compared with those expected for the same tokens.

    Attributes:
      num_tokens: Rows compared.
      mean_kl_nats, max_kl_nats: KL(expected || actual) per token, averaged and at its largest.
      top_k_overlap: Share of the expected TOP_K tokens among the actual ones, over all rows.
      argmax_agreement: Share of rows with the same most likely token.
    """

    num_tokens: int
    max_abs_difference: float
    relative_error: float
    mean_kl_nats: float
    max_kl_nats: float
    top_k_overlap: float
    argmax_agreement: float

    def passes(self, gates: Gates) -> bool:
        """Returns whether every figure is within its limit; NaN is not."""
        limits = (
            (self.relative_error, gates.relative_error),
            (self.max_kl_nats, gates.max_kl_nats),
            (self.mean_kl_nats, gates.mean_kl_nats),
        )
        return all(limit is None or value <= limit for value, limit in limits)


def compare_logits(actual: np.ndarray, expected: np.ndarray) -> LogitsComparison:
    """Compares logits [T, V]; figures are infinite if shapes differ or a value is not finite."""
    infinite = float("inf")
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return LogitsComparison(len(expected), infinite, infinite, infinite, infinite, 0.0, 0.0)
    kl = kl_divergence(actual, expected)
    k = min(TOP_K, actual.shape[-1])
    overlap = [len(np.intersect1d(a, e)) / k for a, e in zip(_top(actual, k), _top(expected, k), strict=True)]
    return LogitsComparison(
        num_tokens=len(expected),
        max_abs_difference=float(np.abs(actual - expected).max()),
        relative_error=relative_error(actual, expected),
        mean_kl_nats=float(kl.mean()),
        max_kl_nats=float(kl.max()),
        top_k_overlap=float(np.mean(overlap)),
        argmax_agreement=float((actual.argmax(-1) == expected.argmax(-1)).mean()),
    )


def relative_error(actual: np.ndarray, expected: np.ndarray, tokens: float = 1.0) -> float:
    """Returns the largest difference of [T, ...] over the largest expected magnitude, for a share of the closest
    tokens.

    It is infinite if shapes differ or a value is not finite.
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    if actual.size == 0:
        return 0.0
    difference = np.abs(actual.astype(np.float32) - expected).reshape(len(actual), -1).max(-1)
    largest = np.sort(difference)[max(int(np.ceil(tokens * len(difference))) - 1, 0)]
    magnitude = np.abs(expected).max()
    if magnitude == 0:
        return 0.0 if largest == 0 else float("inf")
    return float(largest / magnitude)


def kl_divergence(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Computes KL(expected || actual) of each row of logits [T, V], in nats, in float64."""
    parts = []
    for start in range(0, len(expected), _ROWS_AT_ONCE):
        p, q = (_log_softmax(x[start : start + _ROWS_AT_ONCE]) for x in (expected, actual))
        parts.append((np.exp(p) * (p - q)).sum(-1))
    # Rounding can make the divergence of nearly equal rows negative.
    return np.maximum(np.concatenate(parts), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _top(logits: np.ndarray, k: int) -> np.ndarray:
    return np.argpartition(-logits, k - 1, axis=-1)[:, :k]
