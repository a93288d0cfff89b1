"""Ready-made clients, and the lines at a server's start that point them at it, to be pasted into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

KEY_VARIABLE = "JAXIS_API_KEY"
# What Claude Code and Codex send before anybody has asked anything is 12,000 to 14,000 tokens.
AGENT_CONTEXT = 16384
# A longer answer than this leaves an agent too little of its context.
_ANSWER_SHARE = 4
_MAX_ANSWER = 32000


@dataclass(frozen=True)
class ServerAddress:
    """A server as its clients reach it.

    Attributes:
      url: URL of the server, without a path.
      model: Name of the model to ask for.
      max_model_len: Longest context; agents must be told, as they do not ask.
      needs_key: True if requests must bring an API key, which is then taken from JAXIS_API_KEY.
    """

    url: str
    model: str
    max_model_len: int
    needs_key: bool

    @property
    def num_answer_tokens(self) -> int:
        """Longest answer that leaves an agent enough of its context."""
        return min(_MAX_ANSWER, self.max_model_len // _ANSWER_SHARE)

    @property
    def key(self) -> str:
        return f"${KEY_VARIABLE}" if self.needs_key else "none"


@dataclass(frozen=True)
class Client:
    """A ready-made client.

    Attributes:
      name: Name of the program.
      command: Makes the command that runs it with a server.
      is_agent: True if it needs a context of `AGENT_CONTEXT` tokens.
    """

    name: str
    command: Callable[[ServerAddress], str]
    is_agent: bool = False


def client_lines(clients: Sequence[Client], server: ServerAddress) -> list[str]:
    """Returns an entry for each client that a server can have, and a line about agents if it can have none."""
    lines, agents = list[str](), [client.name for client in clients if client.is_agent]
    if agents and server.max_model_len < AGENT_CONTEXT:
        names = " and ".join([", ".join(agents[:-1]), agents[-1]]) if len(agents) > 1 else agents[0]
        needs = "need" if len(agents) > 1 else "needs"
        lines.append(
            f"agents: {names} {needs} a context of {AGENT_CONTEXT} tokens or more; this one has {server.max_model_len}"
        )
        clients = [client for client in clients if not client.is_agent]
    return [*lines, *(f"{client.name}:\n  {client.command(server)}" for client in clients)]


def environment(variables: Mapping[str, str]) -> str:
    """Returns variables as they stand before a command. The shell puts in the key, whatever it holds."""
    key = f"${KEY_VARIABLE}"
    return " ".join(
        f'{name}="{key}"' if value == key else f"{name}={shlex.quote(value)}" for name, value in variables.items()
    )
