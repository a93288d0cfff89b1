"""The served model as requests see it."""

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
from jaxis.server.lora.named_adapter import NamedAdapter, NamedAdapters
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import answer_end_token_ids, with_template
from jaxis.vision.access import ImageAccess
from jaxis.vision.prompt_images import NoImages, PromptImages

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler


_DIGEST_CHARACTERS = 12


@dataclass(frozen=True)
class ModelNames:
    """Names under which requests may ask for a model.

    Attributes:
      names: Whole names; answers carry the first.
      aliases: Patterns of additional names, in the syntax of `fnmatch`.
      adapters: Adapters by name. The mapping changes as adapters are loaded.
    """

    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, NamedAdapter] = field(default_factory=dict, compare=False)

    def has(self, name: str) -> bool:
        """Returns whether a name asks for the model or one of its adapters."""
        return self.is_named(name) or self.adapter(name) is not None or self._is_alias(name)

    @property
    def listed(self) -> tuple[str, ...]:
        return (*self.names, *self.adapters)

    def adapter(self, name: str) -> NamedAdapter | None:
        """Returns the adapter with this name; None if the name asks for the model itself or is unknown."""
        if not self.adapters or self.is_named(name):
            return None
        return self.adapters.get(name) or self.adapters.get(untagged(name))

    def is_named(self, name: str) -> bool:
        """Returns whether a name is one of the model's own, aliases and adapters excluded."""
        return name in self.names or untagged(name) in map(untagged, self.names)

    def check(self, name: str | None) -> None:
        """Raises ModelNotFoundError if a request asks for another model. None and "" ask for any."""
        if name and not self.has(name):
            raise model_not_found(name, self.listed)

    def _is_alias(self, name: str) -> bool:
        return any(fnmatchcase(name, alias) for alias in self.aliases)


def model_not_found(name: str, available: Sequence[str]) -> ModelNotFoundError:
    return ModelNotFoundError(f"the model {name[:200]!r} is not served here; available: {', '.join(available)}")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Facts of the model that a protocol needs to read a request and to write its answer.

    Attributes:
      names: Names under which requests may ask for it. Answers carry the first, unless `named` has set another.
      aliases: Patterns of additional names, in the syntax of `fnmatch`.
      tokenizer: Tokenizer of the model; None if requests and answers have token ids only.
      images: Inserts images into prompts, or refuses them.
      image_access: Places from which the images of URLs and paths may be read.
      default_sampling_params: Defaults of the requests' parameters.
      grammar_compiler: The engine's compiler for structured outputs; None if the model does not generate.
      parsers: Parsers of the model's tool calls and reasoning.
      always_strict: True if all functions are treated as strict.
      reasoning_budget: Most thinking tokens of any answer; None for no limit.
      effort_budgets: Thinking tokens by reasoning effort, for models whose chat template reads no effort.
      fingerprint: Fingerprint of the engine, which answers carry; None if there is none.
      adapters: Adapters by name. The mapping changes as adapters are loaded.
      adapter: Digest of the requested adapter; b"" for the model itself.
      end_token_ids: Tokens that end its answers, in addition to the model's own.
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
    adapters: NamedAdapters = field(default_factory=NamedAdapters)
    adapter: bytes = b""
    end_token_ids: frozenset[int] = frozenset()
    images: PromptImages | NoImages = field(default_factory=NoImages)
    image_access: ImageAccess = field(default_factory=ImageAccess)

    @property
    def name(self) -> str:
        return self.names[0]

    def named(self, name: str | None) -> ServedModel:
        """Returns the model under a requested name, which its answer then carries. None and "" stand for the first
        name.

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
        """Raises ModelNotFoundError if a request asks for another model. None and "" ask for any."""
        self._names.check(name)

    @property
    def _names(self) -> ModelNames:
        return ModelNames(self.names, self.aliases, self.adapters)


@functools.lru_cache(maxsize=64)
def _with_template(tokenizer: Tokenizer, source: str) -> tuple[Tokenizer, frozenset[int]]:
    """Returns a tokenizer with an adapter's chat template, and the tokens that end answers in that template."""
    changed = with_template(tokenizer, source)
    return changed, answer_end_token_ids(changed)


def untagged(name: str) -> str:
    """Returns a name without the tag ":latest", which Ollama's clients add to names without a tag."""
    return name.removesuffix(":latest")
