"""Reads log-probabilities from a server that speaks OpenAI's API, such as vLLM, llama-server, Ollama or jaxis."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from jaxis.errors import ConfigError
from jaxis.host.closing import Closing

_TIMEOUT_SECONDS = 300.0  # a server may load a model on demand first
_MOST_SHOWN = 200  # characters of an answer in an error


@dataclass(frozen=True)
class ServerToken:
    """One token of a server's answer.

    Attributes:
      text: Token's UTF-8 bytes; a part of a character that the server replaced is U+FFFD.
      token_id: Id of the token, from servers that tell it.
      logprob: Its log-probability; None for the first of a prompt.
    """

    text: bytes
    token_id: int | None
    logprob: float | None


@dataclass(frozen=True)
class ServerAnswer:
    """Tokens of an answer, and the number of tokens of its prompt, if the server tells it."""

    tokens: tuple[ServerToken, ...]
    num_prompt_tokens: int | None


class LogprobServer(Closing):
    """A server's completions and chat, at temperature 0, with log-probabilities.

    Args:
      url: Address, with or without `/v1`.
      model: Name of the model there; empty is the first that the server lists.
      api_key: Key, sent as a bearer token if it is not empty.

    Every method raises ConfigError, which names the address, if the server cannot be reached or refuses.
    """

    def __init__(self, url: str, *, model: str = "", api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_SECONDS)
            models = self._ask("GET", "/v1/models") if not model else {}
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url} is no address such as http://127.0.0.1:8000: {error}") from error
        listed = models.get("data") or [{}]
        self.model = model or str(listed[0].get("id", ""))

    def close(self) -> None:
        self._http.close()

    def score(self, text: str) -> ServerAnswer | None:
        """Returns the tokens of a string, each with its log-probability; None if the server cannot score a prompt."""
        body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
        try:
            answer = self._answer("/v1/completions", body)
        except ConfigError:
            return None
        is_prompt_scored = len(answer.tokens) > 1 and answer.tokens[1].logprob is not None
        # The one token that was generated goes.
        return ServerAnswer(answer.tokens[:-1], answer.num_prompt_tokens) if is_prompt_scored else None

    def tokenize(self, text: str) -> list[int] | None:
        """Returns a prompt's token ids; None if the server does not tell them."""
        for body in ({"prompt": text}, {"content": text, "add_special": True}):  # of vLLM, and of llama-server
            with contextlib.suppress(ConfigError, KeyError, TypeError, ValueError):
                tokens = self._ask("POST", "/tokenize", {"model": self.model, **body})["tokens"]
                if tokens:
                    return [int(token) for token in tokens]
        return None

    def complete(self, text: str, max_tokens: int) -> ServerAnswer:
        """Returns the greedy continuation of a string."""
        body = {"prompt": text, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0.0}
        return self._answer("/v1/completions", body)

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> ServerAnswer:
        """Returns the greedy answer to a conversation."""
        body = {"messages": list(messages), "logprobs": True, "top_logprobs": 1}
        return self._answer("/v1/chat/completions", {**body, "max_tokens": max_tokens, "temperature": 0.0})

    def rendered_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | str | None:
        """Returns the prompt of a conversation, as token ids or as text; None if the server does not tell it."""
        try:
            tokens = self._ask("POST", "/tokenize", {"model": self.model, "messages": list(messages)}).get("tokens")
            if tokens:
                return [int(token) for token in tokens]
        except (ConfigError, TypeError, ValueError):
            pass
        try:
            return str(self._ask("POST", "/apply-template", {"messages": list(messages)})["prompt"])
        except (ConfigError, KeyError):
            return None

    def _answer(self, path: str, body: Mapping[str, Any]) -> ServerAnswer:
        found = self._ask("POST", path, {"model": self.model, **body})
        try:
            choice = found["choices"][0]
            tokens = _tokens(choice["logprobs"] or {})
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.url}{path} gives no log-probabilities: {_shown(found)}") from error
        if not tokens:
            raise ConfigError(f"{self.url}{path} gives no log-probabilities: {_shown(found)}")
        return ServerAnswer(tokens, (found.get("usage") or {}).get("prompt_tokens"))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
            found = response.json()
        except httpx.HTTPError as error:
            raise ConfigError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        except ValueError:
            found = response.text
        if response.is_error or not isinstance(found, dict):
            raise ConfigError(f"{self.url}{path} answers {response.status_code}: {_shown(found)}")
        return found


def _tokens(logprobs: Mapping[str, Any]) -> tuple[ServerToken, ...]:
    """Reads log-probabilities in chat's shape, which llama-server gives for completions too, or in completions'."""
    if "content" in logprobs:
        return tuple(
            ServerToken(_bytes(entry), entry.get("id"), float(entry["logprob"])) for entry in logprobs["content"] or ()
        )
    pairs = zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
    return tuple(
        ServerToken(_bytes({"token": token}), None, None if logprob is None else float(logprob))
        for token, logprob in pairs
    )


def _bytes(entry: Mapping[str, Any]) -> bytes:
    if entry.get("bytes"):
        return bytes(entry["bytes"])
    text = entry["token"]
    if text.startswith("bytes:"):  # a part of a character: bytes:\xe2\x82
        return codecs.decode(text.removeprefix("bytes:"), "unicode_escape").encode("latin-1")
    return text.encode()


def _shown(found: object) -> str:
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    text = " ".join(str(message).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
