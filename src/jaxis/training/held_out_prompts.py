"""The prompts of held-out rows, and what functions that score answers to them are called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.inference.conversation import Role
from jaxis.outputs import CompletionOutput
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import messages_for_template
from jaxis.training.rows import DataRow, Dialogue, Preference, raise_faults


class HeldOutPrompts:
    """What comes before the last answer of each row, as a server would send it to the model.

    Args:
      rows: The rows.
      tokenizer: The model's.
      template: Arguments of `Tokenizer.apply_chat_template`.
      max_tokens: Most tokens of a prompt.

    Attributes:
      ids: Token ids of each prompt.
      where: The row of each.
      longest: Tokens of the longest one.

    Raises:
      ConfigError: A row has no prompt, or a longer one; the error names the first such row.
    """

    def __init__(
        self, rows: Sequence[DataRow], tokenizer: Tokenizer, template: Mapping[str, Any], max_tokens: int
    ) -> None:
        self.ids: list[list[int]] = []
        self.where = [row.where for row in rows]
        self._prompts: list[Any] = []
        self._columns: dict[str, list[Any]] = {
            name: [row.columns.get(name) for row in rows]
            for name in sorted({key for row in rows for key in row.columns})
        }
        references: list[str] = []
        faults = []
        for row in rows:
            try:
                prompt, ids, reference = _prompt(row, tokenizer, template)
                if len(ids) > max_tokens:
                    raise RequestError(f"its prompt of {len(ids)} tokens leaves no room for an answer")
                self._prompts.append(prompt)
                self.ids.append(ids)
                references.append(reference)
            except RequestError as error:
                faults.append(f"{row.where}: {error}")
        raise_faults(faults)
        self._columns.setdefault("reference", references)
        self.longest = max(map(len, self.ids))

    def answered(
        self, answers: Sequence[CompletionOutput], places: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """Arguments of a function that scores answers. Conversations and their answers are lists of messages.

        Args:
          answers: The answers.
          places: Which prompt each is to; None: to all of them, in their order.
        """
        places = range(len(self._prompts)) if places is None else places
        prompts = [self._prompts[place] for place in places]
        completions = [
            answer.text if isinstance(prompt, str) else [{"role": "assistant", "content": answer.text}]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return {
            **{name: [values[place] for place in places] for name, values in self._columns.items()},
            "prompts": prompts,
            "completions": completions,
            "completion_ids": [answer.token_ids for answer in answers],
        }


def _prompt(row: DataRow, tokenizer: Tokenizer, template: Mapping[str, Any]) -> tuple[Any, list[int], str]:
    """The prompt of a row, its token ids, and the row's own answer."""
    sample = row.sample.chosen if isinstance(row.sample, Preference) else row.sample
    if not isinstance(sample, Dialogue):
        if not sample.prompt:
            raise RequestError("has no prompt to answer: leave training.metrics_function out")
        return sample.prompt, tokenizer.encode(sample.prompt), sample.completion
    last = max(i for i, message in enumerate(sample.messages) if message["role"] == Role.ASSISTANT)
    if not last:
        raise RequestError("has no prompt to answer: it begins with the assistant")
    messages = messages_for_template(
        sample.messages[:last], tokenizer, chat_template=template.get("chat_template"), tools=sample.tools
    )
    text = tokenizer.apply_chat_template(messages, tools=sample.tools, add_generation_prompt=True, **template)
    prompt = [dict(message) for message in sample.messages[:last]]
    return prompt, tokenizer.encode(text, add_special_tokens=False), sample.messages[last].get("content") or ""
