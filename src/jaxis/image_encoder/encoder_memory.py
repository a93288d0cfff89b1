"""Device memory for the weights of an image encoder beside a text model, if the checkpoint has one that runs here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
from jax.typing import DTypeLike

from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import HoldsWeights
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.extra_memory import ExtraMemory, LeftOut, NoMemory
from jaxis.engine.execution.feature import RequestFeature
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.host.extras import missing_module
from jaxis.image_encoder.tower_source import MmprojTensors, TowerSource, tower_source
from jaxis.layers.module import JaxModule
from jaxis.layers.weight_bytes import weight_bytes
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import Dequantize, PackingConfig
from jaxis.tokenizer import Tokenizer
from jaxis.vision.processors import read_processor
from jaxis.vision.processors.preprocessor_config import ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, PixelScale

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig
    from jaxis.engine.arguments import EngineArgs
    from jaxis.models.common.towers.tower import VisionTower

MAX_INPUTS = {"image": 32, "video": 32}
"""Default limits of a prompt's inputs, by kind."""
_CHOSEN = LeftOut("limit_mm_per_prompt allows no images: raise --limit-mm-per-prompt, or send text", is_chosen=True)


class EncoderMemory(ExtraMemory):
    """Device memory for the weights of a vision tower.

    `max_inputs` is that of `InputEncoder`. `quant_config` stores and applies the tower's weights; None keeps them as
    they are.
    """

    text = 'the weights of the vision tower (--limit-mm-per-prompt \'{"image": 0, "video": 0}\' leaves it out)'

    def __init__(
        self,
        config: VllmConfig,
        source: TowerSource,
        pixel_scale: PixelScale,
        max_inputs: Mapping[str, int],
        quant_config: QuantizationConfig | None,
    ) -> None:
        self._config, self._source = _config_of_tower(config, source.config, quant_config), source
        self._pixel_scale, self._max_inputs = pixel_scale, max_inputs

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        del model, dtype
        tower = construct_abstractly(self._config, check_config=False, model_class=self._source.tower_class)
        # As if each device had all of it.
        return weight_bytes(tower)

    def load(self, mesh: jax.sharding.Mesh) -> VisionTower:
        """Loads the tower. Raises the errors of `load_model`."""
        source = self._source
        tensors = None if source.mmproj is None else MmprojTensors(source.mmproj)
        return cast("VisionTower", load_model(self._config, mesh, model_class=source.tower_class, tensors=tensors))

    def fill(self, executor: Executor, note: Callable[[str], None]) -> list[RequestFeature]:
        from jaxis.engine.embedded_inputs.feature import EmbeddedInputs
        from jaxis.image_encoder.encoder import ImageEncoder

        [stage] = executor.stages  # `make_memory` gives others none
        tower = self.load(stage.context.mesh)
        encoder = ImageEncoder(tower, self._pixel_scale, self._max_inputs, stage.context, self._source.files)
        note(f"images: {human_bytes(encoder.num_bytes)} for the vision tower; see docs/images.md")
        return [EmbeddedInputs(encoder, self._config.scheduler_config.max_num_batched_tokens)]


def make_memory(
    args: EngineArgs,
    path: Path,
    hf_config: HFConfig,
    tokenizer: Tokenizer | None,
    make_config: Callable[[EngineArgs], VllmConfig],
) -> ExtraMemory:
    """Returns the memory for a checkpoint's vision tower, or the reason for which the tower is left out.

    Args:
      args: The engine's.
      path: The checkpoint's folder, or its GGUF file.
      hf_config: The checkpoint's.
      tokenizer: The checkpoint's.
      make_config: Makes the engine's configuration; reading its keys is not reading them for the model.

    Raises:
      ConfigError: The tower or the processor asks for something that is not supported.
      CheckpointError: `tower_source` fails.
    """
    limits = MAX_INPUTS | dict(args.limit_mm_per_prompt or {})
    if not any(limits.values()):
        return NoMemory(_CHOSEN)
    mmproj = None if args.mmproj is None else Path(args.mmproj)
    source = tower_source(path, hf_config, mmproj, is_made_up=args.load_format == "dummy")
    if isinstance(source, LeftOut):
        return NoMemory(source)
    if reason := _why_not_here(args):
        return NoMemory(LeftOut(reason, is_chosen=False))
    processor = read_processor(source.files, tokenizer)
    if processor is None:
        return NoMemory(LeftOut(_why_no_processor(source.files, tokenizer), is_chosen=False))
    if processor.video is None:
        del limits["video"]
    if not any(limits.values()):
        return NoMemory(_CHOSEN)
    config = make_config(args)
    if processor.is_bidirectional and (reason := _why_not_bidirectional(config, processor)):
        return NoMemory(LeftOut(reason, is_chosen=False))
    return EncoderMemory(config, source, processor.pixel_scale, limits, _quantization(args, config))


def _quantization(args: EngineArgs, config: VllmConfig) -> QuantizationConfig | None:
    """Returns the quantization of the tower's weights, which are packed where the text's are."""
    choice = parse_quantization(args.vision_quantization)
    assert not isinstance(choice, Dequantize)
    if isinstance(config.quant_config, HoldsWeights):
        if choice is not None:
            raise ConfigError("vision_quantization: the vision tower is packed: leave it out, or give the model itself")
        return config.quant_config
    return PackingConfig(choice) if isinstance(config.quant_config, PackingConfig) else choice


def _why_not_here(args: EngineArgs) -> str | None:
    """Returns the reason for which no tower runs with these arguments on this machine; None if one does."""
    for name in ("pipeline_parallel_size", "nnodes"):
        if (number := getattr(args, name)) > 1:
            return f"images do not combine with {name}={number}: leave out --{name.replace('_', '-')}"
    return None if missing_module("vision") is None else "images need Pillow: pip install 'jaxis[vision]'"


def _why_no_processor(files: Path, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "images need a tokenizer, and the model has none"
    names = ProcessorSettings(files, tokenizer).names
    if not names:
        return "images need a preprocessor_config.json, and the checkpoint has none: add that of the model"
    return f"images need an image processor that jaxis knows, and the checkpoint's is {names[0]}"


def _why_not_bidirectional(config: VllmConfig, processor: ImageProcessor) -> str | None:
    """Returns the reason for which images whose tokens see each other cannot be served; None if they can."""
    if jax.default_backend() == "tpu":
        return "images whose tokens see later ones have no kernel for TPUs"
    # Beside a token of every other sequence.
    needed = processor.most_tokens + config.scheduler_config.max_num_seqs - 1
    if (most := config.scheduler_config.max_num_batched_tokens) < needed:
        return f"images need max_num_batched_tokens >= {needed} (it is {most}): raise --max-num-batched-tokens"
    return None


def _config_of_tower(config: VllmConfig, hf_config: HFConfig, quant_config: QuantizationConfig | None) -> VllmConfig:
    """The engine's configuration with a config.json of which no key of `vision_config` may be unread.

    The text accounts for all other keys, some of which towers read.
    """
    values = hf_config.to_dict()
    chosen_config = HFConfig(values, source=hf_config.source)
    for key, value in values.items():
        if key != "vision_config":
            chosen_config.read_object(key) if isinstance(value, dict) else chosen_config.get(key)
    model_config = dataclasses.replace(config.model_config, hf_config=chosen_config)
    load_config = dataclasses.replace(config.load_config, tensor_changes=None, prediction_layer=False)
    return dataclasses.replace(
        config, model_config=model_config, load_config=load_config, quant_config=quant_config, speculative_config=None
    )
