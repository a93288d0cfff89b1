"""Image processors of families: the pixels that an image encoder reads, and the tokens that stand for an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxis.vision.processors.cohere import AyaVisionProcessor, Cohere2VisionProcessor
from jaxis.vision.processors.gemma3 import Gemma3Processor
from jaxis.vision.processors.gemma4 import Gemma4Processor
from jaxis.vision.processors.glm_v import GlmVProcessor
from jaxis.vision.processors.idefics3 import Idefics3Processor
from jaxis.vision.processors.internvl import InternVLProcessor
from jaxis.vision.processors.kimi import KimiProcessor
from jaxis.vision.processors.lfm2_vl import Lfm2VLProcessor
from jaxis.vision.processors.llama4 import Llama4Processor
from jaxis.vision.processors.llava import LlavaProcessor
from jaxis.vision.processors.llava_next import LlavaNextProcessor, LlavaOnevisionProcessor
from jaxis.vision.processors.minicpm_v import MiniCPMVProcessor
from jaxis.vision.processors.muse_glimmer import MuseGlimmerProcessor
from jaxis.vision.processors.pixtral import PixtralProcessor
from jaxis.vision.processors.preprocessor_config import ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor
from jaxis.vision.processors.qwen_vl import PaddleOcrProcessor, PlainRopeProcessor, QwenVLProcessor

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer

_PROCESSORS: Mapping[str, Callable[[ProcessorSettings, Tokenizer], ImageProcessor]] = {
    "MiniCPMV4_6": MiniCPMVProcessor.read,
    "MuseGlimmer": MuseGlimmerProcessor.read,
    "PaddleOCRVL": PaddleOcrProcessor.read,
    "Pixtral": PixtralProcessor.read,
    "LightOnOcr": PixtralProcessor.read_lighton_ocr,
    "Idefics3": Idefics3Processor.read,
    "SmolVLM": Idefics3Processor.read,
    "InternVL": InternVLProcessor.read,
    "AyaVision": AyaVisionProcessor.read,
    "Cohere2Vision": Cohere2VisionProcessor.read,
    "Exaone4_5": PlainRopeProcessor.read,
    "Gemma3": Gemma3Processor.read,
    "Gemma4Unified": Gemma4Processor.read_unified,
    "Gemma4": Gemma4Processor.read,
    "Glm4v": GlmVProcessor.read,
    "Glm46V": GlmVProcessor.read,
    "KimiK25": KimiProcessor.read,
    "Kimi_K25": KimiProcessor.read,
    "Lfm2Vl": Lfm2VLProcessor.read,
    "Lfm3Vl": PlainRopeProcessor.read,
    "Llama4": Llama4Processor.read,
    "LlavaProcessor": LlavaProcessor.read,
    "LlavaNext": LlavaNextProcessor.read,
    "LlavaOnevision": LlavaOnevisionProcessor.read,
    "Qwen2VL": QwenVLProcessor.read,
    "Qwen2_5_VL": QwenVLProcessor.read,
    "Qwen3VL": QwenVLProcessor.read,
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
