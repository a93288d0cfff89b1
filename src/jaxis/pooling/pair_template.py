"""Prompts of decoders that were trained as rerankers: a query and a document in words. Imports no JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jaxis.tokenizer import Tokenizer


@dataclass(frozen=True)
class PairTemplate:
    """The text around the two texts of a pair.

    Attributes:
      head: Start of the prompt, tokenized separately.
      instruction: Default task in words.
      tail: End of the prompt, tokenized separately.
    """

    head: str
    instruction: str
    tail: str

    def encode(
        self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None, limit: int | None
    ) -> list[int]:
        """Returns the token ids of a pair.

        Args:
          tokenizer: Tokenizer of the model.
          query: The query.
          document: The document; its last tokens are cut to reach the limit.
          instruction: Task in words; None: the template's.
          limit: Limit of the tokens; None: no limit.

        Returns:
          The token ids; none if the limit leaves no room for the document.

        Raises:
          ContextLengthError, RequestError: Tokenization fails, as in `Tokenizer.encode`.
        """
        if query.startswith(self.head):  # written out by the caller, as vLLM's examples do
            parts = [tokenizer.encode(query + document, add_special_tokens=False)]
            return parts[0] if limit is None or len(parts[0]) <= limit else []
        before = f"<Instruct>: {instruction or self.instruction}\n<Query>: {query}\n<Document>:"
        head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in (self.head, self.tail))
        body = tokenizer.encode(f"{before} {document}", add_special_tokens=False)
        if limit is not None and (room := limit - len(head) - len(tail)) < len(body):
            if room <= len(tokenizer.encode(before, add_special_tokens=False)):
                return []
            body = body[:room]
        return [*head, *body, *tail]


QWEN3_RERANKER = PairTemplate(
    head="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    tail="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""Template of Qwen3-Reranker's model card, whose score is the probability of "yes" against "no"."""
QWEN3_RERANKER_TOKENS = ("no", "yes")

_NAME = re.compile(r"qwen3[-_ ]?reranker", re.IGNORECASE)
_CARD_BYTES = 1 << 14


def is_qwen3_reranker(path: Path) -> bool:
    """Returns whether a checkpoint's folder, file, Hub name or card is called Qwen3-Reranker.

    Args:
      path: Folder or file; in the Hub's cache it is below `models--OWNER--NAME/snapshots`.
    """
    hub_names = [part for part in path.parts if part.startswith("models--")]
    if any(map(_NAME.search, [path.name, *hub_names])):
        return True
    card = path / "README.md"
    if not card.is_file():
        return False
    with card.open("rb") as file:
        lines = file.read(_CARD_BYTES).decode("utf-8", "replace").splitlines()
    title = next((line for line in lines if line.startswith("# ")), "")
    return _NAME.search(title) is not None
