"""Videos in requests, sent by clients as frames. Video files are not decoded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.errors import RequestError
from jaxis.vision.decode import ImageSource

MAX_FRAMES = 768
"""Largest number of frames of a video."""
MAX_VIDEO_PIXELS = 512_000_000
"""Largest number of pixels of all frames of a video, before resizing."""
DEFAULT_FPS = 2.0
"""Default of frames per second, as in Qwen's own tools."""

_FRAMES_URL = re.compile(r"\s*data:video/jpeg *; *base64 *,", re.IGNORECASE)
_NO_FILES = (
    'is a file or an address of a video, which is not decoded here: send its frames, {"type": "video", "video": '
    '[images], "fps": 2}'
)


@dataclass(frozen=True)
class Video:
    """Frames of a video.

    Attributes:
      frames: Images in order.
      seconds: Time of each frame in seconds since the beginning of the video.
      seconds_between: Average time from one frame to the next, in seconds.
    """

    frames: tuple[ImageSource, ...]
    seconds: tuple[float, ...]
    seconds_between: float

    @classmethod
    def of(cls, frames: object, fps: object, place: str) -> Video:
        """Makes a video whose frames are equally spaced in time.

        Args:
          frames: A list of images, or an array, uint8 [frames, height, width, 3].
          fps: Frames per second; None means `DEFAULT_FPS`.
          place: Path of the video in the request, for errors.

        Raises:
          RequestError: The value is no video.
        """
        listed = _listed(frames, place)
        rate = _positive(DEFAULT_FPS if fps is None else fps, "fps", place)
        return cls(listed, tuple(i / rate for i in range(len(listed))), 1 / rate)

    @classmethod
    def of_url(cls, url: object, fps: object, place: str) -> Video:
        """Makes a video from a URL of its frames, as vLLM's clients send it: data:video/jpeg;base64,FRAME,FRAME.

        Raises:
          RequestError: The value is no such URL.
        """
        if not isinstance(url, str) or (head := _FRAMES_URL.match(url)) is None:
            raise RequestError(_NO_FILES, param=place)
        files = url[head.end() :].split(",", MAX_FRAMES)
        return cls.of([f"data:image/jpeg;base64,{each}" for each in files], fps, place)

    @classmethod
    def with_metadata(cls, frames: object, metadata: Mapping[str, Any], place: str) -> Video:
        """Makes a video with vLLM's metadata: `fps` of the whole video, and `frames_indices` of the frames in it.

        Raises:
          RequestError: The value is no video, or its metadata is invalid.
        """
        listed = _listed(frames, place)
        fps = metadata.get("fps")
        rate = _positive(DEFAULT_FPS if fps is None else fps, "fps", place)
        indices = metadata.get("frames_indices")
        if indices is None:
            return cls.of(listed, rate, place)
        if not all(isinstance(each, int | np.integer) for each in indices):
            raise RequestError("has frames_indices that are no integers", param=place)
        indices = [int(each) for each in indices]
        if len(indices) != len(listed) or min(indices) < 0 or sorted(indices) != indices:
            raise RequestError(
                f"needs one of frames_indices for each of its {len(listed)} frames, ascending", param=place
            )
        total = metadata.get("total_num_frames")
        total = _positive(indices[-1] + 1 if total is None else total, "total_num_frames", place)
        return cls(listed, tuple(each / rate for each in indices), total / rate / len(listed))


def videos_of_prompt(data: object, place: str) -> list[Video]:
    """Returns the videos of vLLM's `multi_modal_data`: one, or a list of them.

    Args:
      data: Frames as a list of images or an array, uint8 [frames, height, width, 3]; with metadata, (frames, {"fps":
        30, "frames_indices": [0, 15]}).
      place: Name of the value in errors.

    Raises:
      RequestError: The value has another type.
    """
    if _is_video(data):
        return [_video(data, place)]
    if isinstance(data, list | tuple) and data and all(map(_is_video, data)):
        return [_video(each, place) for each in data]
    raise RequestError(f"{place}: a video is a list of images, which are its frames, or a uint8 array of them")


def _is_video(data: object) -> bool:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
        return True
    if isinstance(data, np.ndarray):
        return data.ndim == 4
    return isinstance(data, list | tuple) and bool(data) and not any(map(_has_frames, data))


def _has_frames(item: object) -> bool:
    return isinstance(item, list | tuple) or (isinstance(item, np.ndarray) and item.ndim == 4)


def _video(data: Any, place: str) -> Video:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
        return Video.with_metadata(data[0], data[1], place)
    return Video.of(data, None, place)


def _listed(frames: object, place: str) -> tuple[ImageSource, ...]:
    if isinstance(frames, str | bytes):
        raise RequestError(_NO_FILES, param=place)
    if not isinstance(frames, Sequence | np.ndarray) or len(frames) == 0:
        raise RequestError(f"is {type(frames).__name__}; expected a list of images, the video's frames", param=place)
    if len(frames) > MAX_FRAMES:
        raise RequestError(f"has more than {MAX_FRAMES} frames: send fewer", param=place)
    return tuple(frames)


def _positive(value: Any, name: str, place: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise RequestError(f"has {name}={value!r}; expected a number above 0", param=place)
    return float(value)
