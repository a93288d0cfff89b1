"""Texts of a request that are read in the same way, and the scores of their pairs. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from jaxis.errors import RequestError
from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.pooling.inputs import InputReader, PoolingInput
from jaxis.pooling.pairs import pair_indices, similarities
from jaxis.prompts import Prompt


@dataclass(frozen=True)
class TextGroup:
    """Texts.

    Attributes:
      field: Field of the request that has them, for errors; None numbers them.
      is_list: True if errors name the text's index in the field.
      kind: Name of one of the checkpoint's prompts; None for its default.
      truncate_tokens: Length to which longer texts are cut, as in `InputReader.read`.
    """

    texts: Sequence[Prompt]
    field: str | None = None
    is_list: bool = True
    kind: str | None = None
    truncate_tokens: int | None = None

    @classmethod
    def of(
        cls,
        value: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        field: str,
        *,
        kind: str | None = None,
        truncate_tokens: int | None = None,
    ) -> TextGroup:
        """Returns the texts of a field: one string or list of token ids, or a list of them."""
        is_list = not isinstance(value, str) and not (value and isinstance(value[0], int))
        texts = cast(Sequence[Prompt], value if is_list else [value])
        return cls(texts, field, is_list, kind=kind, truncate_tokens=truncate_tokens)

    def name(self, index: int) -> str:
        return f"{self.field}[{index}]" if self.is_list else self.field or ""

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def num_characters(self) -> int:
        """Number of characters, or of token ids, which are only checked."""
        return sum(map(len, self.texts))

    def read(self, reader: InputReader) -> list[PoolingInput]:
        """Returns the token ids; raises RequestError as `InputReader.read` does."""
        name = None if self.field is None else self.name
        return reader.read(self.texts, truncate_tokens=self.truncate_tokens, kind=self.kind, name=name)


@dataclass(frozen=True)
class PairGroup:
    """Pairs of strings, which a cross-encoder reads together.

    Attributes:
      names: Returns the names of a pair's strings in errors, by its index; None numbers them.
      truncate_tokens, instruction: Arguments of `InputReader.read_pairs`.
    """

    pairs: Sequence[tuple[str, str]]
    names: Callable[[int], tuple[str, str]] | None = None
    truncate_tokens: int | None = None
    instruction: str | None = None

    @property
    def num_texts(self) -> int:
        return len(self.pairs)

    @property
    def num_characters(self) -> int:
        return sum(len(text) for pair in self.pairs for text in pair)

    def read(self, reader: InputReader) -> list[PoolingInput]:
        """Returns the token ids; raises RequestError as `InputReader.read_pairs` does."""
        return reader.read_pairs(
            self.pairs, truncate_tokens=self.truncate_tokens, instruction=self.instruction, names=self.names
        )


def check_sides(first: TextGroup, second: TextGroup) -> None:
    """Raises RequestError unless the first side has one string, or as many as the second."""
    if first.num_texts not in (1, second.num_texts):
        raise RequestError(
            f"has {first.num_texts} texts and {second.field} has {second.num_texts}: give one, or as many",
            param=first.field,
        )


class PairScoring:
    """Scores of pairs: logits of a cross-encoder that reads both texts, or the cosines of their vectors.

    A side of one string is paired with each string of the other.

    Attributes:
      groups: Texts whose vectors or logits are needed.

    Args:
      classifier: Settings of the cross-encoder; None for an embedding model.
      reader: Reader of the model's inputs.
      first, second: Sides of the pairs, strings.
      instruction: Instruction to the model, as in `InputReader.read_pairs`.

    Raises:
      RequestError: The model is a classifier of several labels, or takes no instruction.
    """

    def __init__(
        self,
        classifier: ClassifierSettings | None,
        reader: InputReader,
        first: TextGroup,
        second: TextGroup,
        instruction: str | None,
    ) -> None:
        self._classifier, self._indices = classifier, pair_indices(first.num_texts, second.num_texts)
        self.groups: list[TextGroup] | list[PairGroup]
        if classifier is not None:
            classifier.check_scores()
            pairs = [(str(first.texts[i]), str(second.texts[j])) for i, j in self._indices]
            names = [(first.name(i), second.name(j)) for i, j in self._indices]
            named = None if first.field is None else names.__getitem__
            self.groups = [PairGroup(pairs, named, first.truncate_tokens, instruction)]
            return
        reader.check_instruction(instruction)
        # Each side gets the checkpoint's prompt for its kind of text.
        self.groups = [
            replace(side, kind=kind if reader.has_kind(kind) else None)
            for kind, side in (("query", first), ("document", second))
        ]

    def scores(self, vectors: Sequence[np.ndarray], *, use_activation: bool) -> list[float]:
        """Returns the score of each pair.

        Args:
          vectors: Vectors or logits of each of `groups`.
          use_activation: True to convert a classifier's logit to a probability.
        """
        if self._classifier is not None:
            return self._classifier.scores(vectors[0], use_activation=use_activation)[:, 0].tolist()
        first, second = ([pair[side] for pair in self._indices] for side in (0, 1))
        return similarities(vectors[0][first], vectors[1][second])

    def token_ids(self, read: Sequence[Sequence[PoolingInput]]) -> list[list[int]]:
        """Returns the token ids of each pair, given the inputs of `groups`."""
        if self._classifier is not None:
            return [each.token_ids for each in read[0]]
        return [read[0][i].token_ids + read[1][j].token_ids for i, j in self._indices]
