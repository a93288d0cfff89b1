"""Slots of the recurrent states of vLLM's requests. vLLM's scheduler has blocks only, so the worker assigns slots."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.engine.scheduling.sequence import NO_SLOT
from jaxis.engine.scheduling.state_slots import StateStep
from jaxis.errors import EngineError


@dataclass
class _State:
    """A slot, and the number of tokens in its states."""

    slot: int
    num_tokens: int = 0


class RequestStates:
    """A slot for each request, from its first step until it ends or is preempted.

    Args:
      num_slots: Number of slots, as many as requests run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._of_request: dict[str, _State] = {}

    def step(self, request_id: str, start: int, num_tokens: int) -> StateStep:
        """Returns the places where a step reads and writes a request's states.

        Args:
          request_id: vLLM's id.
          start: Position of the request's first token in the step.
          num_tokens: Number of tokens in the step.

        Raises:
          EngineError: The states of the earlier tokens are missing, or more requests run than there are slots.
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
        """Frees the slot of a request that ended or lost its blocks. A step in flight still writes before the next
        owner.
        """
        if (state := self._of_request.pop(request_id, None)) is not None:
            self._free.append(state.slot)
