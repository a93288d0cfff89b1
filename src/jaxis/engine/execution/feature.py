"""The interface to features: what requests may ask of an engine beside the continuation of their tokens.

An engine is given its features. It calls each at fixed points of a request's life and of a step, and asks for none by
name, except to hand a request's arguments to the feature that reads them. `tests/engine/test_features.py` has a small
one.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxis.engine.execution.calls import Calls
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.step_part import StepPart
from jaxis.engine.scheduling.places import NO_PLACES, Places
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import PromptSpan, Sequence
from jaxis.outputs import CompletionOutput
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.execution.executor import DeviceExecutor


class Record(Protocol):
    """Record that a feature keeps of a completion's tokens."""

    def report(self, output: CompletionOutput, sequence: Sequence, start: int) -> None:
        """Writes what is recorded into the completion's output from output token `start` on."""
        ...


class Completion(Protocol):
    """A completion as features see it.

    Attributes:
      sequence: Its tokens, as the scheduler sees them.
      records: Records that features keep of its tokens, by name.
    """

    @property
    def sequence(self) -> Sequence: ...
    @property
    def records(self) -> dict[str, Record]: ...


class RequestFeature:
    """A feature of requests. This base class changes nothing.

    Attributes:
      name: Argument of `LLMEngine.add_request` that the feature reads; "" if it reads sampling parameters only.
      places: Places that its sequences need to run.
      observer: Room whose module `observer` observes the model for it (see `ForwardKey`); "" for none.
      extends_prompts: True if prompts may have more than text.
      calls: Functions that clients of the engine can call, by name.
      facts: Facts that clients of the engine are told, of types that MessagePack has; None: none.
      needs_memory: Reason why the device's memory cannot be freed for a while; "" if it can.
    """

    name = ""
    places: Places = NO_PLACES
    observer = ""
    extends_prompts = False
    calls: Calls = MappingProxyType({})
    facts: Any = None
    needs_memory = ""

    def attach(self, programs: Programs) -> None:
        """Called once, with the programs on the devices that the feature may run."""

    def begin(self) -> None:
        """Starts over for a new engine loop, which has no sequences yet."""

    def check(self, asked: Any, num_prompt_tokens: int) -> None:
        """Raises a RequestError for a request whose argument `name` cannot be honoured."""

    def check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises a RequestError for sampling parameters that cannot be honoured."""

    def mark(self, sequence: Sequence, asked: Any) -> None:
        """Sets `identity`, `place` and `spans` of a new sequence, whose request asks for this."""

    def added(self, completion: Completion) -> None:
        """Called when a completion waits to run."""

    def ended(self, completion: Completion) -> None:
        """Called when a completion gets no more tokens."""

    def is_ready(self, span: PromptSpan) -> bool:
        """Returns whether a span can be computed now."""
        del span
        return True

    def prepare(self, awaited: Many[PromptSpan], *, waits: bool) -> None:
        """Called after each step was scheduled.

        Args:
          awaited: Spans that keep sequences waiting, the most urgent first.
          waits: True if nothing can run before one of them is ready.
        """

    def part(self, entries: Iterable[ScheduledSequence]) -> StepPart | None:
        """Returns what it adds to the programs of a step with these entries; None for nothing."""
        del entries
        return None

    def observes(self, entry: ScheduledSequence) -> bool:
        """Returns whether it reads what `observer` sees of an entry's tokens."""
        del entry
        return False

    def take(self, completion: Completion, start: int, seen: np.ndarray) -> None:
        """Takes what was seen of a completion's tokens at positions `start`, `start + 1`, ..."""

    def weights_changed(self, stages: Many[DeviceExecutor]) -> None:
        """Called when the model has other weights, of the same shapes and types."""
