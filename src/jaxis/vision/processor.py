"""From an image to the pixels that a vision tower reads, and the tokens that stand for it in a prompt.

A processor is read from the files beside a checkpoint's weights. It gives the pixels and tokens of the processors in
transformers that use Pillow; those that use torchvision differ by a few levels in resized pixels.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxis.errors import ConfigError
from jaxis.host.json_object import read_json_object

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.tokenizer import Tokenizer


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


class ImageProcessor(Protocol):
    """Prepares images for one tower."""

    @property
    def pixel_scale(self) -> PixelScale:
        """Applied by the tower."""
        ...

    @property
    def placeholder_id(self) -> int:
        """The token that stands for an image before it is expanded."""
        ...

    @property
    def placeholder(self) -> str:
        """The same as text."""
        ...

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """The width and height that an image is resized to."""
        ...

    def pixels(self, image: Image) -> np.ndarray:
        """An RGB image, resized: uint8 [height, width, 3]."""
        ...

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """The tokens that stand for an image of a target size, and the places among them that take its embeddings."""
        ...

    def digest(self, pixels: np.ndarray) -> bytes:
        """SHA-256 of what the embeddings depend on besides the tower."""
        ...


@dataclass(frozen=True)
class PixtralProcessor:
    """Of Pixtral's tower: sides are multiples of a merged patch, and each row of patches ends with a token.

    Attributes:
      pixel_scale, placeholder_id, placeholder: See `ImageProcessor`.
      longest_edge: Larger images are made smaller, their sides kept in proportion.
      patch_size: Pixels of a side of a merged patch.
      resample: Pillow's number of the filter.
      break_id, end_id: The tokens after a row, and after the last one.
    """

    pixel_scale: PixelScale
    placeholder_id: int
    longest_edge: int
    patch_size: int
    resample: int
    placeholder: str
    break_id: int
    end_id: int

    @classmethod
    def read(cls, settings: _Settings, tokenizer: Tokenizer) -> PixtralProcessor:
        """Reads the settings of Pixtral and Mistral 3.

        Raises:
          ConfigError: A setting is missing or not supported.
        """
        names = ("image_token", "image_break_token", "image_end_token")
        tokens = [settings.processor.get(name, default) for name, default in zip(names, _PIXTRAL_TOKENS, strict=True)]
        image_id, break_id, end_id = (settings.token_id(token, tokenizer) for token in tokens)
        patch_size = settings.processor.get("patch_size", 16) * settings.processor.get("spatial_merge_size", 1)
        return cls(
            **settings.pixtral(patch_size),
            placeholder_id=image_id,
            break_id=break_id,
            end_id=end_id,
            placeholder=tokens[0],
        )

    def target_size(self, width: int, height: int) -> tuple[int, int]:
        """See `ImageProcessor`."""
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            # A side of a very long image would be rounded to nothing.
            width, height = max(math.floor(width / ratio), 1), max(math.floor(height / ratio), 1)
        patch = self.patch_size
        return -(-width // patch) * patch, -(-height // patch) * patch

    def pixels(self, image: Image) -> np.ndarray:
        """See `ImageProcessor`."""
        return np.asarray(image.resize(self.target_size(*image.size), resample=self.resample))

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        """See `ImageProcessor`."""
        columns, rows = width // self.patch_size, height // self.patch_size
        token_ids = ([self.placeholder_id] * columns + [self.break_id]) * rows
        token_ids[-1] = self.end_id
        return token_ids, [i for i in range(len(token_ids)) if (i + 1) % (columns + 1)]

    def digest(self, pixels: np.ndarray) -> bytes:
        """See `ImageProcessor`."""
        return _digest("pixtral", self.pixel_scale, pixels)


_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_PROCESSORS: Mapping[str, Callable[[_Settings, Tokenizer], ImageProcessor]] = {
    "Pixtral": PixtralProcessor.read,
}
"""How the names of processors in the files begin -> what reads their settings."""

# Settings of image processors that are supported with these values only; None stands for a setting left out.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True, None),
    "do_rescale": (True, None),
    "do_normalize": (True, None),
    "do_convert_rgb": (True, None),
    "do_center_crop": (False, None),
    "crop_size": (None,),
}
# Those that name the processor, or say how batches of images are made.
_NEUTRAL = frozenset(
    {
        *("processor_class", "image_processor_type", "do_pad", "data_format", "input_data_format", "device"),
        *("return_tensors", "disable_grouping", "default_to_square", "patch_size", "pad_size", "image_seq_length"),
    }
)
_READ = frozenset({"size", "resample", "rescale_factor", "image_mean", "image_std"})


class _Settings:
    """The settings of a folder's preprocessor_config.json and processor_config.json.

    Attributes:
      source: The folder.
      processor: Those about tokens and patches.
      names: What the files call the processor, the most telling name first.
    """

    def __init__(self, folder: Path) -> None:
        self.source = str(folder)
        self.processor = _read(folder / "processor_config.json")
        nested = self.processor.get("image_processor")
        self._image = nested if isinstance(nested, dict) else _read(folder / "preprocessor_config.json")
        names = (
            self.processor.get("processor_class"),
            *map(self._image.get, ("processor_class", "image_processor_type")),
        )
        self.names = [name for name in names if isinstance(name, str)]

    def check(self) -> None:
        """Raises a ConfigError for a setting that is not known, or has an unsupported value."""
        for key, value in self._image.items():
            if key in _ONLY and value not in _ONLY[key]:
                raise ConfigError(f"{self.source}: the image processor has {key}={value!r}, which is not supported")
            if key not in _ONLY and key not in _NEUTRAL and key not in _READ:
                raise ConfigError(f"{self.source}: the image processor has the unknown setting {key!r}")

    def image(self, key: str, default: Any) -> Any:
        """A setting about pixels."""
        value = self._image.get(key)
        return default if value is None else value

    def pixtral(self, patch_size: int) -> dict[str, Any]:
        """The fields of a PixtralProcessor about pixels, given the size of a merged patch."""
        size = self.image("size", {"longest_edge": 1024})
        longest = size.get("longest_edge") if isinstance(size, Mapping) else None
        if not isinstance(longest, int) or longest < 1:
            raise ConfigError(f"{self.source} has size={size!r}, of which only longest_edge is supported")
        mean, std = tuple(self.image("image_mean", _CLIP_MEAN)), tuple(self.image("image_std", _CLIP_STD))
        scale = PixelScale(float(self.image("rescale_factor", 1 / 255)), mean, std)
        resample = self.image("resample", 3)
        return {"pixel_scale": scale, "longest_edge": longest, "patch_size": patch_size, "resample": resample}

    def token_id(self, token: str, tokenizer: Tokenizer) -> int:
        """The id of a special token."""
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise ConfigError(f"{self.source}: {token!r} is not in the tokenizer: correct processor_config.json")
        return token_id


def read_processor(folder: Path, tokenizer: Tokenizer | None) -> ImageProcessor | None:
    """The processor of a checkpoint's images; None if it has no files of one that is supported, or no tokenizer.

    Raises:
      ConfigError: Its settings are not supported.
      CheckpointError: A file is not a JSON object.
    """
    if tokenizer is None or not folder.is_dir():
        return None
    settings = _Settings(folder)
    for known, read in _PROCESSORS.items():
        if any(name.startswith(known) for name in settings.names):
            settings.check()
            return read(settings, tokenizer)
    return None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _digest(name: str, scale: PixelScale, pixels: np.ndarray) -> bytes:
    """SHA-256 over fields, each with its length."""
    fields = [name.encode(), json.dumps([scale.factor, scale.mean, scale.std]).encode(), repr(pixels.shape).encode()]
    digest = hashlib.sha256()
    for part in (*fields, np.ascontiguousarray(pixels).data):
        digest.update(struct.pack("<Q", len(part) if isinstance(part, bytes) else part.nbytes))
        digest.update(part)
    return digest.digest()
