from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.jsonl.conversation import Role
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_messages import messages_for_template
from jaxis.training.rows import DataRow, Dialogue, Preference, of_each
from jaxis.training.turns import check_template


class HeldOutPrompts:
    """The part of each data row before its last answer, encoded as a server would send it to the model.

    Args:
      template: Arguments of `Tokenizer.apply_chat_template`.
      max_tokens: Length of the longest prompt in tokens.
      tools: JSON schemas of functions that the model may call; None: those of each data row.

    Attributes:
      ids: Token ids of each prompt.
      prompts: Source of each prompt: a string, or messages.
      where: Place of each prompt's data row.
      longest: Length of the longest prompt in tokens.

    Raises:
      ConfigError: A data row has no prompt, or one that is too long. The error names the first such row.
    """

    def __init__(
        self,
        rows: Sequence[DataRow],
        tokenizer: Tokenizer,
        template: Mapping[str, Any],
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.where = [row.where for row in rows]
        self._tokenizer, self._template = tokenizer, template
        self._columns: dict[str, list[Any]] = {
            name: [row.columns.get(name) for row in rows]
            for name in sorted({key for row in rows for key in row.columns})
        }

        def prompt_of(row: DataRow) -> tuple[Any, list[int], str]:
            prompt, ids, reference = self._prompt(row, tools)
            if len(ids) > max_tokens:
                raise RequestError(f"its prompt of {len(ids)} tokens leaves no room for an answer")
            return prompt, ids, reference

        found = of_each(rows, prompt_of)
        self.prompts: list[Any] = [prompt for prompt, _, _ in found]
        self.ids: list[list[int]] = [ids for _, ids, _ in found]
        self._columns.setdefault("reference", [reference for _, _, reference in found])
        self.longest = max(map(len, self.ids))

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Returns the token ids of a conversation that the model is to continue.

        Raises RequestError if the chat template refuses the conversation.
        """
        source = self._template.get("chat_template")
        check_template(self._tokenizer)
        written = messages_for_template(messages, self._tokenizer, chat_template=source, tools=tools)
        return self._tokenizer.encode_chat(written, tools=tools, add_generation_prompt=True, **self._template)

    def columns_of(self, place: int) -> dict[str, Any]:
        return {name: values[place] for name, values in self._columns.items()}

    def answered(
        self, completions: Sequence[Any], completion_ids: Sequence[list[int]], places: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """Returns arguments of a scoring function. Conversations and their answers are lists of messages.

        `places` has the index of each answer's prompt; None: one answer to every prompt, in order.
        """
        places = range(len(self.prompts)) if places is None else places
        prompts = [self.prompts[place] for place in places]
        return {
            **{name: [values[place] for place in places] for name, values in self._columns.items()},
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": completion}]
                if isinstance(prompt, list) and isinstance(completion, str)
                else completion
                for prompt, completion in zip(prompts, completions, strict=True)
            ],
            "completion_ids": list(completion_ids),
        }

    def _prompt(self, row: DataRow, tools: Sequence[Mapping[str, Any]] | None) -> tuple[Any, list[int], str]:
        """Returns the prompt of a data row, its token ids, and the row's own answer."""
        content = row.content.chosen if isinstance(row.content, Preference) else row.content
        if not isinstance(content, Dialogue):
            if not content.prompt:
                raise RequestError("has no prompt to answer")
            return content.prompt, self._tokenizer.encode(content.prompt), content.completion
        last = max(i for i, message in enumerate(content.messages) if message["role"] == Role.ASSISTANT)
        if not last:
            raise RequestError("has no prompt to answer: it begins with the assistant")
        prompt = [dict(message) for message in content.messages[:last]]
        ids = self.encode(prompt, content.tools if tools is None else tools)
        return prompt, ids, content.messages[last].get("content") or ""
