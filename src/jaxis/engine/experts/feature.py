"""The experts chosen for each token of a sequence by a mixture of experts, kept by position while steps compute."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxis.config import ModelConfig
from jaxis.engine.execution.feature import Completion, RequestFeature
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import Sequence
from jaxis.errors import ConfigError, RequestError
from jaxis.layers.module import JaxModule
from jaxis.layers.routing import JaxRouter
from jaxis.models.common.decoder import CausalLM
from jaxis.outputs import CompletionOutput
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

    def report(self, output: CompletionOutput, sequence: Sequence, start: int) -> None:
        """Writes the experts of all computed tokens, once the completion has ended."""
        del start
        params = sequence.sampling_params
        if sequence.status.finished and sequence.output_token_ids:
            output.routed_experts = self._rows[params.routed_experts_prompt_start : sequence.num_tokens - 1].copy()


class RoutedExpertsFeature(RequestFeature):
    """Requests for the experts that the model's routers choose.

    Args:
      models: Models of the stages that this host has.
      num_stages: Number of pipeline stages.
      config: Configuration of the model.

    Raises:
      ConfigError: Requests are to return experts by default, for a model without any.
    """

    observer = "engine.experts"

    def __init__(self, models: Iterable[JaxModule], num_stages: int, config: ModelConfig) -> None:
        self._dtype, self._why_not = _type_of_ids(models, num_stages)
        if config.enable_return_routed_experts and self._dtype is None:
            raise ConfigError(f"enable_return_routed_experts has no use, because {self._why_not}: leave it out")

    def check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        if not params.return_routed_experts:
            return
        if self._dtype is None:
            raise RequestError(f"cannot be given, because {self._why_not}: leave it out", param="return_routed_experts")
        if params.routed_experts_prompt_start > num_prompt_tokens:
            raise RequestError(
                f"={params.routed_experts_prompt_start} must not exceed the prompt's {num_prompt_tokens} tokens",
                param="routed_experts_prompt_start",
            )

    def added(self, completion: Completion) -> None:
        if completion.sequence.sampling_params.return_routed_experts:
            completion.records[self.observer] = RoutedExperts()

    def observes(self, entry: ScheduledSequence) -> bool:
        return bool(entry.sequence.sampling_params.return_routed_experts)

    def take(self, completion: Completion, start: int, seen: np.ndarray) -> None:
        """Takes the experts, [T, layers with experts, k], of the tokens at positions `start`, `start + 1`, ..."""
        record = completion.records.get(self.observer)
        if isinstance(record, RoutedExperts) and self._dtype is not None:
            record.put(start, seen.astype(self._dtype))


def _type_of_ids(models: Iterable[JaxModule], num_stages: int) -> tuple[type[np.uint8 | np.uint16] | None, str]:
    """Returns the type for the ids of a model's experts; None, and the reason, if they cannot be returned."""
    routers = [
        module.routing
        for model in models
        if isinstance(model, CausalLM)
        for _, module in model.decoder.named_modules()
        if isinstance(module, JaxRouter)
    ]
    if num_stages > 1:
        return None, "the model's layers are divided among pipeline stages"
    if not routers:
        return None, "the model has no experts"
    if len({routing.num_experts_per_token for routing in routers}) > 1:
        return None, "the model's layers have different numbers of experts a token"
    return np.uint8 if max(routing.num_experts for routing in routers) <= 2**8 else np.uint16, ""
