"""Embedder: opens an embedding model or classifier, and computes vectors or logits of texts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxis.config.architecture import architectures_of
from jaxis.config.hf_config import HFConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_config import make_vllm_config
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.execution.model_size import model_size
from jaxis.engine.fingerprint import engine_fingerprint
from jaxis.engine.opened_model import OpenedModel
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.loading.gguf.shards import gguf_file
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.common.decoder import CausalLM, DecoderModel
from jaxis.models.model_loader import load_model
from jaxis.models.registry import model_class_of
from jaxis.pooling.classifier_settings import (
    ClassifierSettings,
    decoders_of_classifiers,
    is_classifier,
    read_classifier_settings,
)
from jaxis.pooling.decoder_heads import with_head_tokens, with_score, without_head
from jaxis.pooling.dense import DenseLayers
from jaxis.pooling.dimensions import Dimensions
from jaxis.pooling.encoders import encoder_class
from jaxis.pooling.inputs import InputReader, PoolingInput
from jaxis.pooling.pairs import check_sides, pair_indices, similarities
from jaxis.pooling.pooling_config import (
    Mode,
    PoolingSettings,
    gguf_pooling_settings,
    read_pooling_settings,
    trained_dimensions,
)
from jaxis.pooling.pooling_model import PoolingModel
from jaxis.prompts import Prompt
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import read_tokenizer

if TYPE_CHECKING:
    from jaxis.pooling.client.wire import PoolingInfo

# Default limit of a step's tokens: enough for matrix products to reach full speed.
DEFAULT_STEP_TOKENS = 4096
DEFAULT_STEP_TEXTS = 256


@dataclass(frozen=True)
class Embedding:
    """Result of an input.

    Attributes:
      vector: float32 [E]; for a classifier, the logits [labels].
      prompt: The text, if the input was text.
      token_ids: Token ids of the input, as the model saw them.
    """

    vector: np.ndarray
    prompt: str | None
    token_ids: list[int]


class Embedder:
    """Computes vectors or logits of texts. Not thread-safe.

    Attributes:
      model: The model.
      reader: Reader of inputs.
      classifier: Meaning of the logits; None for an embedding model.
      dimensions: Sizes that vectors may be cut to; for a classifier, the number of labels.

    Args:
      model, reader, classifier, dimensions: Values of the attributes.
      make_info: Computes `info`.
    """

    def __init__(
        self,
        model: PoolingModel,
        reader: InputReader,
        classifier: ClassifierSettings | None,
        dimensions: Dimensions,
        make_info: Callable[[], PoolingInfo],
    ) -> None:
        self.model, self.reader, self.classifier, self.dimensions = model, reader, classifier, dimensions
        self._make_info = make_info

    @property
    def info(self) -> PoolingInfo:
        """Facts about the model, for a server; they need the server's extra."""
        return self._make_info()

    def embed(
        self, texts: Sequence[Prompt], *, truncate_tokens: int | None = None, kind: str | None = None
    ) -> list[Embedding]:
        """Computes the vectors or logits of texts.

        Args:
          texts: Strings or token ids.
          truncate_tokens: Number of tokens to keep, as in `InputReader.read`.
          kind: Kind of the texts, as in `InputReader.read`.

        Raises:
          RequestError: An input is invalid, as in `InputReader.read`; nothing was computed.
        """
        return self.compute(self.reader.read(texts, truncate_tokens=truncate_tokens, kind=kind))

    def embed_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[Embedding]:
        """Computes the logits of pairs of texts.

        Args:
          pairs: Two strings each.
          truncate_tokens: Number of tokens to keep, as in `InputReader.read_pairs`.
          instruction: Instruction to the model, as in `InputReader.read_pairs`.

        Raises:
          RequestError: An input is invalid, as in `InputReader.read_pairs`; nothing was computed.
        """
        read = self.reader.read_pairs(pairs, truncate_tokens=truncate_tokens, instruction=instruction)
        return self.compute(read)

    def score(
        self,
        first: Sequence[str],
        second: Sequence[str],
        *,
        truncate_tokens: int | None,
        use_activation: bool,
        instruction: str | None,
    ) -> list[tuple[float, list[int]]]:
        """Returns the score of each pair, and the token ids of its texts.

        Args:
          first: Texts of the first side: one, or as many as of the second.
          second: Texts of the second side.
          truncate_tokens: Number of tokens to keep, as in `InputReader.read`.
          use_activation: True to convert a classifier's logit to a probability.
          instruction: Instruction to the model, as in `InputReader.read_pairs`.

        Raises:
          RequestError: An input is invalid, as in `InputReader.read_pairs`, or the model is a classifier of several
            labels.
        """
        check_sides(len(first), len(second), ("data_1", "data_2"))
        pairs = pair_indices(len(first), len(second))
        if self.classifier is not None:
            self.classifier.check_scores()
            texts = [(first[i], second[j]) for i, j in pairs]
            found = self.embed_pairs(texts, truncate_tokens=truncate_tokens, instruction=instruction)
            scores = self.classifier.scores(np.stack([each.vector for each in found]), use_activation=use_activation)
            return [(float(score), each.token_ids) for [score], each in zip(scores, found, strict=True)]
        self.reader.check_instruction(instruction)
        sides = [
            self.embed(texts, truncate_tokens=truncate_tokens, kind=kind if self.reader.has_kind(kind) else None)
            for kind, texts in (("query", first), ("document", second))
        ]
        chosen = [(sides[0][i], sides[1][j]) for i, j in pairs]
        cosines = similarities(*(np.stack([pair[side].vector for pair in chosen]) for side in (0, 1)))
        return [(cosine, a.token_ids + b.token_ids) for cosine, (a, b) in zip(cosines, chosen, strict=True)]

    def compute(self, inputs: Sequence[PoolingInput]) -> list[Embedding]:
        """Computes the vectors or logits of inputs from `reader`."""
        if not inputs:
            return []
        vectors = self.model.embed([each.token_ids for each in inputs], [each.second_start for each in inputs])
        return [Embedding(vector, each.text, each.token_ids) for vector, each in zip(vectors, inputs, strict=True)]

    def close(self) -> None:
        """Frees the model's memory."""
        self.model.close()


def open_embedder(args: EngineArgs, opened: OpenedModel, progress: ProgressDisplay) -> Embedder:
    """Loads a checkpoint as an embedding model or classifier.

    Args:
      args: Arguments of the engine.
      opened: The checkpoint.
      progress: Display of progress.

    Raises:
      ConfigError, CheckpointError, EngineError: Loading fails, as in `LLM`.
    """
    _check(args)
    names = architectures_of(opened.hf_config)
    encoder, classifier = encoder_class(names), None
    if is_classifier(names, opened.path):
        classifier = read_classifier_settings(opened.hf_config, names, opened.path)
        settings = _classifier_settings(opened.hf_config, encoder, classifier)
    else:
        default: Mode = "mean" if encoder is not None else "last"
        if gguf_file(opened.path) is None:
            settings = read_pooling_settings(opened.path, default)
        else:
            settings = gguf_pooling_settings(opened.path, opened.hf_config, default)
    config = opened.hf_config.get_text_config()
    size = settings.vector_size(config["hidden_size"]) if classifier is None else len(classifier.labels)
    vllm_config = make_vllm_config(args, opened.path, opened.hf_config, "cpu")
    max_tokens = vllm_config.model_config.max_model_len
    if encoder is not None:
        max_tokens = min(max_tokens, max_tokens - encoder.first_position(opened.hf_config))
    max_tokens = min(max_tokens, settings.max_tokens or max_tokens)
    step = max(args.max_num_batched_tokens or DEFAULT_STEP_TOKENS, max_tokens)
    args = dataclasses.replace(
        args, max_num_batched_tokens=step, max_num_seqs=args.max_num_seqs or min(DEFAULT_STEP_TEXTS, step)
    )
    tokenizer = read_tokenizer(opened.path)
    model_class = encoder or _decoder_class(opened, names, classifier)
    head_tokens = () if classifier is None else _token_ids(classifier.head_tokens, tokenizer)
    model = _load(opened, args, model_class, settings, progress, head_tokens)
    template = None if classifier is None else classifier.template
    reader = InputReader(tokenizer, settings, max_tokens=max_tokens, vocab_size=config["vocab_size"], template=template)
    dimensions = Dimensions(size, *trained_dimensions(opened.hf_config), normalize=settings.normalize)
    info = functools.partial(_info, args, opened, model, settings, classifier, max_tokens, dimensions)
    return Embedder(model, reader, classifier, dimensions, info)


def _classifier_settings(
    config: HFConfig, encoder: type[Any] | None, classifier: ClassifierSettings
) -> PoolingSettings:
    if encoder is not None:
        return PoolingSettings(encoder.classifier_mode(config))
    # A classifier's own head uses the last token that is not padding, wherever the padding comes from.
    padding = None if classifier.head_tokens else config.get_text_config().get("pad_token_id")
    return PoolingSettings("last", passed_over=padding)


def load_bytes(path: Path) -> int:
    """Estimates the most memory that a checkpoint needs: weights in float32, and a third of that for its steps."""
    return sum(4 * math.prod(info.shape) for info in TensorListing(path).values()) * 4 // 3


def _info(
    args: EngineArgs,
    opened: OpenedModel,
    model: PoolingModel,
    settings: PoolingSettings,
    classifier: ClassifierSettings | None,
    max_tokens: int,
    dimensions: Dimensions,
) -> PoolingInfo:
    from jaxis.pooling.client.wire import PoolingInfo  # needs the extra `server`

    config = opened.hf_config.get_text_config()
    num_parameters, weight_type = model_size(model.model)
    trained_len = config.get("max_position_embeddings")
    return PoolingInfo(
        model_folder=str(opened.path),
        model_type=opened.hf_config.get("model_type"),
        default_sampling_params=SamplingParams(),
        max_model_len=max_tokens,
        max_num_seqs=model.max_step_texts,
        num_cache_tokens=0,
        vocab_size=config["vocab_size"],
        eos_token_ids=frozenset(),
        trained_len=trained_len if isinstance(trained_len, int) else None,
        num_parameters=num_parameters,
        weight_type=weight_type,
        fingerprint=engine_fingerprint(opened.path, args, max_tokens),
        capabilities=("embedding",) if classifier is None else classifier.tasks,
        size=dimensions.size,
        settings=settings,
        dimensions=dimensions,
        classifier=classifier,
    )


def _token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> list[int]:
    """Returns the token id of each word of `classifier_from_token`."""
    if words and tokenizer is None:
        raise ConfigError("classifier_from_token names words, and the checkpoint has no tokenizer: add one")
    found = [tokenizer.encode(word, add_special_tokens=False) for word in words] if tokenizer is not None else []
    for word, ids in zip(words, found, strict=True):
        if len(ids) != 1:
            raise ConfigError(f"classifier_from_token: {word!r} has {len(ids)} tokens in this vocabulary: name others")
    return [token_id for [token_id] in found]


def _decoder_class(opened: OpenedModel, names: Sequence[str], classifier: ClassifierSettings | None) -> type[Any]:
    decoders = decoders_of_classifiers(names)
    config = opened.hf_config
    model_class = model_class_of(config) if decoders is None else model_class_of(config, decoders)
    if not issubclass(model_class, CausalLM):
        raise ConfigError(f"{model_class.__name__} cannot make vectors here: use another model")
    if classifier is not None and classifier.head_tokens:
        return with_head_tokens(model_class, is_difference=classifier.is_difference)
    if decoders is None:
        return without_head(model_class)
    return with_score(model_class, is_reward_model=any(name.endswith("ForRewardModel") for name in names))


def _load(
    opened: OpenedModel,
    args: EngineArgs,
    model_class: type[Any],
    settings: PoolingSettings,
    progress: ProgressDisplay,
    head_tokens: Sequence[int],
) -> PoolingModel:
    [mesh] = opened.make_meshes(args)
    vllm_config = make_vllm_config(args, opened.path, opened.hf_config, mesh.devices.flat[0].platform)
    with progress.loading(str(args.model)) as on_progress:
        model: Any = load_model(vllm_config, mesh, on_progress, model_class=model_class)
    with jax.set_mesh(mesh):
        if head_tokens:
            model.take_rows(head_tokens)
        if settings.dense:
            model.sentence_layers = DenseLayers(settings.dense)
    decoder = model if isinstance(model, DecoderModel) else getattr(model, "decoder", None)
    specs: list[CacheSpec] = []
    for spec in cache_specs(model, vllm_config):
        if isinstance(spec, StateCacheSpec) or not isinstance(decoder, DecoderModel):
            raise ConfigError(f"{model_class.__name__} has layers that cannot make vectors here: use another model")
        specs.append(spec.on_devices(args.tensor_parallel_size))
    assert isinstance(decoder, DecoderModel)
    return PoolingModel(vllm_config, model, decoder, specs, mesh, settings)


def _check(args: EngineArgs) -> None:
    """Raises ConfigError for arguments that embedding models do not support."""
    for name in ("pipeline_parallel_size", "data_parallel_size", "nnodes"):
        if getattr(args, name) != 1:
            raise ConfigError(f"{name}={getattr(args, name)} is for models that generate text: leave it out")
