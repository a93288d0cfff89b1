"""Families whose images are cut into rectangles: the settings of each, as a `TileProcessor`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import CLIP_SCALE, HALF_SCALE, ProcessorSettings, Reader
from jaxis.vision.processors.processor import PixelScale
from jaxis.vision.processors.resizing import (
    Size,
    edge_then_multiples,
    filled_grid,
    fitted,
    least_enlarged_grid,
    multiple,
    nearest_grid,
    rectangles,
    size_within,
)
from jaxis.vision.processors.tiles import AyaVisionProcessor, Cut, Marks, NumberedTileProcessor, TileProcessor

_START, _PATCH, _LINE, _END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>"
_AROUND, _MOST_PIXELS = "<fake_token_around_image>", 4096  # of Idefics3; pixels of a side


def _processor(
    settings: ProcessorSettings,
    placeholder: str,
    scale: PixelScale,
    resample: int = 3,
    *,
    token: str | None = None,
    patch: str | None = None,
    kind: type[TileProcessor] = TileProcessor,
    **fields: Any,
) -> TileProcessor:
    """Creates a processor, whose views' token is `patch`, `token` (the placeholder's), or the placeholder."""
    shared = settings.shared(placeholder, scale, resample, token=token)
    patch = patch or token or placeholder
    fields |= {"patch": patch, "patch_id": settings.token_id(patch)}
    return kind(**shared, **fields, encode=settings.encode)


def _squares(grid: Callable[[Size], Size], side: int) -> Callable[[Size], Cut]:
    """Returns the cut into a grid of squares, with the whole as one more."""
    return lambda size: Cut(*grid(size), (side, side), (side, side))


def _nearest(settings: ProcessorSettings, side: int) -> Callable[[Size], Cut]:
    """Returns the cut into squares of nearest aspect ratio, as many as the settings allow."""
    settings.check("crop_to_patches", "min_patches", "max_patches")
    bounds = {"least": settings.image("min_patches", 1), "most": settings.image("max_patches", 12)}
    return _squares(partial(nearest_grid, tile=side, **bounds), side)


def read_internvl(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of InternVL. The reference's processor always crops, whatever the file says."""
    num_tokens = settings.processor.get("image_seq_length", 256)
    start, end = settings.tokens("<img>", "</img>")
    return _processor(
        *(settings, "<IMG_CONTEXT>", CLIP_SCALE),
        cut=_nearest(settings, settings.square(384)),
        marks=Marks(start, end),
        num_tokens=lambda _: num_tokens,
    )


def read_aya_vision(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of Aya Vision: text before each square names it."""
    given = settings.processor.get
    start, end = given("start_of_img_token", _START), given("end_of_img_token", _END)
    start, end = settings.tokens(start, end)
    patch = given("img_patch_token", _PATCH)
    side = given("patch_size", 28) * given("downsample_factor", 1)
    num_tokens = (given("img_size", 364) // side) ** 2
    return _processor(
        *(settings, given("image_token", "<image>"), CLIP_SCALE),
        token=patch,
        kind=AyaVisionProcessor,
        cut=_nearest(settings, settings.square(384)),
        marks=Marks(
            *(start, end),
            tile=(f"{given('tile_token', 'TILE')}_{{number}}", ""),
            whole=(given("tile_global_token", "TILE_GLOBAL"), ""),
        ),
        num_tokens=lambda _: num_tokens,
    )


def read_cohere2_vision(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of Command A Vision: a token ends each square."""
    settings.check("crop_to_patches", "min_patches", "max_patches")
    side, num_tokens = settings.square(512), settings.image("patch_size", 16) ** 2
    most = settings.image("max_patches", 12) if settings.image("crop_to_patches", True) else 1
    start, end, line = settings.tokens(_START, _END, _LINE)
    return _processor(
        *(settings, _PATCH, CLIP_SCALE),
        cut=_squares(partial(least_enlarged_grid, tile=side, most=most), side),
        marks=Marks(start, end, tile=("", line), whole=("", line)),
        num_tokens=lambda _: num_tokens,
    )


def read_llama4(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of Llama 4: a token separates squares of a row, another ends the row."""
    settings.check("max_patches", "resize_to_max_canvas")
    side, most = settings.square(336), settings.image("max_patches", 16)
    patch, ratio = settings.processor.get("patch_size", 14), settings.processor.get("pixel_shuffle_ratio", 0.5)
    num_tokens, is_enlarged = (side // patch) ** 2 // round(1 / ratio**2), settings.image("resize_to_max_canvas", False)
    names = ("image_start", "image_end", "tile_x_separator", "tile_y_separator", "patch")
    start, end, column, row, token = settings.tokens(*(f"<|{name}|>" for name in names))
    return _processor(
        *(settings, "<|image|>", HALF_SCALE, 2),
        patch=token,
        cut=_squares(partial(filled_grid, tile=side, most=most, is_enlarged=is_enlarged), side),
        fit=partial(fitted, tile=None if is_enlarged else side),
        marks=Marks(start, end, whole=("<|image|>", ""), column=column, row=row, after=row),
        num_tokens=lambda _: num_tokens,
    )


def read_idefics3(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of Idefics3 and SmolVLM: images are enlarged, and text names row and column of each square."""
    settings.check("max_image_size", "do_image_splitting", "return_row_col_info", "video_sampling")
    longest, side = settings.size("size", "longest_edge", 4 * 364), settings.size("max_image_size", "longest_edge", 364)
    splits, num_tokens = settings.image("do_image_splitting", True), settings.processor.get("image_seq_len", 169)
    sizes = partial(edge_then_multiples, longest=longest, most=_MOST_PIXELS, tile=side)

    def grid(size: Size) -> Size:
        width, height = sizes(size)[1]
        return (width // side, height // side) if splits else (1, 1)

    return _processor(
        *(settings, "<image>", HALF_SCALE, 1),
        steps=sizes if splits else lambda size: sizes(size)[:1],
        cut=_squares(grid, side),
        marks=Marks(
            end=_AROUND,
            tile=(f"{_AROUND}<row_{{row}}_col_{{column}}>", ""),
            whole=(f"{_AROUND}<global-img>", ""),
            row="\n",
            after="\n\n",
        ),
        num_tokens=lambda _: num_tokens,
    )


def read_lfm2_vl(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of LFM2-VL: the whole has its own aspect ratio, and only large images are cut."""
    settings.check(
        *("downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens"),
        *("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "return_row_col_info"),
        "max_num_patches",
    )
    image = settings.image
    side, tile = image("encoder_patch_size", 16) * image("downsample_factor", 2), image("tile_size", 512)
    least, most = image("min_image_tokens", 64), image("max_image_tokens", 256)
    tolerance = image("max_pixels_tolerance", 2.0)
    cuts = image("do_image_splitting", True) and image("max_tiles", 10) != 1
    bounds = image("min_tiles", 2), image("max_tiles", 10)
    has_whole, has_marks = image("use_thumbnail", True), settings.processor.get("use_image_special_tokens", True)

    def cut(size: Size) -> Cut:
        # As in the reference, a side that rounds to 0 merged patches counts as half a patch.
        num_tokens = math.prod(max(round(each / side), 0.5) for each in size)
        grid = nearest_grid(size, tile, *bounds) if cuts and num_tokens > most * tolerance else (1, 1)
        whole = size_within(size, side, least * side**2, most * side**2, fewest=1)
        return Cut(*grid, (tile, tile), whole if has_whole or grid == (1, 1) else None)

    marks = Marks(
        *("<|image_start|>", "<|image_end|>"),
        tile=("<|img_row_{row}_col_{column}|>", ""),
        after="<|img_thumbnail|>" if has_whole else "",
    )
    return _processor(
        *(settings, "<image>", HALF_SCALE, 2),
        cut=cut,
        marks=marks if has_marks else Marks(),
        num_tokens=lambda size: math.prod(math.ceil(each / side) for each in size),
        is_apart=True,
    )


def read_minicpm_v(settings: ProcessorSettings) -> TileProcessor:
    """Reads the settings of MiniCPM-V 4.6: views have the image's aspect ratio, and the whole comes first."""
    settings.check("max_slice_nums", "scale_resolution", "slice_mode", "downsample_mode", "use_image_id")
    mode, of_model = (each("downsample_mode", "16x") for each in (settings.image, settings.model.get))
    if mode != of_model or mode not in ("16x", "4x"):
        raise ConfigError(
            f"{settings.source}: the image processor has downsample_mode={mode!r}, and config.json {of_model!r}; "
            "expected 16x or 4x for both"
        )
    side = settings.image("patch_size", 14) * (4 if mode == "16x" else 2)
    resolution = settings.image("scale_resolution", 448)
    most = settings.image("max_slice_nums", 9) if settings.image("slice_mode", True) else 1

    def fitting(width: float, height: float, *, grows: bool) -> Size:
        if grows or width * height > resolution**2:
            ratio = width / height
            height = int(resolution / math.sqrt(ratio))
            width = int(height * ratio)
        return multiple(width, side), multiple(height, side)

    def cut(size: Size) -> Cut:
        columns, rows = rectangles(size, most, resolution**2)
        of_one = multiple(size[0], columns) / columns, multiple(size[1], rows) / rows
        return Cut(columns, rows, fitting(*of_one, grows=True), fitting(*size, grows=(columns, rows) == (1, 1)))

    return _processor(
        *(settings, "<|image_pad|>", HALF_SCALE),
        kind=NumberedTileProcessor if settings.image("use_image_id", True) else TileProcessor,
        cut=cut,
        marks=Marks(tile=("<slice>", "</slice>"), whole=("<image>", "</image>"), row="\n"),
        num_tokens=lambda size: math.prod(size) // side**2,
        is_apart=True,
        is_whole_first=True,
    )


READERS: Mapping[str, Reader] = {
    "AyaVision": read_aya_vision,
    "Cohere2Vision": read_cohere2_vision,
    "Idefics3": read_idefics3,
    "InternVL": read_internvl,
    "Lfm2Vl": read_lfm2_vl,
    "Llama4": read_llama4,
    "MiniCPMV4_6": read_minicpm_v,
    "SmolVLM": read_idefics3,
}
