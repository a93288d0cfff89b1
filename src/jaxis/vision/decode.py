"""Reads images that requests bring, within limits: bytes of a file, data URLs, paths, and images of Pillow's.

What a file says of itself is not trusted: its format is one of a few, its size is checked before any pixel is decoded,
and whatever goes wrong inside the decoder is one error in words of our own. Nothing is ever fetched from an address.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import RequestError
from jaxis.host.byte_size import human_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Any
"""A PIL image, an array uint8 [height, width, 3], the bytes of an image file, a path of one, a data URL, or a function
that returns the bytes."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_FILE_BYTES = 32 * 2**20
MAX_PIXELS = 40_000_000
MAX_RATIO = 200

_URL_SCHEMES = ("http://", "https://", "ftp://", "file://")


def open_image(source: ImageSource, where: str) -> Image:
    """Opens an image without decoding its pixels, and checks its size.

    Args:
      source: See `ImageSource`.
      where: How errors refer to it.

    Raises:
      RequestError: It is no image of a known format, too large, or at an address.
    """
    from PIL import Image as pil

    if isinstance(source, pil.Image):
        _check_size(source, where)
        return source
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape[2:] == (3,) and source.size:
        image = pil.fromarray(source)
        _check_size(image, where)
        return image
    data = _file_bytes(source, where)
    try:
        image = pil.open(io.BytesIO(data), formats=FORMATS)
    except (pil.DecompressionBombError, pil.DecompressionBombWarning):
        raise RequestError(f"{where} has more than {MAX_PIXELS} pixels: make it smaller") from None
    except Exception:  # of any kind: decoders raise whatever a broken file makes them stumble over
        raise _not_an_image(where) from None
    _check_size(image, where)
    return image


def decode_image(image: Image, where: str) -> Image:
    """Decodes the pixels of the first frame: in RGB, upright, and where it is transparent, on white.

    Args:
      image: From `open_image`.
      where: How errors refer to it.

    Raises:
      RequestError: The file is broken or truncated, or an image of Pillow's has a mode that does not become RGB.
    """
    from PIL import Image as pil
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        # The size that a header gives need not be that of the pixels.
        _check_size(image, where)
        if image.mode == "La":
            raise RequestError(f"{where} is of Pillow's mode La, which does not become RGB: convert it to LA")
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = pil.new("RGBA", image.size, (255, 255, 255, 255))
            image = pil.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except RequestError:
        raise
    except Exception:  # see `open_image`
        raise RequestError(f"{where} cannot be decoded: the file is broken or truncated") from None


def _file_bytes(source: object, where: str) -> bytes:
    if callable(source):
        source = source()
    if isinstance(source, str) and source.startswith("data:"):
        return _data_url(source, where)
    if isinstance(source, str) and source.lower().startswith(_URL_SCHEMES):
        raise RequestError(f"{where} is an address, and nothing is fetched from addresses: send a data: URL")
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        try:
            num_bytes = path.stat().st_size
            _check_file_bytes(num_bytes, where)
            return path.read_bytes()
        except (OSError, ValueError):
            raise RequestError(f"{where}: there is no readable file {str(source)[:200]!r}") from None
    if isinstance(source, bytes | bytearray | memoryview):
        _check_file_bytes(len(source), where)
        return bytes(source)
    raise RequestError(
        f"{where} is {type(source).__name__}; expected a PIL image, a uint8 array of one, the bytes of an image "
        "file, a path or a data: URL"
    )


def _data_url(url: str, where: str) -> bytes:
    head, comma, encoded = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError(f"{where} must be a URL of the form data:image/png;base64,...")
    _check_file_bytes(len(encoded) * 3 // 4, where)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where} is not valid base64") from None


def _check_file_bytes(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise RequestError(f"{where} has more than {human_bytes(MAX_FILE_BYTES)}: make it smaller")
    if num_bytes == 0:
        raise _not_an_image(where)


def _check_size(image: Image, where: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RequestError(f"{where} has {width} x {height} pixels, more than {MAX_PIXELS}: make it smaller")
    if min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(f"{where} has {width} x {height} pixels: one side is more than {MAX_RATIO} times the other")


def _not_an_image(where: str) -> RequestError:
    return RequestError(f"{where} is not an image that can be read: send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
