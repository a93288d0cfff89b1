"""Videos of Qwen2-VL and later, in their own aspect ratio."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxis.vision.processors.preprocessor_config import ProcessorSettings
from jaxis.vision.processors.processor import Seconds, Span, VideoProcessor, ViewGroup
from jaxis.vision.processors.resizing import enlarged_to, size_within

if TYPE_CHECKING:
    from PIL.Image import Image


_T = TypeVar("_T")
_VIDEO, _START, _END = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, kw_only=True)
class QwenVideoProcessor(VideoProcessor):
    """Videos of Qwen2-VL and Qwen2.5-VL: their tokens are contiguous, and RoPE also counts their time.

    Attributes:
      resample: Pillow's number of the resampling filter.
      side: Pixels of a side of a merged patch.
      num_frames: Frames of a view; the last view repeats the last frame.
      min_pixels, max_pixels: Bounds of the pixels of a frame.
      times_per_second: RoPE's units of time per second; None counts one per view.
    """

    resample: int
    side: int
    num_frames: int
    min_pixels: int
    max_pixels: int
    times_per_second: float | None = None

    def target_size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        del num_frames
        return size_within((width, height), self.side, self.min_pixels, self.max_pixels)

    def least_tokens(self, num_frames: int, width: int, height: int) -> int:
        columns, rows = (each // self.side for each in self.target_size(num_frames, width, height))
        return -(-num_frames // self.num_frames) * rows * columns

    def parts(self, frames: Iterable[Image], size: tuple[int, int], seconds: Seconds) -> list[ViewGroup | list[int]]:
        views = np.stack(list(self._views(frames, size)))
        step = 1.0
        if self.times_per_second is not None:
            step = self.times_per_second * self.num_frames * seconds.between
        count = len(views) * self._num_tokens(size)
        times = tuple(int(i * step) for i in range(len(views)))
        tokens = [self.placeholder_id] * count
        return [ViewGroup(views, tokens, list(range(count)), grid=self._grid(size), times=times)]

    def _views(self, frames: Iterable[Image], size: tuple[int, int]) -> Iterable[np.ndarray]:
        """Yields views uint8 [height, width, 3 * num_frames]."""
        resized = (np.asarray(frame.resize(size, resample=self.resample)) for frame in frames)
        for together in _groups(resized, self.num_frames):
            filled = [*together, *[together[-1]] * (self.num_frames - len(together))]
            yield np.concatenate(filled, axis=-1)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[1] // self.side, size[0] // self.side

    def _num_tokens(self, size: tuple[int, int]) -> int:
        """Returns the number of tokens of a view."""
        return math.prod(self._grid(size))


@dataclass(frozen=True, kw_only=True)
class Qwen3VideoProcessor(QwenVideoProcessor):
    """Videos of Qwen3-VL and later, and of LFM3-VL: the prompt has the time of each view as text before it.

    Attributes:
      min_pixels, max_pixels: Bounds of the pixels of all frames together.
      start_id, end_id: Tokens around an image or a view.
      encode: Tokenizes text.
      has_grid: True if RoPE counts rows and columns.
    """

    start_id: int
    end_id: int
    encode: Callable[[str], list[int]]
    has_grid: bool = True

    def span(self, token_ids: Sequence[int], place: int) -> Span:
        """Returns the placeholder with the tokens around it if any, since each view gets its own."""
        around = list(token_ids[max(place - 1, 0) : place + 2])
        if around == [self.start_id, self.placeholder_id, self.end_id]:
            return Span(place - 1, place + 2)
        return Span(place, place + 1)

    def target_size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        size, bounds = enlarged_to((width, height), self.side), (self.min_pixels, self.max_pixels)
        compared = max(round(num_frames / self.num_frames), 1) * self.num_frames
        return size_within(size, self.side, *bounds, frames=num_frames, compared_frames=compared)

    def parts(self, frames: Iterable[Image], size: tuple[int, int], seconds: Seconds) -> list[ViewGroup | list[int]]:
        parts: list[ViewGroup | list[int]] = []
        of_views = _groups(seconds.of_frames, self.num_frames)
        count = self._num_tokens(size)
        for view, times in zip(self._views(frames, size), of_views, strict=True):
            first, last = times[0], times[-1]
            parts.append([*self.encode(f"<{(first + last) / 2:.1f} seconds>"), self.start_id])
            tokens = [self.placeholder_id] * count
            grid = self._grid(size) if self.has_grid else None
            parts.append(ViewGroup(view[None], tokens, list(range(count)), grid=grid))
            parts.append([self.end_id])
        return parts


def _groups(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yields groups of `size` items in order; the last group may be smaller."""
    rest = iter(items)
    while group := list(itertools.islice(rest, size)):
        yield group


def read_video(settings: ProcessorSettings, bounds: tuple[int, tuple[int, int]]) -> QwenVideoProcessor | None:
    """Returns the processor of videos; None if the tokenizer has no token for videos.

    Args:
      settings: Settings in the files.
      bounds: Pixels of a side of a merged patch, and the bounds of an image's pixels, which apply to videos if the
        files have no settings of videos.

    Raises:
      ConfigError: A setting is not supported.
    """
    placeholder_id = settings.tokenizer.token_to_id(_VIDEO)
    if placeholder_id is None:
        return None
    # The files of Qwen3-VL name the processor of Qwen2-VL's images.
    names = [*settings.names, str(settings.model.get("model_type"))]
    settings.check_video("patch_size", "merge_size", "temporal_patch_size")
    side, (least, most) = bounds
    if settings.video:
        size = settings.video.get("size") or {}
        least = settings.video.get("min_pixels") or size.get("shortest_edge", 128 * side * side)
        most = settings.video.get("max_pixels") or size.get("longest_edge", 768 * side * side)
    shared: dict[str, Any] = {
        **{"placeholder": _VIDEO, "placeholder_id": placeholder_id},
        **{"side": side, "min_pixels": least, "max_pixels": most},
        **{"resample": settings.image("resample", 3), "num_frames": settings.image("temporal_patch_size", 2)},
    }
    if any(name.lower().startswith(("qwen3", "lfm3")) for name in names):
        start_id, end_id = (settings.token_id(each) for each in (_START, _END))
        return Qwen3VideoProcessor(**shared, start_id=start_id, end_id=end_id, encode=settings.encode)
    times_per_second = None
    if any(name.lower().startswith("qwen2_5") for name in names):
        times_per_second = settings.vision("tokens_per_second", 4)
    return QwenVideoProcessor(**shared, times_per_second=times_per_second)
