"""Base of image and video processors: pixels for an image encoder, and tokens that stand for them in a prompt.

Pixels and tokens equal those of the processors in transformers that use Pillow. Processors that use torchvision differ
by a few levels in resized pixels.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


Encode = Callable[[str, bool], list[int]]
"""Function that tokenizes text, with or without the tokenizer's special tokens."""


@dataclass(frozen=True)
class PixelScale:
    """Scaling of pixels to a tower's input: `(pixel * factor - mean) / std`, by channel.

    Attributes:
      factor: Rescaling factor; 1 / 255 in published files.
      mean, std: Values for red, green and blue.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Seconds(NamedTuple):
    """Times of a video's frames.

    Attributes:
      of_frames: Time of each frame in seconds since the beginning of the video.
      between: Average time from one frame to the next, in seconds.
    """

    of_frames: tuple[float, ...]
    between: float


class ViewGroup(NamedTuple):
    """Views of one size, and the tokens that stand for them.

    Attributes:
      views: uint8 [views, height, width, 3], with a fourth channel for towers with `outside`; of a video,
        [views, height, width, 3 * frames], frame after frame.
      token_ids: Tokens in the prompt.
      rows: Indices of the tokens that take the views' embeddings.
      order: Indices of the embeddings that `rows` take, counted over all views; -1 is the tower's embedding of the end
        of a line. None means each embedding in order.
      weights: Factors of the embeddings in `order` if each row takes the sum of equally many; None if one each.
      grid: Rows and columns of the tokens if RoPE counts them by both; None if as text.
      times: Times of the grids, as in `EmbeddedInput`.
    """

    views: np.ndarray
    token_ids: list[int]
    rows: list[int]
    order: list[int] | None = None
    weights: list[float] | None = None
    grid: tuple[int, int] | None = None
    times: tuple[int, ...] = (0,)


class Span(NamedTuple):
    """Tokens from `start` to before `stop`, to be replaced."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    """Prepares videos, given as frames, for one tower; each family has a subclass.

    Attributes:
      placeholder: Text that stands for a video in a prompt before it is expanded.
      placeholder_id: Token of the placeholder.
    """

    placeholder: str
    placeholder_id: int

    def span(self, token_ids: Sequence[int], place: int) -> Span:
        """Returns the span of tokens that a video replaces, given the position of its placeholder."""
        del token_ids
        return Span(place, place + 1)

    def target_size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Returns the width and height to which this many frames of a size are resized."""
        raise NotImplementedError

    def least_tokens(self, num_frames: int, width: int, height: int) -> int:
        """Returns the number of tokens for this many frames of a size, or a few less."""
        raise NotImplementedError

    def parts(self, frames: Iterable[Image], size: tuple[int, int], seconds: Seconds) -> list[ViewGroup | list[int]]:
        """Returns views of a video and text tokens between them, in the order of the prompt.

        Args:
          frames: Upright RGB frames.
          size: Width and height after resizing.
          seconds: Times of the frames.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Prepares images for one tower; each family has a subclass.

    Attributes:
      pixel_scale: Scaling of pixels, applied by the tower.
      resample: Pillow's number of the resampling filter.
      placeholder: Text that stands for an image in a prompt before it is expanded.
      placeholder_id: Token of the placeholder.
      is_bidirectional: True if an image's tokens see each other, not just those before them.
      video: Processor of videos; None if the model takes none.
    """

    pixel_scale: PixelScale
    resample: int
    placeholder: str
    placeholder_id: int
    is_bidirectional: bool = False
    video: VideoProcessor | None = None

    @property
    def keeps_alpha(self) -> bool:
        """True if images that may be transparent are given as RGBA, False for RGB on white."""
        return False

    @property
    def most_tokens(self) -> int:
        """Largest number of an image's tokens, if they see each other."""
        return len(self.tokens(1, 1)[0])

    def of_prompt(self, num_images: int) -> ImageProcessor:
        """Returns the processor for a prompt with this many images; some families prepare several differently."""
        del num_images
        return self

    def parts(self, image: Image) -> list[ViewGroup]:
        """Returns groups of views of an upright RGB image, in the order of the prompt; most families have one group."""
        return [ViewGroup(self.views(image), *self.tokens(*image.size), grid=self.grid(*image.size))]

    def views(self, image: Image) -> np.ndarray:
        """Returns the views of an upright RGB image, in families with one group of views."""
        raise NotImplementedError

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """Returns the tokens for an upright image of a size, and the indices of those that take its embeddings."""
        raise NotImplementedError

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns rows and columns of an image's tokens if RoPE counts them by both; None if as text."""
        del width, height

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        """Returns a prompt's tokens with one token for each image, and the positions of these tokens.

        Args:
          token_ids: Tokens of the prompt, with placeholders.
          text: Text of the prompt, if it has one.
        """
        del text
        return placed(token_ids, self.placeholder_id)

    def digest(self, group: ViewGroup) -> bytes:
        """Returns SHA-256 of all fields, with their lengths, that embeddings depend on besides the tower."""
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
        """Returns the image in another size."""
        return image.resize((width, height), resample=self.resample)


def placed(token_ids: Sequence[int], placeholder_id: int) -> tuple[list[int], list[int]]:
    """Returns tokens, and the positions of placeholders among them."""
    return list(token_ids), [i for i, token_id in enumerate(token_ids) if token_id == placeholder_id]


def rewritten(encode: Encode, token_ids: Sequence[int], text: str | None, old: str, new: str) -> list[int]:
    """Returns the tokens of a prompt's text with `new` for `old`, or else its own tokens.

    Args:
      encode: Tokenizes text.
      token_ids: Tokens of the prompt, which tell if the tokenizer added special tokens.
      text: Text of the prompt; None if it has none.
      old: Text to replace.
      new: Text in its place.
    """
    if text is None:
        return list(token_ids)
    return encode(text.replace(old, new), encode(text, False) != list(token_ids))
