"""Where the recurrent states of vLLM's requests lie. vLLM's scheduler knows blocks alone, so they are the worker's."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.engine.scheduling.sequence import NO_SLOT
from jaxis.engine.scheduling.state_slots import StateStep
from jaxis.errors import EngineError


@dataclass
class _State:
    """A slot, and how many tokens its states have seen."""

    slot: int
    num_tokens: int = 0


class RequestStates:
    """A slot for each request, from its first step until it ends or is preempted.

    Args:
      num_slots: As many as requests run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._of_request: dict[str, _State] = {}

    def step(self, request_id: str, start: int, num_tokens: int) -> StateStep:
        """Where a step finds and leaves the states of a request.

        Args:
          request_id: vLLM's.
          start: Position of its first token in the step.
          num_tokens: How many it computes.

        Raises:
          EngineError: The states of the tokens before are not there, or more requests run than there are slots.
        """
        state = self._of_request.get(request_id)
        if state is None:
            if not self._free:
                raise EngineError(f"vLLM's scheduler runs more than {len(self._of_request)} requests at once")
            state = self._of_request[request_id] = _State(self._free.pop())
        if start not in (0, state.num_tokens):
            raise EngineError(
                f"vLLM's scheduler goes on with the request {request_id} at token {start}, and its recurrent states "
                f"are those after {state.num_tokens}"
            )
        state.num_tokens = start + num_tokens
        return StateStep(read=state.slot if start else NO_SLOT, write=state.slot)

    def give_back(self, request_id: str) -> None:
        """A request has ended or lost its blocks. A step in flight may still write to its slot, before others do."""
        if (state := self._of_request.pop(request_id, None)) is not None:
            self._free.append(state.slot)
