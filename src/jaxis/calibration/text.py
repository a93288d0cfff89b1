"""Text for calibration or evaluation, as windows of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import RequestError
from jaxis.prompts import tokenize_chat
from jaxis.tokenizer import Tokenizer

WINDOW_TOKENS = 512
MIN_WINDOW_TOKENS = 2  # one to predict, and one to predict it from


def read_windows(path: Path, tokenizer: Tokenizer | None, window_tokens: int = WINDOW_TOKENS) -> list[list[int]]:
    """Reads text as token ids, cut into windows that a model sees one at a time.

    Each document is cut separately. If the tokenizer begins a string with a beginning-of-sequence token, every window
    begins with it. The last window of a document is shorter; a window of a single token is left out. Raises
    RequestError if the file cannot be used, as in `read_documents`, or the text is shorter than two tokens.
    """
    windows = []
    for token_ids in read_documents(path, tokenizer):
        windows += [window for window in _cut(token_ids, tokenizer, window_tokens) if len(window) >= MIN_WINDOW_TOKENS]
    if not windows:
        raise RequestError(f"{path} has no text of at least {MIN_WINDOW_TOKENS} tokens: give a longer one")
    return windows


def read_documents(path: Path, tokenizer: Tokenizer | None) -> Iterator[list[int]]:
    """Yields the token ids of each document in a UTF-8 file.

    If its name ends in .jsonl, each line is a JSON object with "text" (a document) or "messages" (a conversation,
    rendered with the chat template). Otherwise the whole file is one document. Raises RequestError if the file cannot
    be read, a line has another form, the model has no tokenizer, or it has no chat template for conversations.
    """
    if tokenizer is None:
        raise RequestError(f"{path} is text, and the checkpoint has no tokenizer")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None
    if path.suffix != ".jsonl":
        yield tokenizer.encode(content)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _tokenize_line(line, f"{path}, line {number}", tokenizer)


def _tokenize_line(line: str, where: str, tokenizer: Tokenizer) -> list[int]:
    document = _parse(line, where)
    if "messages" not in document:
        return tokenizer.encode(document["text"])
    messages, tools = document["messages"], document.get("tools")
    try:
        return list(tokenize_chat(messages, tokenizer, tools=tools, add_generation_prompt=False).token_ids)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


def _parse(line: str, where: str) -> Mapping[str, Any]:
    """Parses a line as an object with either "text" or "messages" of the right type."""
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(document, dict):
        raise RequestError(f"{where} is {type(document).__name__}; expected an object with 'text' or 'messages'")
    if ("text" in document) == ("messages" in document):
        raise RequestError(f"{where} needs exactly one of 'text' and 'messages'")
    key, expected = ("text", str) if "text" in document else ("messages", list)
    if not isinstance(document[key], expected):
        kind = "a string" if expected is str else "a list of messages"
        raise RequestError(f"{where}: {key!r} is {type(document[key]).__name__}; expected {kind}")
    return document


def _cut(token_ids: list[int], tokenizer: Tokenizer | None, window_tokens: int) -> Iterator[list[int]]:
    bos = None if tokenizer is None else tokenizer.bos_token_id
    start = token_ids[:1] if bos is not None and token_ids[:1] == [bos] else []
    length = window_tokens - len(start)
    for first in range(len(start), len(token_ids), length):
        yield start + token_ids[first : first + length]
