"""Checks a checkpoint's tensors against a model's parameters: a dry run of the real loader on headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxis.bringup.analyze.finding import Code, ModelFinding
from jaxis.bringup.analyze.number_ranges import number_ranges
from jaxis.config.quantization import QuantizationConfig, name_of_tensor
from jaxis.errors import CheckpointError
from jaxis.layers.module import JaxModule
from jaxis.loading.headers import HeaderTensor
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.model_loader import loader_of, unfilled_parameters

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


def check_tensors(
    model: JaxModule, tensors: Mapping[str, TensorInfo], quant_config: QuantizationConfig | None
) -> list[ModelFinding]:
    """Runs the model's `load_weights` on headers; collects everything that it refuses or leaves unfilled.

    Similar findings are merged; there are none if the checkpoint would load. Raises ConfigError if the model's class
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
            if stream.last is not None and error.tensor is not None and f".{stream.last}".endswith(f".{error.tensor}"):
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
    unfilled = dict.fromkeys(unfilled_parameters(model), "no tensor of the checkpoint is for it")
    return [*_grouped("refused_tensor", refused), *_grouped("unfilled_parameter", unfilled)]


class _Stream:
    """The tensors one by one; each can be had again, once, while it is the last."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = list(tensors.items())
        self._num_given = self._num_repeated = 0

    @property
    def is_exhausted(self) -> bool:
        return self._num_given > len(self._tensors)

    @property
    def last(self) -> str | None:
        return self._tensors[self._num_given - 1][0] if 0 < self._num_given <= len(self._tensors) else None

    def next_tensor(self) -> tuple[str, np.ndarray] | None:
        self._num_given += 1
        if self.is_exhausted:
            return None
        name, info = self._tensors[self._num_given - 1]
        return name, HeaderTensor.of(info.shape, info.dtype)

    def push_back(self) -> None:
        """Makes the next iteration yield the last tensor again; only once."""
        if self._num_repeated < self._num_given:
            self._num_repeated = self._num_given
            self._num_given -= 1


def _grouped(code: Code, reasons: Mapping[str, str]) -> Iterator[ModelFinding]:
    """Yields a finding for the names that differ only in numbers and have similar reasons."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        words = _NUMBER.sub("#", reason.replace(name, ""))
        groups.setdefault((_NUMBER.sub("#", name), words), []).append(name)
    for names in groups.values():
        yield ModelFinding(code, (join_names(names),), reasons[names[0]], len(names))


def join_names(names: list[str]) -> str:
    """Joins names that differ only in numbers into one pattern: differing numbers become `[0-3]` or `[0-3,7]`."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    columns = iter([sorted(set(column)) for column in numbers])

    def joined(_: re.Match[str]) -> str:
        column = next(columns)
        return number_ranges(column) if len(column) == 1 else f"[{number_ranges(column)}]"

    return _NUMBER.sub(joined, names[0])
