"""Whose prompts are computed next: steps' tokens are shared equally among the clients that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxis.engine.scheduling.sequence import Sequence

# Clients whose last turn is long past are forgotten when there are this many more than after the last time.
_MOST_FORGETTABLE_CLIENTS = 1024


class FairShares:
    """Counts the prompt tokens that each client was served, so that the client with the fewest comes next.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996): a client's turn is what it was served so far, but
    never earlier than the turn that was taken last. So a client that comes back after a pause has no claim on the past,
    and one with a single short prompt waits for at most one chunk of each other client, however many prompts they have.
    """

    def __init__(self) -> None:
        self._now = 0
        self._next: dict[str | None, int] = {}
        self._most_clients = _MOST_FORGETTABLE_CLIENTS

    def turn(self, client: str | None) -> int:
        """When the client is to be served: the lowest is first."""
        return max(self._now, self._next.get(client, 0))

    def serve(self, client: str | None, num_tokens: int) -> None:
        """Counts tokens that the client is served at its turn."""
        self._now = self.turn(client)
        self._next[client] = self._now + num_tokens
        if len(self._next) > self._most_clients:
            self._next = {client: turn for client, turn in self._next.items() if turn > self._now}
            self._most_clients = len(self._next) + _MOST_FORGETTABLE_CLIENTS


_WAITED_FOR_SHARE = 4
"""What a step that others wait for computes: this part of the tokens that a step can have."""


class StepCapacity:
    """Keeps a step short if a client waits for a token of it, and its other tokens are prompts of other clients.

    Such a token comes when the whole step has been computed. A client that decodes beside another one's prompts would
    wait for a full step at each token, and its turns, which are of prompts, would not help it. Prompts of the client
    itself, or of a higher priority, fill the step as they always do.

    Args:
      max_num_batched_tokens: The token budget of a step.
      sampling: The sequences that the step decodes.
    """

    def __init__(self, max_num_batched_tokens: int, sampling: Iterable[Sequence]) -> None:
        self._most = max_num_batched_tokens // _WAITED_FOR_SHARE
        self._least = max(1, self._most // 2)  # of each client, however many sequences decode
        self._num_tokens = 0
        self._of_clients: Counter[str | None] = Counter()  # tokens of prompts
        self._waiting: set[tuple[str | None, int]] = set()
        for sequence in sampling:
            self._num_tokens += 1
            self._waiting.add((sequence.client, sequence.priority))

    def add(self, sequence: Sequence, num_tokens: int, *, samples: bool) -> None:
        """Notes what the step computes of a sequence's prompt.

        Args:
          sequence: The sequence.
          num_tokens: How many tokens.
          samples: Whether the step also samples its next token.
        """
        self._num_tokens += num_tokens
        self._of_clients[sequence.client] += num_tokens
        if samples:
            self._waiting.add((sequence.client, sequence.priority))

    def of(self, sequence: Sequence, budget: int) -> int:
        """How many more tokens the step may compute of a sequence's prompt; 0 leaves it to the next step.

        Args:
          sequence: The sequence.
          budget: What is left of the step's token budget.
        """
        client, priority = sequence.client, sequence.priority
        if not any(other != client and waiting <= priority for other, waiting in self._waiting):
            return budget
        room = max(self._most - self._num_tokens, self._least - self._of_clients[client], 0)
        return min(budget, room)
