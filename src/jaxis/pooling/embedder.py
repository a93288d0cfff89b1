"""Opens a checkpoint that makes vectors, and makes vectors of texts with it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.config.architecture import architectures_of
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.opened_model import OpenedModel
from jaxis.engine.settings import make_vllm_config
from jaxis.errors import ConfigError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.kv_cache_spec import CacheSpec, StateCacheSpec
from jaxis.models.common.decoder import CausalLM, DecoderModel
from jaxis.models.model_loader import load_model
from jaxis.models.registry import model_class_of
from jaxis.pooling.encoders import encoder_class
from jaxis.pooling.headless import without_head
from jaxis.pooling.pooling_model import PoolingModel
from jaxis.pooling.settings import PoolingSettings, has_pooling_files, read_pooling_settings
from jaxis.prompts import Prompt, tokenize_prompt
from jaxis.tokenizer import Tokenizer

# Tokens of a step, if nothing else is asked for: enough for matrix products to be as fast as they get.
DEFAULT_STEP_TOKENS = 4096
DEFAULT_STEP_TEXTS = 256


@dataclass(frozen=True)
class Embedding:
    """An input's vector.

    Attributes:
      vector: float32 [E].
      prompt: The text, if it was one.
      token_ids: What the model saw.
    """

    vector: np.ndarray
    prompt: str | None
    token_ids: list[int]


class Embedder:
    """Makes vectors of texts. Not for use from several threads at once.

    Attributes:
      tokenizer: The checkpoint's; None: texts are token ids.
      settings: How hidden states become vectors.
      max_tokens: Most tokens of an input.
      size: E, the elements of a vector.
      vocab_size: Token ids are less.
      model: What computes them.

    Args:
      model, tokenizer, settings, max_tokens, size, vocab_size: See above.
    """

    def __init__(
        self,
        model: PoolingModel,
        tokenizer: Tokenizer | None,
        settings: PoolingSettings,
        *,
        max_tokens: int,
        size: int,
        vocab_size: int,
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.max_tokens, self.size, self.vocab_size = max_tokens, size, vocab_size

    def embed(
        self, texts: Sequence[Prompt], *, truncate_tokens: int | None = None, kind: str | None = None
    ) -> list[Embedding]:
        """The vectors of texts.

        Args:
          texts: Strings or token ids.
          truncate_tokens: How many tokens are left of a longer input, its end token among them; -1 is `max_tokens`.
            None: an input that is too long is an error.
          kind: The name of one of the checkpoint's prompts, which strings are to begin with; None is its default.

        Raises:
          RequestError: An input is empty or too long, or an argument cannot be honoured; nothing was computed.
        """
        prefix = self._prefix(kind)
        limit = self._limit(truncate_tokens)
        prepared = [self._prepare(text, prefix, limit, _name(index, len(texts))) for index, text in enumerate(texts)]
        if not prepared:
            return []
        vectors = self.model.embed([token_ids for _, token_ids in prepared])
        return [
            Embedding(vector, prompt, token_ids) for vector, (prompt, token_ids) in zip(vectors, prepared, strict=True)
        ]

    def close(self) -> None:
        """Gives the memory back."""
        self.model.close()

    def _prefix(self, kind: str | None) -> str:
        kind = kind or self.settings.default_prompt
        if kind is None:
            return ""
        if kind not in self.settings.prompts:
            known = ", ".join(map(repr, self.settings.prompts)) or "none"
            raise RequestError(f"the checkpoint has no prompt for texts of kind {kind!r}; it has: {known}")
        return self.settings.prompts[kind]

    def _limit(self, truncate_tokens: int | None) -> int | None:
        if truncate_tokens is None:
            return None
        if isinstance(truncate_tokens, bool) or not isinstance(truncate_tokens, int) or truncate_tokens < -1:
            raise RequestError(
                "must be a number of tokens, or -1 for as many as the model takes", param="truncate_prompt_tokens"
            )
        if truncate_tokens > self.max_tokens:
            raise RequestError(
                f"is {truncate_tokens}, more than the {self.max_tokens} tokens that the model takes",
                param="truncate_prompt_tokens",
            )
        return self.max_tokens if truncate_tokens == -1 else truncate_tokens

    def _prepare(self, text: Prompt, prefix: str, limit: int | None, where: str) -> tuple[str | None, list[int]]:
        if isinstance(text, str):
            text = prefix + text
        tokenized = tokenize_prompt(text, self.tokenizer, where)
        token_ids = list(tokenized.token_ids)
        if limit is not None and len(token_ids) > limit:
            token_ids = self._cut(token_ids, limit)
        if not token_ids or tokenized.text == "":
            raise RequestError(f"{where} is empty: give at least one token")
        if len(token_ids) > self.max_tokens:
            raise RequestError(
                f"{where} has {len(token_ids)} tokens, more than the {self.max_tokens} that the model takes: shorten "
                "it, or give truncate_prompt_tokens"
            )
        if not all(0 <= token_id < self.vocab_size for token_id in token_ids):
            raise RequestError(f"{where} has a token id outside of 0 to {self.vocab_size - 1}: correct it")
        return tokenized.text, token_ids

    def _cut(self, token_ids: list[int], limit: int) -> list[int]:
        """The first tokens, and the special ones that an input ends with."""
        special = self.tokenizer.special_token_ids if self.tokenizer is not None else frozenset[int]()
        end = list(itertools.takewhile(special.__contains__, reversed(token_ids)))[::-1][-limit:] if limit else []
        return [*token_ids[: limit - len(end)], *end]


def makes_vectors(opened: OpenedModel) -> bool:
    """Whether a checkpoint was made for vectors, rather than to generate text."""
    return has_pooling_files(opened.path) or encoder_class(architectures_of(opened.hf_config)) is not None


def open_embedder(args: EngineArgs, opened: OpenedModel, progress: ProgressDisplay) -> Embedder:
    """Loads a checkpoint to make vectors with.

    Args:
      args: The engine's arguments.
      opened: The checkpoint.
      progress: Shows what is going on.

    Raises:
      ConfigError, CheckpointError, EngineError: See `LLM`.
    """
    _check(args)
    encoder = encoder_class(architectures_of(opened.hf_config))
    settings = read_pooling_settings(opened.path, "mean" if encoder is not None else "last")
    vllm_config = make_vllm_config(args, opened.path, opened.hf_config, "cpu")
    max_tokens = vllm_config.model_config.max_model_len
    if encoder is not None:
        max_tokens = min(max_tokens, max_tokens - encoder.first_position(opened.hf_config))
    max_tokens = min(max_tokens, settings.max_tokens or max_tokens)
    step = max(args.max_num_batched_tokens or DEFAULT_STEP_TOKENS, max_tokens)
    args = dataclasses.replace(
        args, max_num_batched_tokens=step, max_num_seqs=args.max_num_seqs or min(DEFAULT_STEP_TEXTS, step)
    )
    model = _load(opened, args, encoder or _decoder_class(opened), settings, progress)
    tokenizer = Tokenizer.from_path(opened.path)
    config = opened.hf_config.get_text_config()
    return Embedder(
        model,
        tokenizer,
        settings,
        max_tokens=max_tokens,
        size=config["hidden_size"],
        vocab_size=config["vocab_size"],
    )


def _decoder_class(opened: OpenedModel) -> type[Any]:
    model_class = model_class_of(opened.hf_config)
    if not issubclass(model_class, CausalLM):
        raise ConfigError(f"{model_class.__name__} cannot make vectors here: use another model")
    return without_head(model_class)


def _load(
    opened: OpenedModel, args: EngineArgs, model_class: type[Any], settings: PoolingSettings, progress: ProgressDisplay
) -> PoolingModel:
    [mesh] = opened.make_meshes(args)
    vllm_config = make_vllm_config(args, opened.path, opened.hf_config, mesh.devices.flat[0].platform)
    with progress.loading(str(args.model)) as on_progress:
        model = load_model(vllm_config, mesh, on_progress, model_class=model_class)
    decoder = model if isinstance(model, DecoderModel) else getattr(model, "decoder", None)
    specs: list[CacheSpec] = []
    for spec in cache_specs(model, vllm_config):
        if isinstance(spec, StateCacheSpec) or not isinstance(decoder, DecoderModel):
            raise ConfigError(f"{model_class.__name__} has layers that cannot make vectors here: use another model")
        specs.append(spec.on_devices(args.tensor_parallel_size))
    assert isinstance(decoder, DecoderModel)
    return PoolingModel(vllm_config, model, decoder, specs, mesh, settings)


def _check(args: EngineArgs) -> None:
    """Raises an error for arguments that a model which makes vectors does not have."""
    for name in ("pipeline_parallel_size", "data_parallel_size", "nnodes"):
        if getattr(args, name) != 1:
            raise ConfigError(f"{name}={getattr(args, name)} is for models that generate text: leave it out")


def _name(index: int, number: int) -> str:
    return "the text" if number == 1 else f"text {index} of {number}"
