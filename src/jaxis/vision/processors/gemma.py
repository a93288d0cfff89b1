"""Images of Gemma 3 and Gemma 4, which are seen whole."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxis.errors import ConfigError
from jaxis.vision.processors.preprocessor_config import HALF_SCALE, ProcessorSettings, Reader
from jaxis.vision.processors.processor import Encode, PixelScale, placed, rewritten
from jaxis.vision.processors.resizing import most_merged
from jaxis.vision.processors.whole import WholeProcessor


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor(WholeProcessor):
    """Images of Gemma 4, as large as their tokens allow.

    Attributes:
      max_tokens: Largest number of tokens of an image.
      around: Tokens around an image, which do not see each other.
    """

    max_tokens: int
    around: tuple[int, int]

    @classmethod
    def read(cls, settings: ProcessorSettings, *, is_unified: bool = False) -> Gemma4Processor:
        """Reads the settings of Gemma 4, or of the 12B (`is_unified`), whose pixels are in [0, 1]."""
        settings.check("do_normalize", "max_soft_tokens", "pooling_kernel_size")
        if settings.image("do_normalize", False):
            raise ConfigError(f"{settings.source}: the image processor has do_normalize, which is not supported")
        text, model = settings.model.get("text_config") or {}, settings.model
        image_id, most = model.get("image_token_id", 258_880), settings.image("max_soft_tokens", 280)
        side = settings.image("patch_size", 16) * settings.image("pooling_kernel_size", 3)
        # The reference does this scaling in the model.
        mean, std = ((0.0,) * 3, (1.0,) * 3) if is_unified else (HALF_SCALE.mean, HALF_SCALE.std)
        return cls(
            pixel_scale=PixelScale(settings.image("rescale_factor", 1 / 255), mean, std),
            resample=settings.image("resample", 3),
            placeholder=settings.tokenizer.token_text(image_id),
            placeholder_id=image_id,
            is_bidirectional=text.get("use_bidirectional_attention") == "vision",
            max_tokens=most,
            side=side,
            resize=functools.partial(most_merged, side=side, most=most),
            around=(model.get("boi_token_id", 255_999), model.get("eoi_token_id", 258_882)),
        )

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        del text
        image = (self.around[0], self.placeholder_id, self.around[1])
        spelled = [each for i in token_ids for each in (image if i == self.placeholder_id else (i,))]
        return placed(spelled, self.placeholder_id)


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor(WholeProcessor):
    """Images of Gemma 3: squares of one size, each on its own line, whose ends become tokens with the text around it.

    Attributes:
      image_ids: Tokens of an image.
      encode: Tokenizes text, with or without the tokenizer's special tokens.
    """

    image_ids: list[int]
    encode: Encode
    is_bidirectional: bool = True

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Gemma3Processor:
        """Reads the settings of Gemma 3."""
        crops = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        settings.check("do_pan_and_scan", *(f"pan_and_scan_{name}" for name in crops))
        if settings.image("do_pan_and_scan", False):
            raise ConfigError(f"{settings.source}: the image processor has do_pan_and_scan, which is not supported")
        size, num_tokens = settings.square(224), settings.processor.get("image_seq_length", 256)
        return cls(
            **settings.shared("<start_of_image>", HALF_SCALE, 2),
            side=size,
            resize=lambda _: (size, size),
            image_ids=[settings.token_id("<image_soft_token>")] * num_tokens,
            encode=settings.encode,
        )

    def tokens(self, width: int, height: int) -> tuple[list[int], list[int]]:
        del width, height
        return placed(self.image_ids, self.image_ids[0])

    def spelled(self, token_ids: Sequence[int], text: str | None) -> tuple[list[int], list[int]]:
        line = f"\n\n{self.placeholder}<image_soft_token><end_of_image>\n\n"
        spelled = rewritten(self.encode, token_ids, text, self.placeholder, line)
        if text is None:
            own = self.encode(line, False)
            spelled = [each for i in token_ids for each in (own if i == self.placeholder_id else [i])]
        return placed(spelled, self.image_ids[0])


READERS: Mapping[str, Reader] = {
    "Gemma3": Gemma3Processor.read,
    "Gemma4": Gemma4Processor.read,
    "Gemma4Unified": functools.partial(Gemma4Processor.read, is_unified=True),
}
