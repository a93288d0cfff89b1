"""The model as requests see it, whichever engine runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from jaxis.parsing.model_parsers import ModelParsers
from jaxis.sampling_params import SamplingParams
from jaxis.server.http.errors import ModelNotFoundError
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import answer_end_token_ids, with_template
from jaxis.vision.access import ImageAccess
from jaxis.vision.prompt_images import PromptImages

if TYPE_CHECKING:
    from jaxis.engine.client.engine_client import NamedAdapter
    from jaxis.engine.grammar.compiler import GrammarCompiler


_DIGEST_CHARACTERS = 12


@dataclass(frozen=True)
class ModelNames:
    """The names under which requests may ask for a model.

    Attributes:
      names: Whole names; answers carry the first.
      aliases: Patterns of more such names, as `fnmatch` has them.
      adapters: Name -> adapter, as they are at the moment.
    """

    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, NamedAdapter] = field(default_factory=dict, compare=False)

    def has(self, name: str) -> bool:
        """Whether a name asks for the model."""
        return self.is_named(name) or self.adapter(name) is not None or self._is_alias(name)

    @property
    def listed(self) -> tuple[str, ...]:
        """What lists of models show."""
        return (*self.names, *self.adapters)

    def adapter(self, name: str) -> NamedAdapter | None:
        """The adapter that a name asks for; None: the model itself, or nothing."""
        if not self.adapters or self.is_named(name):
            return None
        return self.adapters.get(name) or self.adapters.get(untagged(name))

    def is_named(self, name: str) -> bool:
        """The same without aliases."""
        return name in self.names or untagged(name) in map(untagged, self.names)

    def check(self, name: str | None) -> None:
        """Raises ModelNotFoundError if a request asks for another model; none, or an empty one, is any."""
        if name and not self.has(name):
            raise model_not_found(name, self.listed)

    def _is_alias(self, name: str) -> bool:
        return any(fnmatchcase(name, alias) for alias in self.aliases)


def model_not_found(name: str, available: Sequence[str]) -> ModelNotFoundError:
    """The error for a name that asks for no model."""
    return ModelNotFoundError(f"the model {name[:200]!r} is not served here; available: {', '.join(available)}")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What is needed of the model to read a request and write its answer.

    Attributes:
      names: The names under which requests may ask for it; answers carry the first, unless `named` says otherwise.
      aliases: Patterns of more such names, as `fnmatch` has them.
      tokenizer: None reads and writes token ids only.
      images: Puts images into prompts; None: they can have none.
      image_access: From where images are read that requests name.
      default_sampling_params: For what a request leaves out.
      grammar_compiler: The engine's, for structured outputs; None if the model generates nothing.
      parsers: How the model writes tool calls and reasoning.
      always_strict: Whether all functions are taken for strict ones.
      reasoning_budget: Most tokens that any answer may think; None is no limit.
      effort_budgets: How many tokens it may think at a reasoning effort, where its chat template reads none.
      fingerprint: The engine's, which answers carry; None if there is none.
      adapters: Name -> adapter, as they are at the moment.
      adapter: Digest of the one that the name asks for; b"": the model itself.
      end_token_ids: Tokens that end its answers, besides those that end the model's.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams
    grammar_compiler: GrammarCompiler | None
    parsers: ModelParsers = field(default_factory=ModelParsers)
    aliases: tuple[str, ...] = ()
    always_strict: bool = False
    reasoning_budget: int | None = None
    effort_budgets: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str | None = None
    adapters: Mapping[str, NamedAdapter] = field(default_factory=dict)
    adapter: bytes = b""
    end_token_ids: frozenset[int] = frozenset()
    images: PromptImages | None = None
    image_access: ImageAccess = field(default_factory=ImageAccess)

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def named(self, name: str | None) -> ServedModel:
        """The model under the name that a request asks for, which its answer then carries; none is the first name.

        Raises:
          ModelNotFoundError: The request asks for another model.
        """
        self.check_name(name)
        if not name or name == self.name:
            return self
        found = self._names.adapter(name)
        if found is None:
            return dataclasses.replace(self, names=(name,))
        fingerprint = self.fingerprint and f"{self.fingerprint}_{found.digest.hex()[:_DIGEST_CHARACTERS]}"
        model = dataclasses.replace(self, names=(name,), adapter=found.digest, fingerprint=fingerprint)
        if self.tokenizer is None or found.chat_template is None:
            return model
        tokenizer, ends = _with_template(self.tokenizer, found.chat_template)
        return dataclasses.replace(model, tokenizer=tokenizer, end_token_ids=ends)

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError if a request asks for another model; none, or an empty one, is any."""
        self._names.check(name)

    @property
    def _names(self) -> ModelNames:
        return ModelNames(self.names, self.aliases, self.adapters)


@functools.lru_cache(maxsize=64)
def _with_template(tokenizer: Tokenizer, source: str) -> tuple[Tokenizer, frozenset[int]]:
    """A tokenizer with an adapter's chat template, and what ends answers in that."""
    changed = with_template(tokenizer, source)
    return changed, answer_end_token_ids(changed)


def untagged(name: str) -> str:
    """A name without the tag that Ollama's clients add to names without one."""
    return name.removesuffix(":latest")
