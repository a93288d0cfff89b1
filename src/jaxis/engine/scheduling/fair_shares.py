"""Whose prompts are computed next: steps' tokens are shared equally among the clients that wait for them."""

from __future__ import annotations

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
