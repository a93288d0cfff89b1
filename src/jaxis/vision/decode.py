"""Decodes images of requests within limits: bytes of files, data URLs, paths, and Pillow's images.

A file's claims are not trusted: only a few formats are accepted, the size is checked before any pixel is decoded, and
every failure inside the decoder becomes one error in words of our own. Files are decoded in processes with limits on
time, memory and output (`image_worker`), so that a decoder that crashes or loops affects only its request. Nothing is
ever fetched from an address.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import RequestError
from jaxis.host.base64_text import body_of_data_url, decode_base64, is_data_url
from jaxis.host.byte_size import human_bytes
from jaxis.host.cores import usable_cores
from jaxis.host.limited_process import Limit, LimitedProcesses, LimitExceededError, ProcessLimits

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Any
"""A PIL image, an array uint8 [height, width, 3], the bytes of an image file, its path, a data URL, or a function that
returns the bytes."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_FILE_BYTES = 32 * 2**20
MAX_PIXELS = 40_000_000
MAX_RATIO = 200
MAX_DECODING = max(1, usable_cores() // 2)
"""Number of images decoded at a time, over all requests."""
# A few times the needs of the largest images: 5 s, and 1.1 GiB (a WebP with transparency that is rotated).
MAX_SECONDS = 20  # of processor time
MAX_MEMORY_BYTES = 3 << 29

_CHANNELS = 3
_MESSAGE_BYTES = 4096  # of an answer without its pixels
_URL_SCHEMES = ("http://", "https://", "ftp://", "file://")

# The worker is given by its file name: importing it would import Pillow, which serving text does not need.
DECODERS = LimitedProcesses(Path(__file__).with_name("image_worker.py"), large_bytes=1 << 26, max_running=MAX_DECODING)


@dataclass(frozen=True)
class ImageFile:
    """An image file whose header was read.

    Attributes:
      size: Width and height.
      data: Bytes of the file.
    """

    size: tuple[int, int]
    data: bytes = field(repr=False)


def open_image(source: ImageSource, where: str) -> Image | ImageFile:
    """Opens an image without decoding its pixels, and checks its size.

    Args:
      source: Source of the image.
      where: Name of the image in errors.

    Raises:
      RequestError: The source is no image of a known format, is too large, or is an address to fetch.
    """
    from PIL import Image as pil

    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.shape[2:] == (_CHANNELS,) and source.size:
        source = pil.fromarray(source)
    if not isinstance(source, pil.Image):
        data = _file_bytes(source, where)
        return ImageFile(_read_file(data, where, pixels=False)[0], data)
    from jaxis.vision import image_worker

    try:
        image_worker.check_size(source.size, MAX_PIXELS, MAX_RATIO)
    except image_worker.RefusedImageError as error:
        raise RequestError(f"{where} {error}") from None
    return source


def decode_image(image: Image | ImageFile, where: str, *, keeps_alpha: bool = False) -> Image:
    """Decodes the pixels of the first frame to RGB, upright, with transparency on white.

    Args:
      image: Result of `open_image`.
      where: Name of the image in errors.
      keeps_alpha: True for RGBA where the image may be transparent.

    Raises:
      RequestError: The file is broken, truncated or too costly, or a Pillow image has a mode that cannot become RGB.
    """
    from PIL import Image as pil

    from jaxis.vision import image_worker

    if isinstance(image, ImageFile):
        size, pixels = _read_file(image.data, where, pixels=True, keeps_alpha=keeps_alpha)
        return pil.frombytes("RGB" if len(pixels) == _CHANNELS * size[0] * size[1] else "RGBA", size, pixels)
    try:
        return image_worker.to_rgb(image, MAX_PIXELS, MAX_RATIO, keeps_alpha=keeps_alpha)
    except image_worker.RefusedImageError as error:
        raise RequestError(f"{where} {error}") from None


def _read_file(
    data: bytes, where: str, *, pixels: bool, keeps_alpha: bool = False
) -> tuple[tuple[int, int], bytearray]:
    """Returns an image's size and its pixels (empty if `pixels` is False), from a decoding process."""
    request = {"pixels": pixels, "formats": FORMATS, "max_pixels": MAX_PIXELS, "max_ratio": MAX_RATIO}
    request["keeps_alpha"] = keeps_alpha
    most = (_CHANNELS + keeps_alpha) * pixels
    limits = ProcessLimits(MAX_SECONDS, MAX_MEMORY_BYTES, _MESSAGE_BYTES + most * MAX_PIXELS)
    try:
        answer, content = DECODERS.ask(request, limits, data)
    except LimitExceededError as error:
        raise RequestError(f"{where} {_LIMITS[error.limit]()}") from None
    # A malicious file may have taken over the decoder: its answer is checked.
    match answer:
        case {"refused": str(reason)}:
            raise RequestError(f"{where} {reason}")
        case {"size": [int(width), int(height)]} if min(width, height) > 0:
            if len(content) in (_CHANNELS * width * height * pixels, most * width * height):
                return (width, height), content
    raise RequestError(f"{where} {_LIMITS['ended']()}")


def _file_bytes(source: object, where: str) -> bytes:
    if callable(source):
        source = source()
    if isinstance(source, str) and is_data_url(source):
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
    # Line breaks and percent signs make a URL longer than its file, up to four times.
    _check_file_bytes(len(url) // 4 - _MESSAGE_BYTES, where)
    encoded = body_of_data_url(url)
    if encoded is None:
        raise RequestError(f"{where} must be a URL of the form data:image/png;base64,...")
    try:
        data = decode_base64(encoded)
    except ValueError:
        raise RequestError(f"{where} is not valid base64") from None
    _check_file_bytes(len(data), where)
    return data


def _check_file_bytes(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise RequestError(f"{where} has more than {human_bytes(MAX_FILE_BYTES)}: make it smaller")


# Error messages for files that reached a limit.
_LIMITS: Mapping[Limit, Callable[[], str]] = {
    "time": lambda: f"takes more than {MAX_SECONDS} s of processor time to decode: make it smaller",
    "memory": lambda: f"is broken, or takes more than {MAX_MEMORY_BYTES >> 20} MiB to decode: make it smaller",
    "output": lambda: "cannot be decoded: the file is broken",
    "ended": lambda: "cannot be decoded: the file is broken",
}
