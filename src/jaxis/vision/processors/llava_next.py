"""Images of LLaVA-NeXT: seen as a whole, and in squares whose embeddings are put together line by line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.processor import ImageProcessor, ViewGroup, tiles_of
from jaxis.vision.processors.settings import CLIP_SCALE, ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer

_IMAGE = "<image>"


@dataclass(frozen=True, kw_only=True)
class LlavaNextProcessor(ImageProcessor):
    """An image is its placeholders alone: those of the whole, then those of its lines, each with an end.

    Attributes:
      size: Pixels of a side of a square.
      side: Patches of a side of a square.
      canvases: Heights and widths in pixels, multiples of `size`, one of which an image is put into.
    """

    size: int
    side: int
    canvases: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, settings: ProcessorSettings, tokenizer: Tokenizer) -> LlavaNextProcessor:
        """Reads the settings of LLaVA-NeXT.

        Raises:
          ConfigError: A setting is missing or not supported.
        """
        settings.check("do_center_crop", "crop_size", "image_grid_pinpoints")
        size = settings.size("size", "shortest_edge", 224)
        crop = settings.image("crop_size", None)
        if crop not in (None, size, {"height": size, "width": size}):
            raise ConfigError(f"{settings.source} cuts {crop!r} out of squares of {size} pixels; expected that size")
        pinpoints = settings.image("image_grid_pinpoints", settings.model.get("image_grid_pinpoints"))
        canvases = tuple(tuple(each) for each in pinpoints or ())
        if not canvases or any(len(each) != 2 or each[0] % size or each[1] % size for each in canvases):
            raise ConfigError(f"{settings.source} has image_grid_pinpoints={pinpoints!r}; expected multiples of {size}")
        vision = settings.model.get("vision_config") or {}
        patch_size = settings.processor.get("patch_size") or vision.get("patch_size", 14)
        token = settings.processor.get("image_token", _IMAGE)
        return cls(
            pixel_scale=settings.scale(CLIP_SCALE),
            resample=settings.image("resample", 3),
            placeholder=token,
            placeholder_id=settings.token_id(token, tokenizer),
            size=size,
            side=size // patch_size,
            canvases=canvases,
        )

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """The height and width that keep most of an image's pixels, and of several the smallest."""

        def merit(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - math.prod(canvas)

        return max(self.canvases, key=merit)

    def parts(self, image: Image) -> list[ViewGroup]:
        """See `ImageProcessor`; the whole first, then the squares row by row."""
        height, width = self.canvas(*image.size)
        across, down = width / image.size[0], height / image.size[1]
        if across < down:
            size = width, min(math.ceil(image.size[1] * across), height)
        else:
            size = min(math.ceil(image.size[0] * down), width), height
        canvas = np.zeros((height, width, 3), np.uint8)
        left, top = (width - size[0]) // 2, (height - size[1]) // 2
        canvas[top : top + size[1], left : left + size[0]] = np.asarray(self.resized(image, *size))
        whole = np.asarray(self.resized(image, self.size, self.size))
        views = np.concatenate([whole[None], tiles_of(canvas, self.size)])
        token_ids, rows = self.tokens(*image.size)
        return [ViewGroup(views, token_ids, rows, self._order(*image.size))]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """See `ImageProcessor`."""
        lines, columns = self._seen(width, height)
        count = self.side**2 + len(lines) * (len(columns) + 1)
        return [self.placeholder_id] * count, list(range(count))

    def _seen(self, width: int, height: int) -> tuple[range, range]:
        """The lines and columns of the canvas' patches that show the image, not what is around it."""
        rows, columns = (each // self.size * self.side for each in self.canvas(width, height))
        if width / height > columns / rows:
            around = (rows - int(round(height * (columns / width), 7))) // 2
            return range(around, rows - around), range(columns)
        around = (columns - int(round(width * (rows / height), 7))) // 2
        return range(rows), range(around, columns - around)

    def _order(self, width: int, height: int) -> list[int]:
        side, (lines, columns) = self.side, self._seen(width, height)
        squares_across = self.canvas(width, height)[1] // self.size
        order = list(range(side**2))
        for line in lines:
            first = [(1 + line // side * squares_across + column // side) * side**2 for column in columns]
            order += [at + line % side * side + column % side for at, column in zip(first, columns, strict=True)]
            order.append(-1)
        return order
