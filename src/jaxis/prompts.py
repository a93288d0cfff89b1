"""Converts users' prompts to token ids."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

import numpy as np

from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer

Message = Mapping[str, Any]
Messages = Sequence[Message]
Prompt = str | Sequence[int] | Mapping[str, Any]
ContentFormat = Literal["auto", "string", "openai"]

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
# Keys of vLLM's prompts that are accepted only with the value None.
_UNSUPPORTED_KEYS = {"multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "token_type_ids", "prompt_embeds"}


@dataclass(frozen=True)
class EmbeddedInput:
    """A part of a prompt in which some tokens have embeddings from an encoder, such as an image's.

    Attributes:
      digest: SHA-256 of everything besides the model that the embeddings depend on. Inputs with equal digests have
        equal keys and values if the tokens before them are equal.
      start: Position of the first token in the prompt.
      num_tokens: Number of tokens.
      rows: Tokens with such an embedding, counted from `start`, in ascending order; the other tokens are ordinary.
      shape: Shape of the uint8 array from which the encoder computes the embeddings.
      data: Bytes of that array.
      is_bidirectional: True if the tokens see each other, not just those before them; a step then computes all of them.
      grid: Rows and columns of the tokens if RoPE counts them by both (see `rope_positions`); None if as text.
      times: Time of each grid relative to the first; several grids (of a video) follow each other in the tokens.
      order: Indices of the encoder's embeddings that the rows take; None means each embedding in order.
      weights: Factors of the embeddings in `order` if each row takes the sum of equally many; None if one each.
    """

    digest: bytes
    start: int
    num_tokens: int
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    data: bytes
    is_bidirectional: bool = False
    grid: tuple[int, int] | None = None
    times: tuple[int, ...] = (0,)
    order: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    def overlaps(self, start: int, stop: int) -> bool:
        """Returns whether it has tokens at positions from `start` to before `stop`."""
        return self.start < stop and start < self.stop

    def rows_between(self, start: int, stop: int) -> slice:
        """Returns the slice of its embeddings for positions from `start` to before `stop`."""
        first = bisect.bisect_left(self.rows, start - self.start)
        return slice(first, bisect.bisect_left(self.rows, stop - self.start, first))


def rope_positions(inputs: Iterable[EmbeddedInput], start: int, stop: int) -> np.ndarray:
    """Returns time, row and column of the tokens from `start` to before `stop` (M-RoPE, arXiv:2409.12191).

    A token of text has one number n for all three, one more than the largest number before it. In an input with a grid,
    n is that number for the first token. A token of the input has as time n plus the time of its grid, as row n plus
    its row, and as column n plus its column.

    Args:
      inputs: Inputs of the prompt, in order.
      start: Index of the first token in the sequence.
      stop: Index after the last token.

    Returns:
      int32 [3, stop - start].
    """
    positions = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    shift = 0  # of the tokens after the inputs so far
    for item in inputs:
        if item.grid is None or item.start >= stop:
            continue
        rows, columns = item.grid
        first = item.start + shift
        places = np.arange(max(item.start, start), min(item.stop, stop)) - item.start
        if places.size:
            inside = positions[:, item.start + places[0] - start :][:, : places.size]
            of_grid, place = np.divmod(places.astype(np.int32), rows * columns)
            inside[:] = first
            inside[0] += np.asarray(item.times, np.int32)[of_grid]
            inside[1] += place // columns
            inside[2] += place % columns
        step = max(rows, columns, item.times[-1] + 1) - item.num_tokens
        positions[:, max(item.stop - start, 0) :] += step
        shift += step
    return positions


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt ready for the engine.

    Attributes:
      text: The string; None if the prompt was given as token ids.
      token_ids: Tokens, not checked against the model's vocabulary.
      cache_salt: Salt of the prefix cache; only requests with equal salts share cached prefixes.
      adapter: Digest of the adapter to use; b"" for the model itself.
      inputs: Parts with embeddings from an encoder, in order, without overlap.
    """

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None
    adapter: bytes = b""
    inputs: tuple[EmbeddedInput, ...] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of the engine's features, by their names."""
        return {"adapter": self.adapter, "inputs": self.inputs}


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt as a list of one, several as a list.

    Raises:
      RequestError: The value is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {type(prompts).__name__}; expected a string, a list of token ids, or a list of either"
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int | np.integer) for item in items):
        return [items]
    return items


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None, where: str) -> TokenizedPrompt:
    """Tokenizes one prompt.

    Args:
      prompt: A string, token ids, or a dict with one of "prompt" and "prompt_token_ids", and optionally "cache_salt".
      tokenizer: Tokenizer of the checkpoint; None if it has none.
      where: Name of the prompt in errors.

    Raises:
      RequestError: The prompt is of another type, or is a string and there is no tokenizer.
    """
    cache_salt = None
    if isinstance(prompt, Mapping):
        prompt, cache_salt = _open(prompt, where)
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise RequestError(f"{where} is {type(prompt).__name__}; expected a string or a list of token ids")
        return TokenizedPrompt(None, prompt, cache_salt)
    if tokenizer is None:
        raise RequestError(f"{where} is text, and the checkpoint has no tokenizer: give a list of token ids")
    return TokenizedPrompt(prompt, tokenizer.encode(prompt), cache_salt)


def _open(prompt: Mapping[str, Any], where: str) -> tuple[str | Sequence[int], str | None]:
    """Returns the text or token ids, and the cache salt, of a prompt in a dict."""
    for key in _UNSUPPORTED_KEYS & prompt.keys():
        if prompt[key] is not None:
            raise RequestError(f"{where} has {key!r}, which is not supported: prompts are text or token ids")
    if {"role", "content"} <= prompt.keys():
        raise RequestError(f"{where} is a message of a conversation, not a prompt: call llm.chat(messages)")
    if unknown := set(prompt) - _KEYS - _UNSUPPORTED_KEYS:
        raise RequestError(f"{where} has unknown keys {sorted(map(str, unknown))}; known: {sorted(_KEYS)}")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise RequestError(f"{where} needs exactly one of 'prompt' and 'prompt_token_ids'")
    cache_salt = prompt.get("cache_salt")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(f"{where} has the cache_salt {cache_salt!r}; expected a string")
    key = "prompt" if "prompt" in prompt else "prompt_token_ids"
    if isinstance(prompt[key], str) != (key == "prompt"):
        expected = "a string" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{where}: {key!r} is {type(prompt[key]).__name__}; expected {expected}")
    return prompt[key], cache_salt


def as_conversation_list(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Returns one conversation as a list of one, several as a list.

    Raises:
      RequestError: The value is neither.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is {type(messages).__name__}; expected a list of {{'role': ..., 'content': ...}}, or a list of "
            "such lists"
        )
    items: list[Any] = list(messages)
    return [items] if items and isinstance(items[0], Mapping) else items


def is_conversation(prompt: Prompt | Messages) -> TypeGuard[Messages]:
    """Returns whether a value is a list of messages rather than a prompt."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def tokenize_chat(messages: Sequence[Message], tokenizer: Tokenizer | None, **template: Any) -> TokenizedPrompt:
    """Renders one conversation with the chat template; `template` holds arguments of `Tokenizer.apply_chat_template`.

    Raises:
      RequestError: There is no chat template, or it refuses the messages.
    """
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer with a chat template, and the checkpoint has none")
    text = tokenizer.apply_chat_template(messages, **template)
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


def with_content_format(messages: Messages, content_format: ContentFormat) -> Messages:
    """Returns the messages with contents in the format that a chat template expects.

    Args:
      messages: One conversation.
      content_format: "string" joins the texts of a list of parts by line ends; "openai" makes a string a list of one
        part; "auto" leaves contents as they are.

    Raises:
      RequestError: The format is unknown.
    """
    if content_format not in get_args(ContentFormat):
        raise RequestError(
            f"chat_template_content_format={content_format!r} must be one of {', '.join(get_args(ContentFormat))}"
        )
    if content_format == "auto" or not all(isinstance(message, Mapping) for message in messages):
        return messages
    convert = _as_string if content_format == "string" else _as_parts
    return [
        {**message, "content": convert(message["content"])} if "content" in message else message for message in messages
    ]


def _as_string(content: Any) -> Any:
    is_texts = isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    )
    return "\n".join(part["text"] for part in content) if is_texts else content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def checked_token_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Returns a prompt's token ids as a list of int.

    Takes milliseconds for 100,000 tokens, since it runs between two steps.

    Args:
      token_ids: Sequence of at least one id: a list, a numpy array, or another sequence.
      vocab_size: V of the model.

    Raises:
      RequestError: An id is not an integer, or not a token of the model.
    """
    checked = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
    if set(map(type, checked)) != {int}:
        for token_id in checked:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise RequestError(f"the prompt holds {token_id!r}; token ids are integers")
        checked = list(map(int, checked))
    for token_id in (min(checked), max(checked)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"the prompt holds token {token_id}; the model's token ids are 0 to {vocab_size - 1}")
    return checked


def check_tokenization_kwargs(tokenization_kwargs: Mapping[str, Any] | None) -> None:
    """Raises RequestError unless vLLM's `tokenization_kwargs` is empty: tokenizers have no other settings."""
    if tokenization_kwargs:
        raise RequestError(
            f"tokenization_kwargs={dict(tokenization_kwargs)!r} is not supported: give the prompt's token ids instead"
        )
