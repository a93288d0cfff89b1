"""Images that are seen whole, as one view: Qwen's, GLM's, Kimi's, Pixtral's, LLaVA 1.5's and others."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, HALF_SCALE, PixelScale, ProcessorSettings, Reader
from jaxis.vision.processors.processor import ImageProcessor, placed
from jaxis.vision.processors.qwen_videos import Qwen3VideoProcessor, read_video
from jaxis.vision.processors.resizing import (
    Size,
    centered,
    enlarged_in_turn,
    enlarged_to,
    nearest_merged,
    padded_to_squares,
    shrunk_to_edge,
    shrunk_to_patches,
    size_within,
    whole_patches,
)

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Chessboard:
    """Squares of two grays in turn, behind transparent pixels.

    Attributes:
      square: Pixels of a side of its squares.
      first, second: Values of the squares, of which the first is in the upper left corner.
      before_cut: Addend of values before they are cut to whole ones: 0.5 rounds them.
    """

    square: int
    first: int
    second: int
    before_cut: float = 0.0

    def behind(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels uint8 [H, W, 4] -> [H, W, 3]."""
        rows, columns = np.indices(pixels.shape[:2]) // self.square
        board = np.where((rows + columns) % 2, self.second, self.first).astype(np.uint8)[..., None]
        alpha = pixels[..., 3:].astype(np.float32) / 255
        return (alpha * pixels[..., :3] + (1 - alpha) * board + self.before_cut).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class WholeProcessor(ImageProcessor):
    """An image is a placeholder for each of its merged patches, row by row.

    Attributes:
      side: Pixels of a side of a merged patch.
      resize: Width and height after resizing, from those before; patches that they fill in part are filled with zeros.
      start_id, break_id, end_id: Tokens before an image, between its rows, and after it; None for none.
      has_grid: True if RoPE counts rows and columns.
      marks_image: True for views with a fourth channel, 255 where the image is and 0 beside it.
      canvas: Width and height of the view, from the image's; None for the patches that the resized image fills in part.
      chessboard: Background of transparent pixels after resizing; None for white, before it.
    """

    side: int
    resize: Callable[[Size], Size]
    start_id: int | None = None
    break_id: int | None = None
    end_id: int | None = None
    has_grid: bool = False
    marks_image: bool = False
    canvas: Callable[[Size], Size] | None = None
    chessboard: Chessboard | None = None

    @property
    def keeps_alpha(self) -> bool:
        return self.chessboard is not None

    def views(self, image: Image) -> np.ndarray:
        (width, height), (rows, columns) = self.resize(image.size), self._grid(*image.size)
        view = np.zeros((1, rows * self.side, columns * self.side, 3 + self.marks_image), np.uint8)
        view[0, :height, :width, 3:] = 255
        pixels = np.asarray(self.resized(image, width, height))
        if self.chessboard is not None and pixels.shape[2] == 4:
            pixels = self.chessboard.behind(pixels)
        view[0, :height, :width, :3] = pixels
        return view

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        return self._grid(width, height) if self.has_grid else None

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        rows, columns = self._grid(width, height)
        line = [*[self.placeholder_id] * columns, self.break_id]
        token_ids = [self.start_id, *(line * rows)[:-1], self.end_id]
        return placed([each for each in token_ids if each is not None], self.placeholder_id)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        width, height = (self.canvas or self.resize)((width, height))
        return -(-height // self.side), -(-width // self.side)


def read_qwen(
    settings: ProcessorSettings,
    *,
    token: str = "<|image_pad|>",
    default_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280),
    enlarged: Callable[[Size, int], Size] | None = None,
    has_grid: bool = True,
) -> WholeProcessor:
    """Reads the settings of Qwen2-VL and later, and of related models.

    Args:
      settings: Settings in the files.
      token: Text that stands for an image in a prompt.
      default_pixels: Default bounds of the pixels of an image.
      enlarged: Size of small images before the bounds apply; None for the image's own.
      has_grid: True if RoPE counts rows and columns; otherwise videos that count them are not supported.
    """
    settings.check("min_pixels", "max_pixels", "temporal_patch_size", "merge_size")
    side = settings.side()
    least = settings.image("min_pixels", None) or settings.size("size", "shortest_edge", default_pixels[0])
    most = settings.image("max_pixels", None) or settings.size("size", "longest_edge", default_pixels[1])
    video = read_video(settings, (side, (least, most)))
    if not has_grid:
        video = dataclasses.replace(video, has_grid=False) if isinstance(video, Qwen3VideoProcessor) else None

    def resize(size: Size) -> Size:
        return size_within(size if enlarged is None else enlarged(size, side), side, least, most)

    shared = settings.shared(token, CLIP_SCALE)
    return WholeProcessor(**shared, side=side, resize=resize, has_grid=has_grid, video=video)


_MINIMAX_M3: Mapping[str, Any] = {
    **{"size": [672, 672], "process_image_mode": "dynamic_res", "add_start_end_special_tokens": True},
    "img_token_compression_config": {
        **{"image_token_compression_threshold": 1.1, "image_token_compression_method": "patch_merge"},
        **{"max_image_resolution": 1008, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}


def read_minimax_m3(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of MiniMax M3: of the published file none but the patch and the scale."""
    settings.leave_out(_MINIMAX_M3)
    pixels = 56 * 56, 672 * 672
    processor = read_qwen(settings, token="]<]image[>[", default_pixels=pixels, has_grid=False)
    start_id, end_id = (settings.token_id(f"]<]{each} of image[>[") for each in ("start", "end"))
    return dataclasses.replace(processor, start_id=start_id, end_id=end_id)


def read_glm(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of GLM-4.1V and later: the bounds of pixels count both frames of an image."""
    settings.check("temporal_patch_size", "merge_size")
    side, num_frames = settings.side(), settings.image("temporal_patch_size", 2)
    least = settings.size("size", "shortest_edge", 112 * 112)
    most = settings.size("size", "longest_edge", 28 * 28 * 15000)

    def resize(size: Size) -> Size:
        return size_within(enlarged_to(size, side), side, least, most, frames=num_frames)

    return WholeProcessor(**settings.shared("<|image|>", CLIP_SCALE), side=side, resize=resize, has_grid=True)


def read_glm5_next(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of GLM-5.3-Flash: images are black at the right and below, up to whole squares."""
    tokens = ("min_image_tokens", 16), ("max_image_tokens", 8000)
    settings.check("temporal_patch_size", "merge_size", "patch_expand_factor", *dict(tokens))
    side, (least, most) = settings.side(), (settings.image(*each) for each in tokens)
    square = side * settings.image("patch_expand_factor", 1)

    def sizes(size: Size) -> tuple[Size, Size]:
        return padded_to_squares(size, square, least, most)

    shared = settings.shared("<|image|>", CLIP_SCALE)
    return WholeProcessor(**shared, side=side, resize=lambda size: sizes(size)[0], canvas=lambda size: sizes(size)[1])


def read_inkling(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of Inkling, whose images have a patch more in each row than they need."""
    settings.check("rescale_image_frac", "rescale_image_max_upscaled_long_edge")
    side, factor = settings.square(40), settings.image("rescale_image_frac", 1.0)
    most = settings.image("rescale_image_max_upscaled_long_edge", math.inf)

    def resize(size: Size) -> Size:
        ratio = min(max(size) * factor, max(most, *size)) / max(size)
        width, height = (math.floor(each * ratio + 0.5) for each in size)
        return width, height

    def canvas(size: Size) -> Size:
        width, height = resize(size)
        return (width // side + 1) * side, height

    shared = settings.shared(_INKLING_IMAGE, CLIP_SCALE, 1)
    return WholeProcessor(**shared, side=side, resize=resize, canvas=canvas, marks_image=True)


def read_inkling2(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of Inkling 2, which resizes no image."""
    settings.check()
    shared = settings.shared(_INKLING_IMAGE, HALF_SCALE)
    return WholeProcessor(
        **shared,
        side=settings.square(40),
        resize=lambda size: size,
        marks_image=True,
        chessboard=Chessboard(8, 204, 153, before_cut=0.5),
    )


def read_kimi(settings: ProcessorSettings, placeholder: str = "<|media_pad|>") -> WholeProcessor:
    """Reads the settings of Kimi K2.5 to K2.7 in the published files, or in files that transformers writes."""
    settings.check("media_proc_cfg", "max_patches", "merge_size", "patch_size")
    published = settings.image("media_proc_cfg", {})
    if published.get("fixed_output_tokens") is not None:
        raise ConfigError(f"{settings.source}: the image processor has fixed_output_tokens, which is not supported")
    side = settings.image("size", {"max_height": 512, "max_width": 512})
    if side.get("max_height") != side.get("max_width") or not side.get("max_height"):
        raise ConfigError(f"{settings.source} has size={side!r}; expected one number of patches for both sides")
    shared = settings.shared(placeholder, HALF_SCALE)
    scale = shared["pixel_scale"]
    mean, std = published.get("image_mean", scale.mean), published.get("image_std", scale.std)
    shared["pixel_scale"] = PixelScale(scale.factor, tuple(mean), tuple(std))
    patch = published.get("patch_size", settings.image("patch_size", 14))
    most = published.get("in_patch_limit", settings.image("max_patches", 16_384))
    of_side = published.get("patch_limit_on_one_side", side["max_height"])
    return WholeProcessor(
        **shared,
        side=patch * published.get("merge_kernel_size", settings.image("merge_size", 2)),
        resize=functools.partial(shrunk_to_patches, patch=patch, most=most, most_of_side=of_side),
    )


@dataclass(frozen=True, kw_only=True)
class KimiK3Processor(WholeProcessor):
    """The prompt tells an image's size.

    Attributes:
      encode: Function that tokenizes text.
      token_ids: Tokens before the size, after it, of each merged patch, and after all of them.
    """

    encode: Callable[[str], list[int]]
    token_ids: tuple[int, ...]

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        (rows, columns), (begin, content, pad, end) = self._grid(width, height), self.token_ids
        size = self.encode(f"image {width}x{height}")
        return placed([begin, *size, content, *[pad] * (rows * columns), end], pad)


def read_kimi_k3(settings: ProcessorSettings) -> KimiK3Processor:
    """Reads the settings of Kimi K3: Kimi K2.5's, and those of the chessboard."""
    fields: dict[str, Any] = {**vars(read_kimi(settings, "<|kimi_image_placeholder|>"))}
    published = settings.image("media_proc_cfg", {})
    board = published.get("transparent_bg_config") or {}
    stated = board.get("pattern"), published.get("transparent_bg_fill_stage")
    if stated != ("chessboard", "after_resize") or not board.get("chessboard_square_on_top_left", True):
        raise ConfigError(
            f"{settings.source}: transparent parts of images become {stated[0]!r} in the stage {stated[1]!r}; only a "
            "'chessboard' that begins white, 'after_resize', is supported"
        )
    tokens = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
    values = board.get("chessboard_white_value", 255), board.get("chessboard_gray_value", 200)
    fields["chessboard"] = Chessboard(board.get("chessboard_square_size", 16), *values)
    token_ids = tuple(map(settings.token_id, tokens))
    return KimiK3Processor(**fields, encode=settings.encode, token_ids=token_ids)


def read_muse_glimmer(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of Muse Glimmer."""
    settings.check("max_image_tokens", "merge_size", "temporal_patch_size")
    side, most = settings.side(), settings.image("max_image_tokens", 4096)
    start_id, end_id = (settings.token_id(f"<|image_{each}|>") for each in ("start", "end"))
    resize = functools.partial(nearest_merged, side=side, most=most)
    shared = settings.shared("<|patch|>", HALF_SCALE, 1)
    return WholeProcessor(**shared, side=side, resize=resize, start_id=start_id, end_id=end_id)


def read_pixtral(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of Pixtral and Mistral 3, where a token ends each row of patches."""
    settings.check()
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    image, *between = (settings.processor.get(name, default) for name, default in names.items())
    shared = settings.shared(image, CLIP_SCALE)
    break_id, end_id = (settings.token_id(token) for token in between)
    side = settings.processor.get("patch_size", 16) * settings.processor.get("spatial_merge_size", 1)
    return WholeProcessor(**shared, **_within_edge(settings, side), break_id=break_id, end_id=end_id)


def read_lighton_ocr(settings: ProcessorSettings) -> WholeProcessor:
    """Reads the settings of LightOnOCR, whose images are placeholders alone."""
    settings.check()
    side = settings.processor.get("patch_size", 14) * settings.processor.get("spatial_merge_size", 2)
    of_images = settings.image("patch_size", {"height": 16, "width": 16})
    if of_images not in (side, {"height": side, "width": side}):
        raise ConfigError(
            f"{settings.source}: images are resized to patches of {of_images}, and the tower's merged ones have "
            f"{side} pixels: correct the files"
        )
    token = settings.tokenizer.token_text(settings.model.get("image_token_id", 151_655))
    return WholeProcessor(**settings.shared(token, CLIP_SCALE), **_within_edge(settings, side))


def _within_edge(settings: ProcessorSettings, side: int) -> dict[str, Any]:
    """Returns the fields about sizes, given the side of a merged patch."""
    longest = settings.size("size", "longest_edge", 1024)
    return {"side": side, "resize": functools.partial(shrunk_to_edge, side=side, longest=longest)}


@dataclass(frozen=True, kw_only=True)
class SquareProcessor(WholeProcessor):
    """Each image becomes the middle of a square, or is cut to it; patches that it fills in part are left out.

    Attributes:
      size: Pixels of a side of the square.
      color: Red, green and blue around the image.
    """

    size: int
    color: tuple[int, ...] = (0, 0, 0)

    def views(self, image: Image) -> np.ndarray:
        square = centered(self.resized(image, *self.resize(image.size)), (self.size, self.size), self.color)
        return whole_patches(square[None], self.side)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        del width, height
        return self.size // self.side, self.size // self.side


def read_llava(settings: ProcessorSettings) -> SquareProcessor:
    """Reads the settings of LLaVA 1.5: both ends of the longer side are cut off, or the image is stretched."""
    settings.check("do_center_crop", "crop_size")
    is_cropped = settings.image("do_center_crop", False)
    size = settings.size("size", "shortest_edge", 224) if is_cropped else settings.square(224)
    crop = settings.image("crop_size", None)
    if is_cropped and crop not in (None, size, {"height": size, "width": size}):
        raise ConfigError(f"{settings.source} cuts {crop!r} out of images of {size} pixels; expected that size")
    if settings.image("do_pad", False):
        raise ConfigError(f"{settings.source}: the image processor has do_pad, which is not supported")

    def resize(of: Size) -> Size:
        longer = int(size * max(of) / min(of)) if is_cropped else size
        return (size, longer) if of[0] <= of[1] else (longer, size)

    shared = settings.shared(settings.processor.get("image_token", "<image>"), CLIP_SCALE)
    patch = settings.processor.get("patch_size") or settings.vision("patch_size", 14)
    return SquareProcessor(**shared, side=patch, resize=resize, size=size)


def read_deepseek_vl(settings: ProcessorSettings) -> SquareProcessor:
    """Reads the settings of DeepSeek-VL."""
    settings.check("min_size", "background_color")
    size, least, patch = settings.square(384), settings.image("min_size", 14), settings.vision("patch_size", 16)
    if (count := settings.processor.get("num_image_tokens", 576)) != (size // patch) ** 2:
        raise ConfigError(f"{settings.source} has num_image_tokens={count}; the tower makes {(size // patch) ** 2}")
    token = settings.tokenizer.token_text(settings.model.get("image_token_id", 100_015))
    shared = settings.shared(token, CLIP_SCALE)
    color = tuple(int(255 * each) for each in shared["pixel_scale"].mean)

    def resize(of: Size) -> Size:
        width, height = (max(round(each * (size / max(of))), least) for each in of)
        return width, height

    return SquareProcessor(**shared, side=patch, resize=resize, size=size, color=color)


_INKLING_IMAGE = "<|unused_200054|>"
_PLAIN_ROPE = functools.partial(read_qwen, has_grid=False)
READERS: Mapping[str, Reader] = {
    "DeepseekVLProcessor": read_deepseek_vl,
    "Exaone4_5": _PLAIN_ROPE,
    "Glm4v": read_glm,
    "Glm5Next": read_glm5_next,
    "Glm46V": read_glm,
    "Inkling": read_inkling,
    "Inkling2": read_inkling2,
    "KimiK25": read_kimi,
    "KimiK3": read_kimi_k3,
    "Kimi_K25": read_kimi,
    "Lfm3Vl": _PLAIN_ROPE,
    "LightOnOcr": read_lighton_ocr,
    "LlavaProcessor": read_llava,
    "MiniMaxM3VL": read_minimax_m3,
    "MiniMaxVLProcessor": read_minimax_m3,
    "MuseGlimmer": read_muse_glimmer,
    "PaddleOCRVL": functools.partial(
        read_qwen,
        token="<|IMAGE_PLACEHOLDER|>",
        default_pixels=(384 * 384, 1536 * 1536),
        enlarged=enlarged_in_turn,
    ),
    "Pixtral": read_pixtral,
    "Qwen2VL": read_qwen,
    "Qwen2_5_VL": read_qwen,
    "Qwen3VL": read_qwen,
}
