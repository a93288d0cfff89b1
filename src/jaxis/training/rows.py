"""Data rows of files: conversations, prompts with completions, texts, and preference pairs.

The formats are those of TRL (https://huggingface.co/docs/trl/dataset_formats) and Oumi. The keys of a row decide its
format. Keys of no format are kept as columns.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, TypeVar

from jaxis.errors import ConfigError, RequestError
from jaxis.jsonl.conversation import Conversation, Role
from jaxis.training.config.data import DatasetParams
from jaxis.training.data_files import DataFile, RawRow, digest_of, files_of, rows_of

Row = TypeVar("Row")
Converted = TypeVar("Converted")
_KEYS = {
    *("messages", "tools", "conversation", "prompt", "completion", "instruction", "input", "output", "system", "text"),
    *("chosen", "rejected", "conversations"),
}
_SENDERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
_SHAPES = (
    "messages; conversation; conversations; prompt and completion; instruction and output; text; chosen and rejected"
)


@dataclass(frozen=True)
class Dialogue:
    """A conversation.

    Attributes:
      messages: Messages, as chat templates take them.
      tools: JSON schemas of functions that the model may call; None: none.
      first: Index of the first message that may be learned.
      skipped: Indices of the assistant's messages that are not learned.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    first: int = 0
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Text:
    """Text without a chat template: a learned completion, after a prompt, if any."""

    prompt: str | None
    completion: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Dialogue | Text
    rejected: Dialogue | Text


Content: TypeAlias = Dialogue | Text | Preference


@dataclass(frozen=True)
class DataRow:
    """A data row of a file.

    `where` is the file and the number of the line or row, from 1, and `columns` the values under keys that belong to no
    format.
    """

    content: Content
    where: str
    columns: Mapping[str, Any] = field(default_factory=dict)


def read_rows(
    dataset: DatasetParams, seed: int, prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> tuple[list[DataRow], dict[str, str]]:
    """Reads the selected data rows of a data set; returns them and the digest of each file, by path.

    `seed` is that of a random selection; `prepare` is applied to each raw row first. Raises ConfigError, which
    names the first such row, if a file cannot be read, or a row has no valid content.
    """

    with ThreadPoolExecutor() as downloads:
        paths = list(downloads.map(DataFile.fetch, files_of(dataset)))
    rows = data_rows(itertools.chain(*map(rows_of, paths)), prepare)
    digests = {str(path): digest_of(path) for path in paths}
    if not rows:
        raise no_rows(dataset)
    if dataset.sample_count is None or dataset.sample_count >= len(rows):
        return rows, digests
    if dataset.shuffle:
        drawn = random.Random(seed).sample(range(len(rows)), dataset.sample_count)
        return [rows[i] for i in sorted(drawn)], digests
    return rows[: dataset.sample_count], digests


def data_rows(
    rows: Iterable[RawRow], prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> list[DataRow]:
    """Reads data rows; arguments and errors as of `read_rows`."""

    def row_of(raw: RawRow) -> DataRow:
        where, read = raw
        columns = read()
        others = {key: item for key, item in columns.items() if key not in _KEYS}
        return DataRow(read_content(prepare(columns)), where, others)

    return of_each(rows, row_of, where=itemgetter(0))


def no_rows(dataset: DatasetParams) -> ConfigError:
    name = dataset.hub_id or dataset.path
    return ConfigError(f"{name} has no rows: give a file with a JSON object a line, CSV or parquet")


def with_answer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a raw row with an empty answer if it is a prompt alone."""
    prompt, messages = row.get("prompt"), row.get("messages")
    nothing = {"role": "assistant", "content": ""}
    if prompt is not None and row.get("completion") is None:
        return {**row, "completion": [nothing] if isinstance(prompt, list) else ""}
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        return row if messages[-1].get("role") == "assistant" else {**row, "messages": [*messages, nothing]}
    return row


def of_each(
    rows: Iterable[Row], convert: Callable[[Row], Converted], where: Callable[[Row], str] = attrgetter("where")
) -> list[Converted]:
    """Converts rows, or what is made of them.

    Raises ConfigError, which names the first one for which `convert` raises RequestError, and the number of others.
    """
    found: list[Converted] = []
    faults: list[str] = []
    for row in rows:
        try:
            found.append(convert(row))
        except RequestError as error:
            faults.append(f"{where(row)}: {error}")
    if faults:
        more = f" (and {len(faults) - 1} more such rows)" if len(faults) > 1 else ""
        raise ConfigError(f"{faults[0]}{more}")
    return found


def read_content(row: Mapping[str, Any]) -> Content:
    """Returns the content of a line's object. Raises RequestError if it has none of the known shapes."""
    for keys, read in _READERS:
        if all(row.get(key) is not None for key in keys):
            return read(row)
    raise RequestError(f"has the keys {', '.join(map(repr, sorted(row))) or 'of an empty object'}; expected {_SHAPES}")


def _dialogue(messages: object, tools: object, first: int = 0) -> Dialogue:
    if isinstance(tools, str):  # tables of columns hold nested objects as strings
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RequestError("tools is a string that is not JSON") from None
    messages, skipped = _without_weights(messages)
    conversation = Conversation.from_dict({"messages": messages, "tools": tools or None})
    if any(message.has_images for message in conversation.messages):
        raise RequestError("has an image: only text is learned")
    answers = {i for i, each in enumerate(conversation.messages) if i >= first and each.role == Role.ASSISTANT}
    if not answers - skipped:
        raise RequestError("has no message of the assistant to learn")
    return Dialogue([message.for_template() for message in conversation.messages], conversation.tools, first, skipped)


def _without_weights(messages: object) -> tuple[object, frozenset[int]]:
    """Returns messages without OpenAI's `weight`, and the indices of those whose weight is 0."""
    if not isinstance(messages, list):
        return messages, frozenset()
    found, skipped = [], set[int]()
    for i, message in enumerate(messages):
        if isinstance(message, Mapping) and (weight := message.get("weight")) is not None:
            if isinstance(weight, bool) or weight not in (0, 1) or message.get("role") != Role.ASSISTANT:
                raise RequestError(f"messages[{i}].weight={weight!r} must be 0 or 1, of a message of the assistant")
            skipped |= set() if weight else {i}
            message = {key: value for key, value in message.items() if key != "weight"}
        found.append(message)
    return found, frozenset(skipped)


def _conversations(row: Mapping[str, Any]) -> Dialogue:
    """Reads ShareGPT's turns {"from", "value"}; those with {"role", "content"} are messages."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RequestError('conversations must be a list of {"from", "value"}')
    messages: list[Mapping[str, Any]] = []
    for i, turn in enumerate(turns):
        if "role" in turn:
            messages.append(turn)
        elif (sender := turn.get("from")) not in _SENDERS or not isinstance(turn.get("value"), str):
            raise RequestError(
                f'conversations[{i}] needs "value", a string, and "from", one of {", ".join(_SENDERS)}, not {sender!r}'
            )
        else:
            weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
            messages.append({"role": _SENDERS[sender], "content": turn["value"], **weight})
    if system := _string(row, "system"):
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(messages, row.get("tools"))


def _conversation(row: Mapping[str, Any]) -> Dialogue:
    inner = row["conversation"]
    if not isinstance(inner, Mapping) or "messages" not in inner:
        raise RequestError('conversation must be an object with "messages"')
    return _dialogue(inner["messages"], inner.get("tools", row.get("tools")))


def _instruction(row: Mapping[str, Any]) -> Dialogue:
    instruction, given, output = (_string(row, key) for key in ("instruction", "input", "output"))
    asked = f"{instruction}\n\n{given}" if given else instruction
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    if system := _string(row, "system"):
        messages.insert(0, {"role": "system", "content": system})
    return _dialogue(messages, None)


def _string(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{key} must be a string, not {type(value).__name__}")
    return value or ""


def _text(row: Mapping[str, Any]) -> Text:
    if not (text := _string(row, "text")):
        raise RequestError("text is empty")
    return Text(None, text)


def _completion(row: Mapping[str, Any]) -> Dialogue | Text:
    return _answer(row, "prompt", "completion")


def _preference(row: Mapping[str, Any]) -> Preference:
    if row.get("prompt") is not None:
        return Preference(_answer(row, "prompt", "chosen"), _answer(row, "prompt", "rejected"))
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise RequestError("chosen and rejected are strings, and there is no prompt: give prompt")
    first = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if first is None:
        raise RequestError("chosen and rejected do not differ")
    tools = row.get("tools")
    return Preference(_dialogue(chosen, tools, first), _dialogue(rejected, tools, first))


def _answer(row: Mapping[str, Any], prompt_key: str, key: str) -> Dialogue | Text:
    """Returns a prompt with its answer, given as two strings or two lists of messages."""
    prompt, answer = row[prompt_key], row[key]
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise RequestError(f"{key} is empty")
        return Text(prompt, answer)
    if isinstance(prompt, list) and isinstance(answer, list):
        return _dialogue([*prompt, *answer], row.get("tools"), len(prompt))
    raise RequestError(f"{prompt_key} and {key} must be two strings, or two lists of messages")


_READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Content]], ...] = (
    (("chosen", "rejected"), _preference),
    (("messages",), lambda row: _dialogue(row["messages"], row.get("tools"))),
    (("conversation",), _conversation),
    (("conversations",), _conversations),
    (("prompt", "completion"), _completion),
    (("instruction", "output"), _instruction),
    (("text",), _text),
)
