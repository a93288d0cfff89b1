"""Images of MiniCPM-V 4.6: seen as a whole in their own aspect ratio, and large ones also in equal rectangles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings
from jaxis.vision.processors.processor import SpelledProcessor
from jaxis.vision.processors.resizing import tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE = "<|image_pad|>"
_WHOLE, _SLICE = ("<image>", "</image>"), ("<slice>", "</slice>")


@dataclass(frozen=True, kw_only=True)
class MiniCPMVProcessor(SpelledProcessor):
    """Each view lies between two tokens; the prompt has an image's number before it.

    Attributes:
      side: Pixels of a side of the square that becomes one token.
      resolution: Pixels of a side of a square with about as many pixels as a view.
      max_slices: Largest number of rectangles.
      is_numbered: True if the prompt has images' numbers.
    """

    side: int
    resolution: int
    max_slices: int
    is_numbered: bool

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> MiniCPMVProcessor:
        """Reads the settings of MiniCPM-V 4.6."""
        settings.check("max_slice_nums", "scale_resolution", "slice_mode", "downsample_mode", "use_image_id")
        mode, of_model = (each("downsample_mode", "16x") for each in (settings.image, settings.model.get))
        if mode != of_model or mode not in ("16x", "4x"):
            raise ConfigError(
                f"{settings.source}: the image processor has downsample_mode={mode!r}, and config.json {of_model!r}; "
                "expected 16x or 4x for both"
            )
        return cls(
            **settings.shared(tokenizer, _IMAGE, HALF_SCALE),
            side=settings.image("patch_size", 14) * (4 if mode == "16x" else 2),
            resolution=settings.image("scale_resolution", 448),
            max_slices=settings.image("max_slice_nums", 9) if settings.image("slice_mode", True) else 1,
            is_numbered=settings.image("use_image_id", True),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )

    def slice_grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns rows and columns of rectangles; (1, 1) for none."""
        fitting = min(math.ceil(width * height / self.resolution**2), self.max_slices)
        if fitting <= 1:
            return 1, 1
        counts = [count for count in (fitting - 1, fitting, fitting + 1) if 1 < count <= self.max_slices]
        grids = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
        ratio = math.log(width / height)

        def distance(grid: tuple[int, int]) -> tuple[float, int]:
            return abs(ratio - math.log(grid[1] / grid[0])), -grid[0]

        return min(grids, key=distance)

    def whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of the whole image after resizing."""
        return self._fitted(width, height, grows=self.slice_grid(width, height) == (1, 1))

    def slice_size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of a rectangle."""
        rows, columns = self.slice_grid(width, height)
        return self._fitted(_multiple(width, columns) / columns, _multiple(height, rows) / rows, grows=True)

    def _fitted(self, width: float, height: float, *, grows: bool) -> tuple[int, int]:
        if grows or width * height > self.resolution**2:
            ratio = width / height
            height = int(self.resolution / math.sqrt(ratio))
            width = int(height * ratio)
        return _multiple(width, self.side), _multiple(height, self.side)

    def groups(self, image: Image) -> list[np.ndarray]:
        """Returns the whole, then the rectangles row by row."""
        groups = [np.asarray(self.resized(image, *self.whole_size(*image.size)))[None]]
        rows, columns = self.slice_grid(*image.size)
        if (rows, columns) != (1, 1):
            width, height = self.slice_size(*image.size)
            groups.append(tiles_of(self.resized(image, columns * width, rows * height), height, width))
        return groups

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        del text
        spelled: list[int] = []
        places: list[int] = []
        for token_id in token_ids:
            if token_id == self.placeholder_id:
                spelled += self.encode(f"<image_id>{len(places)}</image_id>") if self.is_numbered else []
                places.append(len(spelled))
            spelled.append(token_id)
        return spelled, places

    def texts(self, width: int, height: int) -> list[str]:
        """Returns the text that stands for the whole, and the text for the rectangles if there are any."""
        whole, each = (
            _IMAGE * (math.prod(size) // self.side**2)
            for size in (self.whole_size(width, height), self.slice_size(width, height))
        )
        rows, columns = self.slice_grid(width, height)
        texts = [whole.join(_WHOLE)]
        return texts if (rows, columns) == (1, 1) else [*texts, "\n".join([each.join(_SLICE) * columns] * rows)]


def _multiple(length: float, of: int) -> int:
    return max(round(length / of) * of, of)
