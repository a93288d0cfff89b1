"""Gemma 3's images: squares of one size, whatever their aspect ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_START, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor(ImageProcessor):
    """An image has its own line, whose ends become tokens together with the text around it.

    Attributes:
      size: Pixels of a side.
      num_tokens: Number of tokens of an image.
      image_id: Token that is repeated for an image.
      encode: Tokenizes text, with or without the tokenizer's special tokens.
    """

    size: int
    num_tokens: int
    image_id: int
    encode: Callable[[str, bool], list[int]]
    is_bidirectional: bool = True

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> Gemma3Processor:
        """Reads the settings of Gemma 3."""
        crops = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        settings.check("do_pan_and_scan", *(f"pan_and_scan_{name}" for name in crops))
        if settings.image("do_pan_and_scan", False):
            raise ConfigError(f"{settings.source}: the image processor has do_pan_and_scan, which is not supported")
        return cls(
            pixel_scale=settings.scale(HALF_SCALE),
            resample=settings.image("resample", 2),
            placeholder=_START,
            placeholder_id=settings.token_id(_START, tokenizer),
            size=settings.square(224),
            num_tokens=settings.processor.get("image_seq_length", 256),
            image_id=settings.token_id(_IMAGE, tokenizer),
            encode=lambda text, add_special: tokenizer.encode(text, add_special_tokens=add_special),
        )

    def views(self, image: Image) -> np.ndarray:
        return np.asarray(self.resized(image, self.size, self.size))[None]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        del width, height
        return [self.image_id] * self.num_tokens, list(range(self.num_tokens))

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        line = f"\n\n{_START}{_IMAGE}{_END}\n\n"
        if text is None:
            own = self.encode(line, False)
            spelled = [each for i in token_ids for each in (own if i == self.placeholder_id else [i])]
        else:
            adds_special = self.encode(text, False) != list(token_ids)
            spelled = self.encode(text.replace(_START, line), adds_special)
        return spelled, [i for i, token_id in enumerate(spelled) if token_id == self.image_id]
