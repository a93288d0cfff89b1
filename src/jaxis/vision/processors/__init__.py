"""Image processors of families: the pixels that an image encoder reads, and the tokens that stand for an image."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxis.vision.processors.preprocessor_config import ProcessorSettings, Reader
from jaxis.vision.processors.processor import ImageProcessor

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer


@functools.cache
def _readers() -> Mapping[str, Reader]:
    from jaxis.vision.processors import gemma, llava_next, tile_families, whole

    return {**gemma.READERS, **llava_next.READERS, **tile_families.READERS, **whole.READERS}


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
    settings = ProcessorSettings(files, tokenizer)
    for name in settings.names:
        if known := [prefix for prefix in _readers() if name.startswith(prefix)]:
            return _readers()[max(known, key=len)](settings)
    return None
