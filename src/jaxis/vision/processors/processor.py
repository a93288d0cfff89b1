"""From an image to the pixels that a vision tower reads, and the tokens that stand for it in a prompt.

A processor gives the pixels and tokens of the processors in transformers that use Pillow; those that use torchvision
differ by a few levels in resized pixels.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class PixelScale:
    """How pixels become a tower's input: `(pixel * factor - mean) / std`, by channel.

    Attributes:
      factor: 1 / 255, as files have it.
      mean, std: Of red, green and blue.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Seconds(NamedTuple):
    """When the frames of a video are.

    Attributes:
      of_frames: Of each, after the video's beginning.
      between: From one frame to the next, on average.
    """

    of_frames: tuple[float, ...]
    between: float


class ViewGroup(NamedTuple):
    """Views of one size, and the tokens that stand for them.

    Attributes:
      views: uint8 [views, height, width, 3]; of a video, [views, height, width, 3 * frames], a frame's channels after
        the other's.
      token_ids: In the prompt.
      rows: The places among these that take the views' embeddings.
      order: Which of all views' embeddings, one view after another, they take; -1 is what the tower has for the end of
        a line. None: each, in their order.
      weights: Where each of these places takes the sum of several embeddings, what those in `order` are multiplied by.
      grid: Rows and columns of the tokens, where RoPE counts them by both; None: as text.
      times: See `EmbeddedInput`.
    """

    views: np.ndarray
    token_ids: list[int]
    rows: list[int]
    order: list[int] | None = None
    weights: list[float] | None = None
    grid: tuple[int, int] | None = None
    times: tuple[int, ...] = (0,)


class Span(NamedTuple):
    """Tokens from `start` to before `stop`, in whose place something comes."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    """Prepares videos, given as their frames, for one tower; a family's own is a subclass.

    Attributes:
      placeholder: What stands for a video in a prompt before it is expanded.
      placeholder_id: The token.
    """

    placeholder: str
    placeholder_id: int

    def span(self, token_ids: Sequence[int], place: int) -> Span:
        """The tokens of a prompt that a video takes the place of, given that of its placeholder."""
        del token_ids
        return Span(place, place + 1)

    def target_size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """The width and height that so many frames of a size are resized to."""
        raise NotImplementedError

    def least_tokens(self, num_frames: int, width: int, height: int) -> int:
        """How many tokens stand for so many frames of a size, or a few less."""
        raise NotImplementedError

    def parts(self, frames: Iterable[Image], size: tuple[int, int], seconds: Seconds) -> list[ViewGroup | list[int]]:
        """What the tower sees of a video, and tokens of text between, in the order of the prompt.

        Args:
          frames: Upright and RGB.
          size: What they are resized to.
          seconds: When they are.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Prepares images for one tower; a family's own is a subclass.

    Attributes:
      pixel_scale: Applied by the tower.
      resample: Pillow's number of the filter.
      placeholder: What stands for an image in a prompt before it is expanded.
      placeholder_id: The token.
      is_bidirectional: Whether an image's tokens see each other, not just those before them.
      video: Prepares videos; None: they are not taken.
    """

    pixel_scale: PixelScale
    resample: int
    placeholder: str
    placeholder_id: int
    is_bidirectional: bool = False
    video: VideoProcessor | None = None

    @property
    def most_tokens(self) -> int:
        """Most tokens of an image that see each other, where they do."""
        return len(self.tokens(1, 1)[0])

    def of_prompt(self, num_images: int) -> ImageProcessor:
        """That of a prompt with so many images, which some families see otherwise than one image."""
        del num_images
        return self

    def parts(self, image: Image) -> list[ViewGroup]:
        """What the tower sees of an upright RGB image, one part after another in the prompt; most have one."""
        return [ViewGroup(self.views(image), *self.tokens(*image.size), grid=self.grid(*image.size))]

    def views(self, image: Image) -> np.ndarray:
        """What the tower sees of an upright RGB image in one part, each view by itself."""
        raise NotImplementedError

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """The tokens that stand for an upright image of a size, and the places among them that take its embeddings."""
        raise NotImplementedError

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Rows and columns of an image's tokens, where RoPE counts them by both; None: as text."""
        del width, height

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        """The tokens of a prompt with one token for each image, and the places of those.

        Args:
          token_ids: The prompt's tokens, with placeholders.
          text: The prompt's text, if it has one.
        """
        del text
        return list(token_ids), [i for i, token_id in enumerate(token_ids) if token_id == self.placeholder_id]

    def digest(self, group: ViewGroup) -> bytes:
        """SHA-256 of what the embeddings depend on besides the tower: each field with its length."""
        scale, views = self.pixel_scale, group.views
        fields = (
            type(self).__name__.encode(),
            json.dumps([scale.factor, scale.mean, scale.std]).encode(),
            repr(views.shape).encode(),
            *(repr(each).encode() for each in (group.order, group.weights) if each is not None),
            *([b"times", repr(group.times).encode()] if len(group.times) > 1 else []),
        )
        digest = hashlib.sha256()
        for part in (*fields, np.ascontiguousarray(views).data):
            digest.update(struct.pack("<Q", len(part) if isinstance(part, bytes) else part.nbytes))
            digest.update(part)
        return digest.digest()

    def resized(self, image: Image, width: int, height: int) -> Image:
        """The image in another size."""
        return image.resize((width, height), resample=self.resample)


def tiles_of(image: Image | np.ndarray, height: int, width: int | None = None) -> np.ndarray:
    """An image, or its pixels, cut into rectangles row by row: uint8 [tiles, height, width, 3].

    Args:
      image: The image.
      height: Divides its own.
      width: Divides its own; None: squares.
    """
    pixels, width = np.asarray(image), width or height
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    return pixels.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(rows * columns, height, width, 3)


def whole_patches(views: np.ndarray, patch_size: int) -> np.ndarray:
    """Views without the pixels at the right and below that make no whole patch."""
    height, width = (each // patch_size * patch_size for each in views.shape[1:3])
    return views[:, :height, :width]


def size_within(
    size: tuple[int, int],
    side: int,
    least: int,
    most: int,
    *,
    frames: int = 1,
    compared_frames: int | None = None,
    fewest: int = 0,
) -> tuple[int, int]:
    """The width and height nearest to an image's that are multiples of `side`, with bounds for the pixels of both.

    Args:
      size: The image's width and height.
      side: Pixels.
      least: The fewest pixels, approximately.
      most: The most pixels.
      frames: How often the pixels count.
      compared_frames: How often they count where it is asked whether they are within the bounds; None: as often.
      fewest: Multiples of `side` that a width or height has at least before the bounds apply.
    """
    width, height = size
    columns, rows = (max(round(each / side), fewest) for each in size)
    pixels = (frames if compared_frames is None else compared_frames) * columns * rows * side * side
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        columns, rows = (max(math.floor(each / shrink / side), 1) for each in size)
    elif pixels < least:
        grow = math.sqrt(least / (frames * height * width))
        columns, rows = (math.ceil(each * grow / side) for each in size)
    return columns * side, rows * side
