"""Settings of image and video preparation in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxis.errors import ConfigError
from jaxis.host.json_object import read_json_object
from jaxis.rooms import room_module
from jaxis.vision.processors.processor import ImageProcessor, PixelScale

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer

CLIP_SCALE = PixelScale(1 / 255, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF_SCALE = PixelScale(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

# Supported values of image processors' settings; None is a setting left out.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True, None),
    "do_rescale": (True, None),
    "do_normalize": (True, None),
    "do_convert_rgb": (True, None),
    "do_center_crop": (False, None),
    "crop_size": (None,),
}
# Settings that name the processor or describe batches of images, and change no pixels.
_NEUTRAL = frozenset(
    {
        *(
            "processor_class",
            "image_processor_type",
            "auto_map",
            "do_pad",
            "data_format",
            "input_data_format",
            "device",
        ),
        *("return_tensors", "disable_grouping", "default_to_square", "pad_size", "image_seq_length"),
    }
)
# Supported values of video processors' settings; None is a setting left out.
_ONLY_OF_VIDEOS: Mapping[str, Any] = {
    **{"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True},
    **{"cap_pixels_per_frame": False, "do_center_crop": False},
}
_READ = frozenset({"size", "resample", "rescale_factor", "image_mean", "image_std", "patch_size"})


class ProcessorSettings:
    """Settings in a folder's preprocessor_config.json and processor_config.json, or in an `mmproj` file.

    Args:
      files: Folder or file.
      tokenizer: Tokenizer of the model.

    Attributes:
      source: Path of the folder or file, for errors.
      processor: Settings of tokens and patches.
      model: Contents of config.json.
      names: Names of the processor in the files, the most specific first.
      video: Contents of video_preprocessor_config.json.
    """

    def __init__(self, files: Path, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer = str(files), tokenizer
        self.video: dict[str, Any] = {}
        if files.is_file():
            with room_module("loading.gguf", "mmproj", str(files)).MmprojFile(files) as file:
                self.model, self.processor, self._image = file.config, file.processor, file.image_processor
        else:
            self.model = _read(files / "config.json")
            self.processor = _read(files / "processor_config.json")
            nested = self.processor.get("image_processor")
            self._image = nested if isinstance(nested, dict) else _read(files / "preprocessor_config.json")
            nested = self.processor.get("video_processor")
            self.video = nested if isinstance(nested, dict) else _read(files / "video_preprocessor_config.json")
        names = (
            self.processor.get("processor_class"),
            *map(self._image.get, ("processor_class", "image_processor_type")),
            # Processors with code of their own are named by their classes.
            *(str(each).rpartition(".")[2] for each in (self._image.get("auto_map") or {}).values()),
        )
        self.names = [name for name in names if isinstance(name, str)]

    def check(self, *known: str) -> None:
        """Raises a ConfigError if a setting of images' pixels is unknown or has an unsupported value.

        Args:
          *known: Names of settings that the family has besides those of every processor, or checks itself.
        """
        for key, value in self._image.items():
            if key not in known and key in _ONLY and value not in _ONLY[key]:
                raise ConfigError(f"{self.source}: the image processor has {key}={value!r}, which is not supported")
            if key not in _ONLY and key not in _NEUTRAL and key not in _READ and key not in known:
                raise ConfigError(f"{self.source}: the image processor has the unknown setting {key!r}")

    def check_video(self, *shared: str) -> None:
        """Raises a ConfigError if a setting of videos has an unsupported value.

        Args:
          *shared: Names of settings that must equal those of images.
        """
        for key, value in _ONLY_OF_VIDEOS.items():
            if self.video.get(key) not in (None, value):
                raise ConfigError(
                    f"{self.source}: the video processor has {key}={self.video[key]!r}, which is not supported"
                )
        for key in ("image_mean", "image_std", "resample", *shared):
            of_video, of_image = self.video.get(key), self.image(key, None)
            if None not in (of_video, of_image) and of_video != of_image:
                raise ConfigError(
                    f"{self.source}: the video processor has {key}={of_video!r}, and that of images {of_image!r}; "
                    "expected the same"
                )

    def leave_out(self, published: Mapping[str, Any]) -> None:
        """Removes settings of images' pixels that have these values, which the reference does not read."""
        self._image = {key: value for key, value in self._image.items() if published.get(key) != value}

    def image(self, key: str, default: Any) -> Any:
        """Returns a setting of images' pixels."""
        value = self._image.get(key)
        return default if value is None else value

    def vision(self, key: str, default: Any) -> Any:
        """Returns a setting of config.json's `vision_config`."""
        return (self.model.get("vision_config") or {}).get(key, default)

    def size(self, key: str, name: str, default: int) -> int:
        """Returns a size in pixels, stored in an object: `name` in the setting `key`.

        Raises:
          ConfigError: The object lacks this size.
        """
        size = self.image(key, {name: default})
        value = size.get(name) if isinstance(size, Mapping) else None
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source} has {key}={size!r}, of which only {name} is supported")
        return value

    def square(self, default: int) -> int:
        """Returns the side of the square that images are resized to.

        Raises:
          ConfigError: The size is not a square.
        """
        side = self.size("size", "height", default)
        if self.size("size", "width", default) != side:
            raise ConfigError(f"{self.source} resizes images to {self.image('size', None)!r}; expected a square")
        return side

    def scale(self, default: PixelScale) -> PixelScale:
        """Returns the scaling of pixels."""
        return PixelScale(
            float(self.image("rescale_factor", default.factor)),
            tuple(self.image("image_mean", default.mean)),
            tuple(self.image("image_std", default.std)),
        )

    def shared(
        self, placeholder: str, scale: PixelScale, resample: int = 3, *, token: str | None = None
    ) -> dict[str, Any]:
        """Returns the fields of an `ImageProcessor`, with defaults for scale and filter.

        `token` is the text of the placeholder's token; None means the placeholder.
        """
        return {
            **{"pixel_scale": self.scale(scale), "resample": self.image("resample", resample)},
            **{"placeholder": placeholder, "placeholder_id": self.token_id(token or placeholder)},
        }

    def side(self, patch_size: int = 14, merge_size: int = 2) -> int:
        """Returns the pixels of a side of a merged patch."""
        return self.image("patch_size", patch_size) * self.image("merge_size", merge_size)

    def token_id(self, token: str) -> int:
        """Returns the id of a special token.

        Raises:
          ConfigError: The tokenizer has no such token.
        """
        token_id = self.tokenizer.token_to_id(token)
        if token_id is None:
            raise ConfigError(f"{self.source}: {token!r} is not in the tokenizer: correct processor_config.json")
        return token_id

    def tokens(self, *texts: str) -> list[str]:
        """Returns the texts of special tokens. Raises ConfigError if the tokenizer lacks one."""
        return [text for text in texts if self.token_id(text) is not None]

    def encode(self, text: str, adds_special: bool = False) -> list[int]:
        """Tokenizes text, with or without the tokenizer's special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=adds_special)


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


Reader = Callable[[ProcessorSettings], ImageProcessor]
"""Function that makes a family's processor of its settings.

It raises a ConfigError if a setting is missing or not supported. `READERS` of a module are by prefix of the processor's
name in the files; the longest that fits is used.
"""
