"""Images of LLaVA-NeXT and LLaVA-OneVision, and videos of LLaVA-OneVision.

An image is seen as a whole, and in squares whose embeddings are put together line by line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, ProcessorSettings, Reader
from jaxis.vision.processors.processor import (
    ImageProcessor,
    Seconds,
    VideoProcessor,
    ViewGroup,
)
from jaxis.vision.processors.resizing import centered, fitted, tiles_of, whole_patches

if TYPE_CHECKING:
    from PIL.Image import Image


_IMAGE = "<image>"
_MOST_SQUARES = "anyres_max_"
# Lines are shrunk only if they have more than this many times as many patches as allowed.
_LEAST_RATIO = 1.1
_ALONE = (1.0, 0.0, 0.0, 0.0)  # weights of a row that takes one embedding


@dataclass(frozen=True, kw_only=True)
class LlavaNextProcessor(ImageProcessor):
    """An image is its placeholders alone: those of the whole, then those of its lines, each with an end.

    Attributes:
      size: Pixels of a side of a square.
      patch_size: Pixels of a side of a patch.
      canvases: Heights and widths in pixels, multiples of `size`; an image is put into one of them.
    """

    size: int
    patch_size: int
    canvases: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, settings: ProcessorSettings) -> LlavaNextProcessor:
        """Reads the settings of LLaVA-NeXT and Granite Vision."""
        settings.check("do_center_crop", "crop_size", "image_grid_pinpoints")
        is_square = "height" in settings.image("size", {})
        size = settings.square(224) if is_square else settings.size("size", "shortest_edge", 224)
        crop = settings.image("crop_size", None)
        if crop not in (None, size, {"height": size, "width": size}):
            raise ConfigError(f"{settings.source} cuts {crop!r} out of squares of {size} pixels; expected that size")
        return cls(**_common(settings, size))

    @property
    def side(self) -> int:
        """Patches of a side of a square."""
        return self.size // self.patch_size

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Returns the height and width that keep most of an image's pixels, and of several the smallest."""

        def merit(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - math.prod(canvas)

        return max(self.canvases, key=merit)

    def parts(self, image: Image) -> list[ViewGroup]:
        """Returns the whole, then the squares row by row."""
        height, width = self.canvas(*image.size)
        size = fitted(image.size, (width, height), rounded=math.ceil)
        canvas = centered(self.resized(image, *size), (width, height))
        whole = np.asarray(self.resized(image, self.size, self.size))
        views = whole_patches(np.concatenate([whole[None], tiles_of(canvas, self.size)]), self.patch_size)
        return [ViewGroup(views, *self.tokens(*image.size), *self.order(*image.size))]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        lines, columns = self._seen(width, height)
        return self._tokens(self.side**2 + len(lines) * (len(columns) + 1))

    def _tokens(self, count: int) -> tuple[list[int], list[int]]:
        return [self.placeholder_id] * count, list(range(count))

    def _seen(self, width: int, height: int) -> tuple[range, range]:
        """Returns the lines and columns of the canvas' patches that show the image, without the padding."""
        rows, columns = (each // self.size * self.side for each in self.canvas(width, height))
        if width / height > columns / rows:
            around = (rows - int(round(height * (columns / width), 7))) // 2
            return range(around, rows - around), range(columns)
        around = (columns - int(round(width * (rows / height), 7))) // 2
        return range(rows), range(around, columns - around)

    def order(self, width: int, height: int) -> tuple[list[int], list[float] | None]:
        """Returns order and weights of an image's embeddings, as in `ViewGroup`."""
        lines, columns = self._seen(width, height)
        places = self._places(width, height)[lines.start : lines.stop, columns.start : columns.stop]
        return [*range(self.side**2), *np.pad(places, ((0, 0), (0, 1)), constant_values=-1).ravel().tolist()], None

    def _places(self, width: int, height: int) -> np.ndarray:
        """Returns [lines, columns]: the index among all embeddings of each of the canvas' patches."""
        side = self.side
        rows, columns = (each // self.size for each in self.canvas(width, height))
        of_squares = side**2 * (1 + np.arange(rows * columns)).reshape(rows, 1, columns, 1)
        within = np.arange(side**2).reshape(1, side, 1, side)
        return (of_squares + within).reshape(rows * side, columns * side)


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionProcessor(LlavaNextProcessor):
    """A single image is seen as LLaVA-NeXT's, with large ones shrunk; of several images, each is one square.

    Attributes:
      most_squares: Number of squares with about as many patches as are left of an image's lines.
      is_alone: True if the prompt has one image.
    """

    most_squares: int
    is_alone: bool = True

    @classmethod
    def read(cls, settings: ProcessorSettings) -> LlavaOnevisionProcessor:
        """Reads the settings of LLaVA-OneVision."""
        settings.check("image_grid_pinpoints")
        ratio = settings.processor.get("vision_aspect_ratio", settings.model.get("vision_aspect_ratio", "anyres_max_9"))
        most = str(ratio).removeprefix(_MOST_SQUARES)
        if not (most.isascii() and most.isdecimal() and int(most)):
            raise ConfigError(
                f"{settings.source} has vision_aspect_ratio={ratio!r}; expected {_MOST_SQUARES} and a number"
            )
        shared = _common(settings, settings.square(384))
        settings.check_video("size")
        token = settings.processor.get("video_token", "<video>")
        video = None
        if (token_id := settings.tokenizer.token_to_id(token)) is not None:
            sizes = {key: shared[key] for key in ("resample", "size", "patch_size")}
            video = LlavaOnevisionVideoProcessor(placeholder=token, placeholder_id=token_id, **sizes)
        return cls(**shared, most_squares=int(most), video=video)

    def of_prompt(self, num_images: int) -> LlavaOnevisionProcessor:
        return dataclasses.replace(self, is_alone=num_images == 1)

    def parts(self, image: Image) -> list[ViewGroup]:
        """Returns a single image as LLaVA-NeXT's; one of several lies on a square of the tower's mean color."""
        if self.is_alone:
            return super().parts(image)
        from PIL import Image as pil

        longest, color = max(image.size), [int(255 * each) for each in self.pixel_scale.mean]
        square = pil.fromarray(centered(image, (longest, longest), color))
        view = np.asarray(self.resized(square, self.size, self.size))
        views = whole_patches(view[None], self.patch_size)
        return [ViewGroup(views, *self.tokens(*image.size), [*range(self.side**2), -1])]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        if not self.is_alone:
            return self._tokens(self.side**2 + 1)
        lines, columns = self._shrunk(width, height)
        return self._tokens(self.side**2 + lines * (columns + 1))

    def _shrunk(self, width: int, height: int) -> tuple[int, int]:
        """Returns the number of lines and columns after shrinking."""
        lines, columns = map(len, self._seen(width, height))
        ratio = math.sqrt(lines * columns / (self.most_squares * self.side**2))
        return (int(lines // ratio), int(columns // ratio)) if ratio > _LEAST_RATIO else (lines, columns)

    def order(self, width: int, height: int) -> tuple[list[int], list[float] | None]:
        """Returns order and weights; if lines are shrunk, each embedding is a weighted sum of the nearest four."""
        seen, shrunk = self._seen(width, height), self._shrunk(width, height)
        if shrunk == tuple(map(len, seen)):
            return super().order(width, height)
        order, weights = _nearest_four(self._places(width, height), *zip(seen, shrunk, strict=True))
        # A row of its own takes one embedding: each of the whole, and the end of each line.
        ends = np.full((len(order), 1, 4), -1)
        order = np.append(np.repeat(np.arange(self.side**2), 4), np.concatenate([order, ends], axis=1))
        ends = np.broadcast_to(_ALONE, (len(weights), 1, 4))
        weights = np.append(np.tile(_ALONE, self.side**2), np.concatenate([weights, ends], axis=1))
        return order.tolist(), weights.tolist()


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionVideoProcessor(VideoProcessor):
    """Each frame is a square, of which about a quarter of the embeddings are left; a token ends the video.

    Attributes:
      resample: Pillow's number of the resampling filter.
      size: Pixels of a side of the square.
      patch_size: Pixels of a side of a patch.
    """

    resample: int
    size: int
    patch_size: int

    def target_size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        del num_frames, width, height
        return self.size, self.size

    def least_tokens(self, num_frames: int, width: int, height: int) -> int:
        del width, height
        return num_frames * self._left**2 + 1

    def parts(self, frames: Iterable[Image], size: tuple[int, int], seconds: Seconds) -> list[ViewGroup | list[int]]:
        """Returns views of the frames; the model is not told their times."""
        del seconds
        side, kept = self.size // self.patch_size, (range(self.size // self.patch_size), self._left)
        found = _nearest_four(np.arange(side**2).reshape(side, side), kept, kept)
        order, weights = (each.ravel().tolist() for each in found)
        count = self._left**2
        parts: list[ViewGroup | list[int]] = []
        for frame in frames:
            view = np.asarray(frame.resize(size, resample=self.resample))[None]
            tokens = [self.placeholder_id] * count
            parts.append(ViewGroup(whole_patches(view, self.patch_size), tokens, list(range(count)), order, weights))
        last = parts[-1]
        assert isinstance(last, ViewGroup)
        parts[-1] = last._replace(
            token_ids=[*last.token_ids, self.placeholder_id],
            rows=list(range(count + 1)),
            order=[*order, *[-1] * 4],
            weights=[*weights, *_ALONE],
        )
        return parts

    @property
    def _left(self) -> int:
        """Number of embeddings of a side that are left of a frame's."""
        return math.ceil(self.size // self.patch_size / 2)


def _nearest_two(places: range, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two nearest of `places` to each of `count` evenly spread positions, and their weights: [count, 2]."""
    # float32, as in the reference.
    at = np.float32(len(places) / count) * (np.arange(count, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    at = np.maximum(at, 0).astype(np.float64)
    first = at.astype(np.int64)
    nearest = np.asarray(places)[np.stack([first, np.minimum(first + 1, len(places) - 1)], axis=1)]
    return nearest, np.stack([1 - (at - first), at - first], axis=1)


def _nearest_four(
    places: np.ndarray, lines: tuple[range, int], columns: tuple[range, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the four nearest of `places` to each of a grid's positions, and their weights: [lines, columns, 4].

    Args:
      places: Indices of embeddings by line and column.
      lines: Lines that are read, and the number of those that are left.
      columns: Columns likewise.
    """
    (line, above), (column, beside) = _nearest_two(*lines), _nearest_two(*columns)
    shape = len(line), len(column), 4
    nearest = places[line[:, None, :, None], column[:, None]]
    return nearest.reshape(shape), (above[:, None, :, None] * beside[:, None]).reshape(shape)


def _common(settings: ProcessorSettings, size: int) -> dict[str, Any]:
    """Returns the fields that these processors have in common, for squares of this size.

    Raises:
      ConfigError: A setting is missing or not supported.
    """
    pinpoints = settings.image("image_grid_pinpoints", settings.model.get("image_grid_pinpoints"))
    canvases = tuple(tuple(each) for each in pinpoints or ())
    if not canvases or any(len(each) != 2 or each[0] % size or each[1] % size for each in canvases):
        raise ConfigError(f"{settings.source} has image_grid_pinpoints={pinpoints!r}; expected multiples of {size}")
    token = settings.processor.get("image_token", _IMAGE)
    return {
        **settings.shared(token, CLIP_SCALE),
        "size": size,
        "patch_size": settings.processor.get("patch_size") or settings.vision("patch_size", 14),
        "canvases": canvases,
    }


READERS: Mapping[str, Reader] = {
    "LlavaNext": LlavaNextProcessor.read,
    "LlavaOnevision": LlavaOnevisionProcessor.read,
}
