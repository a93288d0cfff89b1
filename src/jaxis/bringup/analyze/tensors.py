"""Checks a checkpoint's tensors against a model's parameters: a dry run of the real loader on headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxis.bringup.analyze.number_ranges import number_ranges
from jaxis.config.quantization import QuantizationConfig, name_of_tensor
from jaxis.errors import CheckpointError
from jaxis.layers.module import JaxModule
from jaxis.loading.headers import HeaderTensor
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.model_loader import loader_of, unfilled_parameters

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class TensorProblem:
    """Similar tensors that the loader refuses, or similar parameters that it leaves unfilled.

    Attributes:
      kind: "refused": the loader's message is in `reason`. "unfilled": no tensor provides the parameter.
      names: Names in one pattern, differing numbers as ranges: `model.layers.[0-3].mlp.up_proj.weight`.
      reason: Error of the first of them.
    """

    kind: Literal["refused", "unfilled"]
    names: str
    count: int
    reason: str


def check_tensors(
    model: JaxModule, tensors: Mapping[str, TensorInfo], quant_config: QuantizationConfig | None
) -> list[TensorProblem]:
    """Runs the model's `load_weights` on headers; collects everything that it refuses or leaves unfilled.

    Similar problems are merged; there are none if the checkpoint would load. Raises ConfigError if the model's class
    has no `load_weights`.
    """
    load_weights = loader_of(model).load_weights
    names = {name: name_of_tensor(quant_config, name) for name in tensors}
    stream = _Stream({name: tensors[in_file] for in_file, name in names.items() if name is not None})
    refused: dict[str, str] = {}
    while True:
        try:
            load_weights(iter(stream.next_tensor, None))
        except CheckpointError as error:
            reason = str(error)
            if stream.last is not None and _is_about(error, stream.last):
                refused[stream.last] = reason
            elif not stream.is_exhausted:
                # The error is about earlier tensors: the last one only ended their group and is still to be loaded.
                refused[f"before {stream.last}"] = reason
                stream.push_back()
            elif not refused:  # the error is about the whole: after an interruption, the counts are not complete
                refused["the checkpoint"] = reason
        else:
            if (left := stream.next_tensor()) is not None:
                refused[left[0]] = f"was not read by {type(model).__name__}.load_weights"
        if stream.is_exhausted:
            break
    problems = [TensorProblem("refused", *group) for group in _grouped(refused)]
    unfilled = dict.fromkeys(unfilled_parameters(model), "no tensor of the checkpoint is for it")
    return problems + [TensorProblem("unfilled", *group) for group in _grouped(unfilled)]


class _Stream:
    """The tensors one by one, remembering the last."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = iter(tensors.items())
        self._pushed_back: tuple[str, TensorInfo] | None = None
        self._last: tuple[str, TensorInfo] | None = None
        self._was_pushed_back: tuple[str, TensorInfo] | None = None
        self.is_exhausted = False

    @property
    def last(self) -> str | None:
        return None if self._last is None or self.is_exhausted else self._last[0]

    def next_tensor(self) -> tuple[str, np.ndarray] | None:
        item = self._pushed_back or next(self._tensors, None)
        self._pushed_back = None
        if item is None:
            self.is_exhausted = True
            return None
        self._last = item
        name, info = item
        return name, HeaderTensor.of(info.shape, info.dtype)

    def push_back(self) -> None:
        """Makes the next iteration yield the last tensor again; only once."""
        if self._was_pushed_back != self._last:
            self._pushed_back = self._was_pushed_back = self._last


def _is_about(error: CheckpointError, name: str) -> bool:
    """Returns whether the tensor is the one at fault."""
    return error.tensor is not None and f".{name}".endswith(f".{error.tensor}")


def _grouped(reasons: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Yields (pattern, count, first reason) for names that differ only in numbers and have similar reasons."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        words = _NUMBER.sub("#", reason.replace(name, ""))
        groups.setdefault((_NUMBER.sub("#", name), words), []).append(name)
    for names in groups.values():
        yield join_names(names), len(names), reasons[names[0]]


def join_names(names: list[str]) -> str:
    """Joins names that differ only in numbers into one pattern: differing numbers become `[0-3]` or `[0-3,7]`."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    columns = iter([sorted(set(column)) for column in numbers])

    def joined(_: re.Match[str]) -> str:
        column = next(columns)
        return number_ranges(column) if len(column) == 1 else f"[{number_ranges(column)}]"

    return _NUMBER.sub(joined, names[0])
