"""The feature of embedded inputs: requests whose prompts have them, and steps that read their embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import cast

from jaxis.engine.embedded_inputs.encoder import InputEncoder
from jaxis.engine.embedded_inputs.info import FEATURE, InputInfo
from jaxis.engine.embedded_inputs.step_part import InputPart
from jaxis.engine.execution.feature import Completion, RequestFeature
from jaxis.engine.execution.programs import Programs
from jaxis.engine.scheduling import sequence as scheduling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import PromptSpan
from jaxis.errors import RequestError
from jaxis.prompts import EmbeddedInput


class EmbeddedInputs(RequestFeature):
    """The embedded inputs of an engine's prompts. A sequence's inputs are its `spans`.

    Attributes:
      encoder: Encoder of the inputs.

    Args:
      encoder: Encoder of the inputs.
      max_step_tokens: Most tokens that a step computes.
    """

    name = FEATURE
    extends_prompts = True

    def __init__(self, encoder: InputEncoder, max_step_tokens: int) -> None:
        self.encoder, self._max_step_tokens = encoder, max_step_tokens
        self.facts = dataclasses.asdict(InputInfo(dict(encoder.max_inputs), encoder.request_bytes, str(encoder.files)))

    def attach(self, programs: Programs) -> None:
        self._programs = programs

    def begin(self) -> None:
        self.encoder.begin()

    def check(self, asked: Sequence[EmbeddedInput], num_prompt_tokens: int) -> None:
        """Raises a RequestError for inputs that cannot be encoded, overlap, or lie outside of the prompt."""
        stop, most = 0, self._max_step_tokens
        for item in asked:
            rows = item.rows
            is_inside = item.start >= stop and item.stop <= num_prompt_tokens
            if not is_inside or not rows or not 0 <= rows[0] <= rows[-1] < item.num_tokens:
                raise RequestError("an input of the prompt lies outside of it, or in another one")
            stop = item.stop
            if item.is_bidirectional and item.num_tokens > most:
                raise RequestError(
                    f"an input of the prompt has {item.num_tokens} tokens, which one step computes, and a step has "
                    f"at most {most}: start with a larger max_num_batched_tokens"
                )
            self.encoder.check(item)

    def mark(self, sequence: scheduling.Sequence, asked: Sequence[EmbeddedInput]) -> None:
        sequence.spans = tuple(asked)

    def added(self, completion: Completion) -> None:
        self.encoder.hold(_inputs(completion.sequence.spans))

    def ended(self, completion: Completion) -> None:
        self.encoder.let_go(_inputs(completion.sequence.spans))

    def is_ready(self, span: PromptSpan) -> bool:
        return self.encoder.is_ready(cast(EmbeddedInput, span))

    def prepare(self, awaited: Sequence[PromptSpan], *, waits: bool) -> None:
        if awaited:
            self.encoder.go_on(_inputs(awaited), self._programs)
            if waits:
                self.encoder.wait()

    def part(self, entries: Iterable[ScheduledSequence]) -> InputPart | None:
        return InputPart.of(entries, self.encoder, self._programs)


def _inputs(spans: Sequence[PromptSpan]) -> Sequence[EmbeddedInput]:
    return cast(Sequence[EmbeddedInput], spans)
