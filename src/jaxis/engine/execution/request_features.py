"""The features of an engine's requests, together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxis.engine.execution.calls import Calls
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.step_part import StepParts
from jaxis.engine.scheduling.places import NO_PLACES, Places
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import PromptSpan
from jaxis.errors import RequestError


class RequestFeatures:
    """The features that an engine is given, in order."""

    def __init__(self, features: Iterable[RequestFeature] = ()) -> None:
        self._features = tuple(features)

    def __iter__(self) -> Iterator[RequestFeature]:
        return iter(self._features)

    def named(self, name: str) -> Any:
        """Returns the feature that reads the request argument `name`; None if there is none."""
        return next((feature for feature in self._features if feature.name == name), None)

    def asked(self, asked: Mapping[str, Any], num_prompt_tokens: int) -> list[RequestFeature]:
        """Returns the features that a request's arguments ask for; empty arguments ask for nothing.

        Raises:
          RequestError: A feature is not here, or cannot honour its argument.
        """
        found: list[RequestFeature] = []
        for name, value in asked.items():
            if value:
                if (feature := self.named(name)) is None:
                    raise RequestError(f"the request has {name!r}, which this engine was started without")
                feature.check(value, num_prompt_tokens)
                found.append(feature)
        return found

    @property
    def places(self) -> Places:
        """Places that sequences need to run."""
        return next((feature.places for feature in self._features if feature.places is not NO_PLACES), NO_PLACES)

    @property
    def calls(self) -> Calls:
        """Functions that clients of the engine can call, by name."""
        return {name: call for feature in self._features for name, call in feature.calls.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that clients of the engine are told by each feature, by its name: loaded adapters, limits of images."""
        return {feature.name: feature.facts for feature in self._features if feature.facts is not None}

    def parts(self, entries: Iterable[ScheduledSequence]) -> StepParts:
        """Returns what features add to a step with these entries."""
        parts = (feature.part(entries) for feature in self._features)
        return tuple(part for part in parts if part is not None)

    def observing(self, output: SchedulerOutput) -> list[RequestFeature]:
        """Returns the features that observe the model in a step."""
        return [each for each in self._features if each.observer and any(map(each.observes, output.scheduled))]

    def is_ready(self, span: PromptSpan) -> bool:
        """Returns whether a span can be computed now."""
        return all(feature.is_ready(span) for feature in self._features)
