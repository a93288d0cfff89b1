"""Images of GLM-4.1V and later: as Qwen's, but the bounds of pixels count both frames of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import size_within
from jaxis.vision.processors.qwen_vl import QwenVLProcessor

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer

_IMAGE = "<|image|>"


@dataclass(frozen=True, kw_only=True)
class GlmVProcessor(QwenVLProcessor):
    """The processor; sides are multiples of a merged patch.

    Attributes:
      num_frames: Number of frames that an image counts as.
    """

    num_frames: int

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> GlmVProcessor:
        """Reads the settings of GLM-4.1V, 4.5V and 4.6V, and of GLM-OCR."""
        settings.check("temporal_patch_size", "merge_size")
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=_IMAGE,
            placeholder_id=settings.token_id(_IMAGE, tokenizer),
            side=settings.image("patch_size", 14) * settings.image("merge_size", 2),
            min_pixels=settings.size("size", "shortest_edge", 112 * 112),
            max_pixels=settings.size("size", "longest_edge", 28 * 28 * 15000),
            num_frames=settings.image("temporal_patch_size", 2),
        )

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        side = self.side
        if min(width, height) < side:
            grow = max(side / height, side / width)
            width, height = int(width * grow), int(height * grow)
        return size_within((width, height), side, self.min_pixels, self.max_pixels, frames=self.num_frames)
