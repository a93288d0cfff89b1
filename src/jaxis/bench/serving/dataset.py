"""The prompts of a server benchmark: random ones of given lengths, or those of a file. No tokenizer is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.errors import RequestError

Message = dict[str, str]
# Token ids that exist in every model.
NUM_TOKEN_IDS = 1000
# Short and common: about one token each in most vocabularies.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at",
    "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there",
    "can", "an", "your", "which", "their", "said", "if", "do", "will", "each", "about", "how", "up", "out", "them",
)  # fmt: skip


@dataclass(frozen=True)
class ServingRequest:
    """One request to a server.

    Attributes:
      prompt: Text, token ids, or the messages of a conversation.
      output_len: Most tokens to generate.
    """

    prompt: str | list[int] | list[Message]
    output_len: int


def random_requests(
    rng: np.random.Generator, num_prompts: int, *, input_len: int, output_len: int, range_ratio: float, chat: bool
) -> list[ServingRequest]:
    """Requests with random prompts.

    Args:
      rng: Draws the prompts.
      num_prompts: Number of requests.
      input_len: Tokens of a prompt, on average.
      output_len: Tokens to generate, on average.
      range_ratio: Lengths are drawn uniformly from `(1 - range_ratio) * len` to `(1 + range_ratio) * len`.
      chat: Make conversations of one message of about as many tokens; otherwise exactly as many token ids.
    """
    inputs = _lengths(rng, num_prompts, input_len, range_ratio)
    outputs = _lengths(rng, num_prompts, output_len, range_ratio)
    requests = []
    for num_input, num_output in zip(inputs, outputs, strict=True):
        if chat:
            text = " ".join(rng.choice(_WORDS, num_input).tolist())
            prompt: list[Any] = [{"role": "user", "content": text}]
        else:
            prompt = rng.integers(0, NUM_TOKEN_IDS, num_input).tolist()
        requests.append(ServingRequest(prompt, num_output))
    return requests


def read_requests(
    path: Path, name: str, rng: np.random.Generator, num_prompts: int, *, output_len: int, chat: bool
) -> list[ServingRequest]:
    """Requests with prompts from a file, in random order; starts over if there are too few.

    Args:
      path: JSON lines with `prompt` or `messages`, and optionally `output_tokens` for the length ("custom");
        or a JSON list of `{"conversations": [{"from": "human", "value": ...}, ...]}` ("sharegpt"), of which the
        first message is used.
      name: "custom" or "sharegpt".
      rng: Draws the order.
      num_prompts: Number of requests.
      output_len: Tokens to generate, unless the file specifies a number.
      chat: Whether the endpoint takes conversations.

    Raises:
      RequestError: The file cannot be read, or is not in this format.
    """
    read = _read_custom if name == "custom" else _read_sharegpt
    found = [ServingRequest(_as_prompt(prompt, chat, path), length or output_len) for prompt, length in read(path)]
    if not found:
        raise RequestError(f"--dataset-path: {path} holds no prompt")
    order = rng.permutation(len(found))
    return [found[order[i % len(found)]] for i in range(num_prompts)]


def _lengths(rng: np.random.Generator, num: int, mean: int, range_ratio: float) -> list[int]:
    low, high = int(mean * (1 - range_ratio)), int(np.ceil(mean * (1 + range_ratio)))
    return rng.integers(max(1, low), max(1, high), num, endpoint=True).tolist()


def _read_custom(path: Path) -> Iterator[tuple[str | list[Message], int | None]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        row = _parse(line, f"{path}, line {number}")
        prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise RequestError(f"--dataset-path: {path}, line {number} has neither 'prompt' nor 'messages'")
        length = row.get("output_tokens")
        if length is not None and (not isinstance(length, int) or length < 1):
            raise RequestError(
                f"--dataset-path: {path}, line {number}: output_tokens={length!r} is not a number of tokens"
            )
        yield prompt, length


def _read_sharegpt(path: Path) -> Iterator[tuple[str, None]]:
    rows = _parse(_text(path), str(path))
    if not isinstance(rows, list):
        raise RequestError(f"--dataset-path: {path} is not a JSON list of conversations")
    for row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[0], dict) and turns[0].get("value"):
            yield str(turns[0]["value"]), None


def _as_prompt(prompt: str | list[Message], chat: bool, path: Path) -> str | list[Message]:
    if chat and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not chat and not isinstance(prompt, str):
        raise RequestError(f"--dataset-path: {path} holds conversations: use --endpoint /v1/chat/completions")
    return prompt


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--dataset-path: {path} cannot be read: {error}") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"--dataset-path: {where} is not JSON: {error}") from None


def arrival_times(rng: np.random.Generator, num: int, request_rate: float, burstiness: float) -> list[float]:
    """When to send each request, in seconds from the start.

    The gaps are gamma distributed with mean 1 / request_rate and shape `burstiness`: 1 is a Poisson process, lower
    values are burstier, higher ones more even. An infinite rate sends everything at 0.
    """
    if request_rate == float("inf"):
        return [0.0] * num
    gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), num)
    return (np.cumsum(gaps) - gaps[0]).tolist() if num else []
