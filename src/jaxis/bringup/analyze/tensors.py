"""A checkpoint's tensors against a model's parameters: a dry run of the real loader on headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.layers.module import JaxModule
from jaxis.loading.headers import HeaderTensor, only_headers
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.model_loader import loader_of, unfilled_parameters

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class TensorProblem:
    """Tensors alike that the loader does not take, or parameters alike that it does not fill.

    Attributes:
      kind: "refused": the loader's own words are in `reason`. "unfilled": a parameter that no tensor is for.
      names: The names as one, numbers that differ as ranges: `model.layers.[0-3].mlp.up_proj.weight`.
      count: How many they are.
      reason: What is wrong, of the first of them.
    """

    kind: str
    names: str
    count: int
    reason: str


def check_tensors(model: JaxModule, tensors: Mapping[str, TensorInfo]) -> list[TensorProblem]:
    """Runs the model's `load_weights` on headers and gathers everything it refuses and leaves unfilled.

    Args:
      model: Constructed abstractly; its parameters are filled with headers.
      tensors: The checkpoint's.

    Returns:
      Every problem, those alike as one; empty if the checkpoint would load.

    Raises:
      ConfigError: The model's class has no `load_weights`.
    """
    load_weights = loader_of(model).load_weights
    stream = _Stream(tensors)
    refused: dict[str, str] = {}
    with only_headers():
        while True:
            try:
                load_weights(iter(stream.next_tensor, None))
            except CheckpointError as error:
                reason = str(error)
                if stream.last is not None and _is_about(reason, stream.last):
                    refused[stream.last] = reason
                elif not stream.is_exhausted:
                    # Of what came before: the tensor read last only showed that it ended, and is still to be taken.
                    refused[f"before {stream.last}"] = reason
                    stream.push_back()
                elif not refused:  # of the whole: after an interruption, what was counted is not complete
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
    """The tensors one by one, with a memory of the last."""

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
        """Yields the last tensor again; only once."""
        if self._was_pushed_back != self._last:
            self._pushed_back = self._was_pushed_back = self._last


def _is_about(reason: str, name: str) -> bool:
    """Whether the loader's message names the tensor, in full or as the module that refused it knows it."""
    quoted = re.findall(r"'([^']+)'", reason)
    return any(name == part or name.endswith(f".{part}") for part in quoted)


def _grouped(reasons: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """(Names as one, count, reason of the first) of names that differ in numbers only and of reasons alike."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        words = _NUMBER.sub("#", reason.replace(name, ""))
        groups.setdefault((_NUMBER.sub("#", name), words), []).append(name)
    for names in groups.values():
        yield join_names(names), len(names), reasons[names[0]]


def join_names(names: list[str]) -> str:
    """Names that differ in numbers only, as one: numbers that differ become `[0-3]` or `[0-3,7]`."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = iter([_ranges(sorted(set(column))) for column in numbers])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}]"
