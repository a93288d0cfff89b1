"""Conversion of data rows to examples: token ids, each marked as learned or not.

In a conversation, learned tokens are those that the model would have to write: the assistant's text and the token that
ends its turn (`turns.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxis.errors import ConfigError, RequestError
from jaxis.jsonl.conversation import Role
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import check_tool_arguments, messages_for_template
from jaxis.training.config.data import FINAL_TURN
from jaxis.training.rows import DataRow, Dialogue, Preference, Text, of_each
from jaxis.training.turns import Span, TurnEncoder, check_template


@dataclass(frozen=True)
class Example:
    """Token ids int32 [L], some of which are learned, bool [L], and the place of the data row.

    The first token is never learned, because nothing predicts it.
    """

    ids: np.ndarray
    learned: np.ndarray
    where: str

    @property
    def num_learned(self) -> int:
        return int(self.learned.sum())


@dataclass
class Encoded:
    """The examples of a data set.

    Attributes:
      examples: One for each data row; one for each turn if the chat template changes earlier turns; two (chosen and
        rejected) for each data row of preferences.
      counts: Numbers of things that a user may not expect, by their names in `_NOTES`.
    """

    examples: list[Example]
    counts: Counter[str] = field(default_factory=Counter[str])

    def notes(self, max_tokens: int) -> list[str]:
        """Returns lines about things that a user may not expect, such as examples cut to `max_tokens`."""
        values = {"max_tokens": max_tokens, "all": self.counts["all"]}
        return [line.format(self.counts[name], **values) for name, line in _NOTES.items() if self.counts[name]]


_NOTES = {
    "cut": "{} of {all} examples were cut to {max_tokens} tokens",
    "divided": "{} conversations became an example for each turn: the chat template writes earlier turns otherwise "
    "than the last one",
    "unlike": "{} answers do not begin as the chat template opens an answer; they are learned from where the two "
    "differ",
    "endless": "{} answers end without a special token, such as <|im_end|>: the model does not learn to end them",
    "opened": "{} answers are learned with what opens them, which is in the prompt when the model is served: the "
    "template's generation blocks begin before it",
}


class ExampleEncoder:
    """Encoder of data rows as examples.

    Args:
      template: Arguments of `Tokenizer.apply_chat_template`, such as enable_thinking.
      target: Turns of the assistant that are learned; see `SplitParams`.
      max_tokens: Length to which examples are cut.
    """

    def __init__(self, tokenizer: Tokenizer, template: Mapping[str, Any], target: str, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._template = dict(template)
        self._target = target
        self._max_tokens = max_tokens
        self._turns = TurnEncoder(tokenizer, template)

    def encode(self, rows: Sequence[DataRow], encoded: Encoded | None = None) -> Encoded:
        """Encodes all data rows, and adds them to the result of earlier calls, if given.

        Raises ConfigError, which names the first such row, if the chat template refuses a data row, or none of its
        tokens is learned.
        """
        encoded = Encoded([]) if encoded is None else encoded
        found = [*itertools.chain(*of_each(rows, lambda row: self._of_row(row, encoded)))]
        encoded.examples += found
        encoded.counts["all"] += len(found)
        return encoded

    def _of_row(self, row: DataRow, encoded: Encoded) -> list[Example]:
        if isinstance(row.content, Preference):
            pair = []
            for side in (row.content.chosen, row.content.rejected):
                # The two may differ in the number of their messages: each is learned to its end.
                [*_, last] = self._spans(side, encoded)
                pair.append(self._cut(*last, row.where, encoded))
            return pair
        spans = list(self._spans(row.content, encoded))
        encoded.counts["divided"] += len(spans) > 1
        return [self._cut(ids, learned, row.where, encoded) for ids, learned in spans]

    def _cut(self, ids: list[int], learned: np.ndarray, where: str, encoded: Encoded) -> Example:
        encoded.counts["cut"] += len(ids) > self._max_tokens
        example = Example(np.asarray(ids[: self._max_tokens], np.int32), learned[: self._max_tokens], where)
        if not example.num_learned:
            raise RequestError(
                f"no token of it is learned: its first {self._max_tokens} tokens, of {len(ids)}, end before the answer "
                "does; raise model.model_max_length or shorten the row"
                if len(ids) > self._max_tokens
                else "no token of it is learned: its answer is empty"
            )
        return example

    def _spans(self, content: Dialogue | Text, encoded: Encoded) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yields token ids and their mask of learned tokens for each example that a data row becomes."""
        if isinstance(content, Text):
            yield self._text(content)
            return
        check_template(self._tokenizer)
        check_tool_arguments(content.messages)  # a server takes calls that were cut off, which nobody wants to learn
        messages = messages_for_template(
            content.messages, self._tokenizer, chat_template=self._template.get("chat_template"), tools=content.tools
        )
        turns = [i for i, m in enumerate(messages) if i >= content.first and m["role"] == Role.ASSISTANT]
        turns = [i for i in turns if i not in content.skipped]
        ids: list[int] = []
        spans: list[Span] = []
        for turn in turns[-1:] if self._target == FINAL_TURN else turns:
            found = self._turns.encode(messages[: turn + 1], content.tools)
            encoded.counts["unlike"] += found.is_unlike
            encoded.counts["endless"] += found.is_endless
            encoded.counts["opened"] += found.has_opening
            if spans and found.ids[: len(ids)] != ids:
                yield ids, _mask(len(ids), spans)
                spans = []
            ids = found.ids
            spans += found.spans
        yield ids, _mask(len(ids), spans)

    def _text(self, text: Text) -> tuple[list[int], np.ndarray]:
        eos = self._tokenizer.eos_token_id
        if text.prompt is None:
            ids, start = self._tokenizer.encode(text.completion), 0
        else:
            prompt_ids = self._tokenizer.encode(text.prompt)
            ids, start = self._tokenizer.encode(text.prompt + text.completion), len(prompt_ids)
            if ids[:start] != prompt_ids:
                ids = prompt_ids + self._encode(text.completion)
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return ids, _mask(len(ids), [(start, len(ids))])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _mask(length: int, spans: Sequence[Span]) -> np.ndarray:
    learned = np.zeros(length, bool)
    for start, end in spans:
        learned[start:end] = True
    learned[:1] = False
    return learned


def check_kind(rows: Sequence[DataRow], trainer_type: str, *, wants_pairs: bool) -> None:
    """Raises ConfigError if data rows are preferences and should not be, or the reverse."""
    for row in rows:
        if isinstance(row.content, Preference) != wants_pairs:
            needed = "chosen and rejected" if wants_pairs else "what is learned, not chosen and rejected"
            raise ConfigError(f"{row.where}: training.trainer_type={trainer_type} needs rows with {needed}")


def shown(example: Example, tokenizer: Tokenizer) -> str:
    """Returns an example as text, with its learned tokens in double angle brackets."""
    parts: list[str] = []
    changes = np.flatnonzero(np.diff(example.learned.astype(np.int8), prepend=-1)).tolist()
    for start, end in zip(changes, [*changes[1:], len(example.ids)], strict=True):
        text = tokenizer.decode(example.ids[start:end].tolist(), skip_special_tokens=False)
        parts.append(
            f"\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}{text}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"
            if example.learned[start]
            else text
        )
    return "".join(parts)
