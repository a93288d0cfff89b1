"""Fair sharing of prefill: a step's tokens are divided equally among the clients that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxis.engine.scheduling.sequence import Sequence

# Clients whose turn is past are forgotten once there are this many more clients than after the last such cleaning.
_MOST_FORGETTABLE_CLIENTS = 1024


class FairShares:
    """Counts the prompt tokens that each client was served, so that the client with the fewest comes next.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996). A client's turn is the number of tokens it was served
    so far, but never earlier than the turn that was taken last. So a client that comes back after a pause has no claim
    on the past. One with a single short prompt waits for at most one chunk of each other client, however many prompts
    they have.
    """

    def __init__(self) -> None:
        self._now = 0
        self._next: dict[str | None, int] = {}
        self._most_clients = _MOST_FORGETTABLE_CLIENTS

    def turn(self, client: str | None) -> int:
        """Returns the client's turn; the client with the lowest is served first."""
        return max(self._now, self._next.get(client, 0))

    def serve(self, client: str | None, num_tokens: int) -> None:
        """Counts tokens that the client is served at its turn."""
        self._now = self.turn(client)
        self._next[client] = self._now + num_tokens
        if len(self._next) > self._most_clients:
            self._next = {client: turn for client, turn in self._next.items() if turn > self._now}
            self._most_clients = len(self._next) + _MOST_FORGETTABLE_CLIENTS


_WAITED_FOR_SHARE = 4
"""Divisor of the token budget of a step that other clients wait for."""


class StepCapacity:
    """The prompt tokens that a step may compute: fewer if another client waits for a token that the step samples.

    A sampled token is known when the whole step has been computed. Without this limit, a client that decodes beside
    another one's prompts would wait for a full step at each token, and its turns would not help it, since they count
    prompts. Prompts of the client itself, or of a higher priority, still fill the step.

    Args:
      max_num_batched_tokens: The token budget of a step.
      sampling: The sequences that the step decodes.
    """

    def __init__(self, max_num_batched_tokens: int, sampling: Iterable[Sequence]) -> None:
        self._max_tokens = max_num_batched_tokens // _WAITED_FOR_SHARE
        self._min_per_client = max(1, self._max_tokens // 2)  # however many sequences decode
        self._num_tokens = 0
        self._prompt_tokens: Counter[str | None] = Counter()  # by client
        self._waiting: set[tuple[str | None, int]] = set()
        for sequence in sampling:
            self._num_tokens += 1
            self._waiting.add((sequence.client, sequence.priority))

    def add(self, sequence: Sequence, num_tokens: int, *, samples: bool) -> None:
        """Counts tokens of a sequence's prompt that the step computes; `samples` if it also samples the next token."""
        self._num_tokens += num_tokens
        self._prompt_tokens[sequence.client] += num_tokens
        if samples:
            self._waiting.add((sequence.client, sequence.priority))

    def of(self, sequence: Sequence, budget: int) -> int:
        """Returns how many prompt tokens of a sequence the step may still compute; 0 leaves them to the next step.

        `budget` is the rest of the step's token budget.
        """
        client, priority = sequence.client, sequence.priority
        if not any(other != client and waiting <= priority for other, waiting in self._waiting):
            return budget
        capacity = max(self._max_tokens - self._num_tokens, self._min_per_client - self._prompt_tokens[client], 0)
        return min(budget, capacity)
