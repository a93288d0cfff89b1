"""Opens a checkpoint that makes vectors, and makes vectors of texts with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.config.architecture import architectures_of
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.execution.model_size import model_size
from jaxis.engine.fingerprint import engine_fingerprint
from jaxis.engine.opened_model import OpenedModel
from jaxis.engine.settings import make_vllm_config
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.kv_cache_spec import CacheSpec, StateCacheSpec
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.common.decoder import CausalLM, DecoderModel
from jaxis.models.model_loader import load_model
from jaxis.models.registry import model_class_of
from jaxis.pooling.encoders import encoder_class
from jaxis.pooling.headless import without_head
from jaxis.pooling.inputs import InputReader
from jaxis.pooling.pooling_model import PoolingModel
from jaxis.pooling.settings import PoolingSettings, read_pooling_settings, trained_dimensions
from jaxis.prompts import Prompt
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer.template_choice import read_tokenizer

if TYPE_CHECKING:
    from jaxis.pooling.frontend.wire import PoolingInfo

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
      model: What computes them.
      reader: What reads texts.

    Args:
      model, reader: See above.
      make_info: Makes `info`.
    """

    def __init__(self, model: PoolingModel, reader: InputReader, make_info: Callable[[], PoolingInfo]) -> None:
        self.model, self.reader, self._make_info = model, reader, make_info

    @property
    def info(self) -> PoolingInfo:
        """Facts about the model, for a server: they need its extra."""
        return self._make_info()

    def embed(
        self, texts: Sequence[Prompt], *, truncate_tokens: int | None = None, kind: str | None = None
    ) -> list[Embedding]:
        """The vectors of texts.

        Args:
          texts: Strings or token ids.
          truncate_tokens: See `InputReader.read`.
          kind: See `InputReader.read`.

        Raises:
          RequestError: See `InputReader.read`; nothing was computed.
        """
        inputs = self.reader.read(texts, truncate_tokens=truncate_tokens, kind=kind)
        if not inputs:
            return []
        vectors = self.model.embed([each.token_ids for each in inputs])
        return [Embedding(vector, each.text, each.token_ids) for vector, each in zip(vectors, inputs, strict=True)]

    def close(self) -> None:
        """Gives the memory back."""
        self.model.close()


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
    tokenizer = read_tokenizer(opened.path)
    config = opened.hf_config.get_text_config()
    reader = InputReader(tokenizer, settings, max_tokens=max_tokens, vocab_size=config["vocab_size"])
    return Embedder(model, reader, functools.partial(_info, args, opened, model, settings, max_tokens))


def load_bytes(path: Path) -> int:
    """About the bytes of memory that a checkpoint takes at most: its weights in float32, and a third for its steps."""
    return sum(4 * math.prod(info.shape) for info in TensorListing(path).values()) * 4 // 3


def _info(
    args: EngineArgs, opened: OpenedModel, model: PoolingModel, settings: PoolingSettings, max_tokens: int
) -> PoolingInfo:
    from jaxis.pooling.frontend.wire import PoolingInfo  # of the extra `server`

    config = opened.hf_config.get_text_config()
    num_parameters, weight_type = model_size(model.model)
    trained_len = config.get("max_position_embeddings")
    any_dimensions, dimensions = trained_dimensions(opened.hf_config)
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
        capabilities=("embedding",),
        size=config["hidden_size"],
        settings=settings,
        dimensions=dimensions,
        any_dimensions=any_dimensions,
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
