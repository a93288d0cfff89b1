"""Embedder: opens an embedding model or classifier, and computes vectors or logits of texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from jaxis.errors import ConfigError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.common.decoder import CausalLM, DecoderModel
from jaxis.models.model_loader import load_model
from jaxis.models.registry import model_class_of
from jaxis.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
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
from jaxis.pooling.inputs import PoolingInput
from jaxis.pooling.pooling_config import (
    Mode,
    PoolingSettings,
    gguf_pooling_settings,
    read_pooling_settings,
    trained_dimensions,
)
from jaxis.pooling.pooling_info import PoolingInfo
from jaxis.pooling.pooling_model import PoolingModel
from jaxis.pooling.text_groups import PairScoring, TextGroup
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import read_tokenizer

# Default limit of a step's tokens: enough for matrix products to reach full speed.
DEFAULT_STEP_TOKENS = 4096
DEFAULT_STEP_TEXTS = 256


class Embedder:
    """Computes vectors or logits of texts. Not thread-safe.

    Attributes:
      model: The model.
      info: Facts about the model.
      reader: Reader of inputs.
      classifier: Meaning of the logits; None for an embedding model.
      dimensions: Sizes that vectors may be cut to; for a classifier, the number of labels.

    Args:
      model, info: Values of the attributes.
      tokenizer: Tokenizer of the checkpoint; None if it has none.
    """

    def __init__(self, model: PoolingModel, info: PoolingInfo, tokenizer: Tokenizer | None) -> None:
        self.model, self.info, self.reader = model, info, info.reader(tokenizer)
        self.classifier, self.dimensions = info.classifier, info.dimensions

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.reader.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of an input."""
        return self.reader.max_tokens

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on all devices together."""
        return self.model.weight_bytes

    def __str__(self) -> str:
        return f"vectors or scores of up to {self.max_model_len} tokens"

    def embed(self, texts: TextGroup) -> list[EmbeddingRequestOutput]:
        """Computes the vectors of texts.

        Raises:
          RequestError: An input is invalid, as in `InputReader.read`, or the model makes scores; nothing was computed.
        """
        if self.classifier is not None:
            raise RequestError("this model makes scores and no vectors: use classify or score")
        read = texts.read(self.reader)
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput(vector.tolist()), each.token_ids, each.text)
            for number, (each, vector) in enumerate(zip(read, self.compute(read), strict=True))
        ]

    def classify(self, texts: TextGroup, *, use_activation: bool) -> list[ClassificationRequestOutput]:
        """Computes the score of each label for texts.

        Args:
          texts: The texts.
          use_activation: True to convert logits to probabilities.

        Raises:
          RequestError: An input is invalid, as in `InputReader.read`, or the model is not a classifier.
        """
        if (classifier := self.classifier) is None:
            raise RequestError("this model makes vectors and has no labels: use embed, or a checkpoint of a classifier")
        read = texts.read(self.reader)
        scores = classifier.scores(self.compute(read), use_activation=use_activation).tolist()
        return [
            ClassificationRequestOutput(str(number), ClassificationOutput(found), each.token_ids, each.text)
            for number, (each, found) in enumerate(zip(read, scores, strict=True))
        ]

    def score(
        self, first: TextGroup, second: TextGroup, *, use_activation: bool, instruction: str | None
    ) -> list[ScoringRequestOutput]:
        """Computes the score of each pair; see `PairScoring`."""
        scoring = PairScoring(self.classifier, self.reader, first, second, instruction)
        read = [group.read(self.reader) for group in scoring.groups]
        vectors = [self.compute(inputs) for inputs in read]
        scores = scoring.scores(vectors, use_activation=use_activation)
        return [
            ScoringRequestOutput(str(number), ScoringOutput(score), token_ids)
            for number, (score, token_ids) in enumerate(zip(scores, scoring.token_ids(read), strict=True))
        ]

    def compute(self, inputs: Sequence[PoolingInput]) -> np.ndarray:
        """Computes the vectors, float32 [inputs, E], or logits, [inputs, labels], of inputs from `reader`."""
        if not inputs:
            return np.zeros((0, self.dimensions.size), np.float32)
        return self.model.embed([each.token_ids for each in inputs], [each.second_start for each in inputs])

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
    trained_len, (num_parameters, weight_type) = config.get("max_position_embeddings"), model_size(model.model)
    info = PoolingInfo(
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
        settings=settings,
        dimensions=Dimensions(size, *trained_dimensions(opened.hf_config), normalize=settings.normalize),
        classifier=classifier,
    )
    return Embedder(model, info, tokenizer)


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
    usual = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "nnodes": 1, "pack_cache": False}
    for name, value in usual.items():
        if getattr(args, name) != value:
            raise ConfigError(f"{name}={getattr(args, name)} is for models that generate text: leave it out")
