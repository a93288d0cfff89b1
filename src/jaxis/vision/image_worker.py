"""What becomes of an image's file: Pillow decodes it, in a process with limits that `decode` asks.

The file imports nothing of jaxis (see `host/limited_worker.py`). What it says of an image follows the image's name, and
is in words of our own, whatever went wrong inside a decoder: "has 9000 x 9000 pixels, more than ...".
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

# What `Image.open` looks for is what was imported: without these, it imports the plugins of all formats there are.
_PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)

_PART_PIXELS = 1 << 15


class RefusedImageError(Exception):
    """An image that is not taken, and why."""


def check_size(size: tuple[int, int], max_pixels: int, max_ratio: int) -> None:
    """Checks an image's size.

    Args:
      size: Width and height.
      max_pixels: Most pixels.
      max_ratio: Most times that a side may be as long as the other.

    Raises:
      RefusedImageError: It is too large.
    """
    width, height = size
    if width * height > max_pixels:
        raise RefusedImageError(f"has {width} x {height} pixels, more than {max_pixels}: make it smaller")
    if min(width, height) < 1 or max(width, height) > max_ratio * min(width, height):
        raise RefusedImageError(f"has {width} x {height} pixels: one side is more than {max_ratio} times the other")


def open_file(data: bytes | bytearray, formats: list[str], max_pixels: int, max_ratio: int) -> Image.Image:
    """Reads a file's header, and checks the size that it claims; no pixel is decoded.

    Args:
      data: The file.
      formats: Of Pillow, those that are taken.
      max_pixels: See `check_size`.
      max_ratio: See `check_size`.

    Raises:
      RefusedImageError: It is no image of a known format, or too large.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedImageError(f"has more than {max_pixels} pixels: make it smaller") from None
    except MemoryError:
        raise
    except Exception:  # of any kind: decoders raise whatever a broken file makes them stumble over
        names = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise RefusedImageError(f"is not an image that can be read: send {names}") from None
    check_size(image.size, max_pixels, max_ratio)
    return image


def to_rgb(image: Image.Image, max_pixels: int, max_ratio: int, *, in_place: bool = False) -> Image.Image:
    """Decodes the pixels of the first frame: in RGB, upright, and where it is transparent, on white.

    Args:
      image: An image, of which only the header may be read.
      max_pixels: See `check_size`.
      max_ratio: See `check_size`.
      in_place: Whether the image itself may be turned, which spares a copy.

    Raises:
      RefusedImageError: Its file is broken or truncated, or it has a mode that does not become RGB.
    """
    try:
        image = ImageOps.exif_transpose(image, in_place=in_place) or image
        # The size that a header gives need not be that of the pixels.
        check_size(image.size, max_pixels, max_ratio)
        if image.mode == "La":
            raise RefusedImageError("is of Pillow's mode La, which does not become RGB: convert it to LA")
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except (RefusedImageError, MemoryError):
        raise
    except Exception:  # see `open_file`
        raise RefusedImageError("cannot be decoded: the file is broken or truncated") from None


def answer(request: Mapping[str, Any], data: bytearray) -> tuple[dict[str, Any], int, Iterable[bytes]]:
    """Width and height of an image, and if asked for its pixels, uint8 [height, width, 3]; or why it is refused.

    Args:
      request: Formats and limits, and whether pixels are wanted.
      data: The file.
    """
    limits = request["max_pixels"], request["max_ratio"]
    try:
        image = open_file(data, request["formats"], *limits)
        if not request["pixels"]:
            return {"size": image.size}, 0, ()
        image = to_rgb(image, *limits, in_place=True)
    except RefusedImageError as error:
        return {"refused": str(error)}, 0, ()
    return {"size": image.size}, 3 * image.width * image.height, _rows(image)


def _rows(image: Image.Image) -> Iterator[bytes]:
    """Pixels of some rows at a time, which takes less memory and is faster than all at once."""
    width, height = image.size
    number = max(1, _PART_PIXELS // width)
    for y in range(0, height, number):
        yield image.crop((0, y, width, min(y + number, height))).tobytes()
