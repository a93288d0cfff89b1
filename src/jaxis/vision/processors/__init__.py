"""Image processors of families: the pixels that an image encoder reads, and the tokens that stand for an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxis.vision.processors.gemma import Gemma3Processor, Gemma4Processor
from jaxis.vision.processors.llava_next import LlavaNextProcessor, LlavaOnevisionProcessor
from jaxis.vision.processors.preprocessor_config import ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor
from jaxis.vision.processors.resizing import enlarged_in_turn
from jaxis.vision.processors.tile_families import (
    read_aya_vision,
    read_cohere2_vision,
    read_idefics3,
    read_internvl,
    read_lfm2_vl,
    read_llama4,
    read_minicpm_v,
)
from jaxis.vision.processors.whole import (
    LlavaProcessor,
    read_glm,
    read_kimi,
    read_lighton_ocr,
    read_muse_glimmer,
    read_pixtral,
    read_qwen,
)

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer

_PLAIN_ROPE = partial(read_qwen, has_grid=False)
_PADDLEOCR = partial(
    read_qwen,
    token="<|IMAGE_PLACEHOLDER|>",
    default_pixels=(384 * 384, 1536 * 1536),
    enlarged=enlarged_in_turn,
)
_PROCESSORS: Mapping[str, Callable[[ProcessorSettings, Tokenizer], ImageProcessor]] = {
    "MiniCPMV4_6": read_minicpm_v,
    "MuseGlimmer": read_muse_glimmer,
    "PaddleOCRVL": _PADDLEOCR,
    "Pixtral": read_pixtral,
    "LightOnOcr": read_lighton_ocr,
    "Idefics3": read_idefics3,
    "SmolVLM": read_idefics3,
    "InternVL": read_internvl,
    "AyaVision": read_aya_vision,
    "Cohere2Vision": read_cohere2_vision,
    "Exaone4_5": _PLAIN_ROPE,
    "Gemma3": Gemma3Processor.read,
    "Gemma4Unified": partial(Gemma4Processor.read, is_unified=True),
    "Gemma4": Gemma4Processor.read,
    "Glm4v": read_glm,
    "Glm46V": read_glm,
    "KimiK25": read_kimi,
    "Kimi_K25": read_kimi,
    "Lfm2Vl": read_lfm2_vl,
    "Lfm3Vl": _PLAIN_ROPE,
    "Llama4": read_llama4,
    "LlavaProcessor": LlavaProcessor.read,
    "LlavaNext": LlavaNextProcessor.read,
    "LlavaOnevision": LlavaOnevisionProcessor.read,
    "Qwen2VL": read_qwen,
    "Qwen2_5_VL": read_qwen,
    "Qwen3VL": read_qwen,
}
"""Prefixes of processors' names in the files -> readers of their settings, of which the first match is used.

Readers raise a ConfigError if a setting is missing or not supported.
"""


def read_processor(files: Path, tokenizer: Tokenizer | None) -> ImageProcessor | None:
    """Returns the processor of a model's images; None without files of a supported processor, or without a tokenizer.

    Args:
      files: Folder of the checkpoint, or the `mmproj` file of a GGUF model.
      tokenizer: Tokenizer of the model.

    Raises:
      ConfigError: The processor's settings are not supported.
      CheckpointError: A file is not a JSON object, or not an `mmproj` file.
    """
    if tokenizer is None or not files.exists():
        return None
    settings = ProcessorSettings(files)
    for name in settings.names:
        for known, read in _PROCESSORS.items():
            if name.startswith(known):
                return read(settings, tokenizer)
    return None
