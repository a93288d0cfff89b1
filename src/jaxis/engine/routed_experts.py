"""The experts chosen for each token of a sequence by a mixture of experts, kept by position while steps compute."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxis.errors import RequestError
from jaxis.layers.module import JaxModule
from jaxis.layers.routing import JaxRouter
from jaxis.models.common.decoder import CausalLM
from jaxis.sampling_params import SamplingParams


class RoutedExperts:
    """The chosen experts of one sequence.

    A position may be computed again, after a preemption or a wrong draft: the last result counts.
    """

    def __init__(self) -> None:
        self._rows = np.zeros((0, 0, 0), np.uint16)

    def put(self, start: int, rows: np.ndarray) -> None:
        """Stores the experts, uint8 or uint16 [T, layers with experts, k], of positions `start`, `start + 1`, ..."""
        stop = start + len(rows)
        if stop > len(self._rows):
            grown = np.zeros((max(stop, 2 * len(self._rows)), *rows.shape[1:]), rows.dtype)
            if len(self._rows):
                grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[start:stop] = rows

    def between(self, start: int, stop: int) -> np.ndarray:
        """Returns the experts of positions from `start` to before `stop`, all of which must have been put."""
        return self._rows[start:stop].copy()


class RoutedLayers:
    """The layers of a model that have experts.

    Attributes:
      dtype: Type for the ids of their experts; None if there are none, or not all layers are on this host's devices.
      why_not: Reason in that case.

    Args:
      models: Models of this host's pipeline stages.
      num_stages: Number of all stages.
    """

    def __init__(self, models: Iterable[JaxModule], num_stages: int) -> None:
        routers = [
            module.routing
            for model in models
            if isinstance(model, CausalLM)
            for _, module in model.decoder.named_modules()
            if isinstance(module, JaxRouter)
        ]
        self.dtype: type[np.uint8 | np.uint16] | None = None
        self.why_not = "the model has no experts"
        if num_stages > 1:
            self.why_not = "the model's layers are divided among pipeline stages"
        elif len({routing.num_experts_per_token for routing in routers}) > 1:
            self.why_not = "the model's layers have different numbers of experts a token"
        elif routers:
            largest = max(routing.num_experts for routing in routers)
            self.dtype = np.uint8 if largest <= 2**8 else np.uint16

    def check(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises a RequestError if a request wants experts that cannot be returned."""
        if not params.return_routed_experts:
            return
        if self.dtype is None:
            raise RequestError(f"cannot be given, because {self.why_not}: leave it out", param="return_routed_experts")
        if params.routed_experts_prompt_start > num_prompt_tokens:
            raise RequestError(
                f"={params.routed_experts_prompt_start} must not exceed the prompt's {num_prompt_tokens} tokens",
                param="routed_experts_prompt_start",
            )
