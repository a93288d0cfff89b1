"""Conversion of users' inputs to token ids. Imports no JAX, for the server's process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxis.errors import ContextLengthError, RequestError
from jaxis.pooling.pair_template import PairTemplate
from jaxis.pooling.pooling_config import PoolingSettings
from jaxis.prompts import Prompt, tokenize_prompt
from jaxis.tokenizer import Tokenizer

TRUNCATE = "truncate_prompt_tokens"


@dataclass(frozen=True)
class PoolingInput:
    """Input of a vector.

    Attributes:
      text: The text, if the input was text.
      token_ids: Token ids, at least one.
      second_start: Start of the second text of a pair; the number of tokens if the input is not a pair.
    """

    text: str | None
    token_ids: list[int]
    second_start: int


class InputReader:
    """Reader of inputs.

    Attributes:
      tokenizer: Tokenizer of the checkpoint; None: inputs must be token ids.
      max_tokens: Limit of an input's tokens.

    Args:
      tokenizer, max_tokens: Values of the attributes.
      settings: Settings with the prompts that texts begin with.
      vocab_size: Size of the vocabulary, which token ids must be below.
      template: Text around a pair; None: the tokenizer combines the two texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        settings: PoolingSettings,
        *,
        max_tokens: int,
        vocab_size: int,
        template: PairTemplate | None = None,
    ) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self._settings, self._vocab_size, self._template = settings, vocab_size, template
        # Texts that are certainly too long are refused before tokenization.
        self._limited = None if tokenizer is None else tokenizer.limited_to(max_tokens)

    def read(
        self,
        inputs: Sequence[Prompt],
        *,
        truncate_tokens: int | None = None,
        kind: str | None = None,
        name: Callable[[int], str] | None = None,
    ) -> list[PoolingInput]:
        """Returns the token ids of inputs.

        Args:
          inputs: Strings or token ids.
          truncate_tokens: Number of tokens to keep of a longer input, including its end token; -1 is `max_tokens`.
            None: an input that is too long is an error.
          kind: Name of one of the checkpoint's prompts, which is put before texts; None: the checkpoint's default.
          name: Returns the name of an input in errors, given its index.

        Raises:
          RequestError: An input is empty or too long, or an argument cannot be honoured.
        """
        prefix, limit = self._prefix(kind), self._limit(truncate_tokens)
        name = name or (lambda index: "the text" if len(inputs) == 1 else f"text {index} of {len(inputs)}")
        return [self._read(each, prefix, limit, name(index)) for index, each in enumerate(inputs)]

    def read_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate_tokens: int | None = None,
        instruction: str | None = None,
        names: Callable[[int], tuple[str, str]] | None = None,
    ) -> list[PoolingInput]:
        """Returns the token ids of pairs, which a model sees together.

        Args:
          pairs: Two strings each.
          truncate_tokens: Number of tokens to keep, as in `read`; the second text is cut.
          instruction: Task in words, for models that use one; None: the model's default.
          names: Returns the names of a pair's two texts in errors, given its index.

        Raises:
          RequestError: An input is invalid, as in `read`; the checkpoint has no tokenizer; or the first text leaves no
            room.
        """
        limit = self._limit(truncate_tokens)
        self.check_instruction(instruction)
        of = (lambda _: "") if len(pairs) == 1 else (lambda index: f" of pair {index} of {len(pairs)}")
        names = names or (lambda index: (f"the first text{of(index)}", f"the second text{of(index)}"))
        return [self._read_pair(pair, limit, instruction, names(index)) for index, pair in enumerate(pairs)]

    def check_instruction(self, instruction: str | None) -> None:
        """Raises RequestError if an instruction is given to a model that does not use one."""
        if instruction is not None and self._template is None:
            raise RequestError("is for rerankers that get it in words, and this model does not", param="instruction")

    def has_kind(self, kind: str) -> bool:
        """Returns whether the checkpoint has a prompt for a kind of texts."""
        return kind in self._settings.prompts

    def _prefix(self, kind: str | None) -> str:
        kind = kind or self._settings.default_prompt
        if kind is None:
            return ""
        if kind not in self._settings.prompts:
            known = ", ".join(map(repr, self._settings.prompts)) or "none"
            raise RequestError(f"the checkpoint has no prompt for texts of kind {kind!r}; it has: {known}")
        return self._settings.prompts[kind]

    def _limit(self, truncate_tokens: int | None) -> int | None:
        if truncate_tokens is None:
            return None
        if isinstance(truncate_tokens, bool) or not isinstance(truncate_tokens, int) or truncate_tokens < -1:
            raise RequestError("must be a number of tokens, or -1 for as many as the model takes", param=TRUNCATE)
        if truncate_tokens > self.max_tokens:
            raise RequestError(
                f"is {truncate_tokens}, more than the {self.max_tokens} tokens that the model takes", param=TRUNCATE
            )
        return self.max_tokens if truncate_tokens == -1 else truncate_tokens

    def _read(self, text: Prompt, prefix: str, limit: int | None, where: str) -> PoolingInput:
        if text == "":
            raise RequestError("is empty: give at least one token", param=where)
        if isinstance(text, str):
            text = prefix + text
        try:
            tokenized = tokenize_prompt(text, self._limited if limit is None else self.tokenizer, where)
        except ContextLengthError as error:
            raise self._too_long(f"at least {error.num_prompt_tokens}", where) from None
        token_ids = list(tokenized.token_ids)
        if limit is not None and len(token_ids) > limit:
            token_ids = self._cut(token_ids, limit)
        self._check(token_ids, where)
        return PoolingInput(tokenized.text, token_ids, len(token_ids))

    def _read_pair(
        self, pair: tuple[str, str], limit: int | None, instruction: str | None, names: tuple[str, str]
    ) -> PoolingInput:
        for text, where in zip(pair, names, strict=True):
            if text == "":
                raise RequestError("is empty: give at least one token", param=where)
        tokenizer = self._limited if limit is None else self.tokenizer
        if tokenizer is None:
            raise RequestError("is text, and the checkpoint has no tokenizer: add one", param=names[0])
        try:
            if self._template is not None:
                token_ids = self._template.encode(tokenizer, *pair, instruction, limit)
                second_start = len(token_ids)
            else:
                token_ids, second_start = tokenizer.encode_pair(*pair)
                if limit is not None and len(token_ids) > limit:
                    token_ids = self._cut(token_ids, limit, second_start)
        except ContextLengthError as error:
            raise self._too_long(f"at least {error.num_prompt_tokens}", names[1]) from None
        if limit is not None and not token_ids:
            raise RequestError(f"leaves no room for {names[1]} in {limit} tokens: shorten it", param=names[0])
        self._check(token_ids, names[1])
        return PoolingInput(None, token_ids, second_start)

    def _check(self, token_ids: list[int], where: str) -> None:
        if not token_ids:
            raise RequestError("is empty: give at least one token", param=where)
        if len(token_ids) > self.max_tokens:
            raise self._too_long(str(len(token_ids)), where)
        if not all(0 <= token_id < self._vocab_size for token_id in token_ids):
            raise RequestError(f"has a token id outside of 0 to {self._vocab_size - 1}: correct it", param=where)

    def _too_long(self, count: str, where: str) -> RequestError:
        return RequestError(
            f"has {count} tokens, more than the {self.max_tokens} that the model takes: shorten it, or give {TRUNCATE}",
            param=where,
        )

    def _cut(self, token_ids: list[int], limit: int, at_least: int = 0) -> list[int]:
        """Returns the first tokens (more than `at_least`) and the special end tokens; none if there is no room."""
        special = self.tokenizer.special_token_ids if self.tokenizer is not None else frozenset[int]()
        end = list(itertools.takewhile(special.__contains__, reversed(token_ids)))[::-1][-limit:] if limit else []
        if at_least and limit - len(end) <= at_least:
            return []
        return [*token_ids[: limit - len(end)], *end]
