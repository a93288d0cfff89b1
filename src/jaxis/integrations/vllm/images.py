"""Images in vLLM's front end, prepared by jaxis' own processors for the worker's image encoder. Imports no JAX.

vLLM asks a model's class for a processor, which converts a prompt with media to token ids with placeholders, and data
for these. In the worker, `encoder_cache.py` converts them back to an `EmbeddedInput`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    TimingContext,
)

from jaxis.errors import RequestError
from jaxis.loading.hub import resolve_model
from jaxis.prompts import EmbeddedInput, TokenizedPrompt
from jaxis.tokenizer import Tokenizer
from jaxis.vision.decode import MAX_PIXELS, MAX_RATIO, ImageSource
from jaxis.vision.processors import read_processor
from jaxis.vision.processors.processor import ImageProcessor
from jaxis.vision.prompt_images import PromptImages

IMAGE = "image"
_SIDES = tuple(2 ** (exponent / 2) for exponent in range(2 * 13 + 1))  # image sides in pixels, to count tokens of


@functools.cache
def _processor(model: str, revision: str | None, token: str | None) -> tuple[ImageProcessor | None, Tokenizer | None]:
    """Returns a checkpoint's image processor and tokenizer; None for a missing one."""
    path = resolve_model(model, revision=revision, token=token, with_weights=False)
    tokenizer = Tokenizer.from_path(path)
    return read_processor(path, tokenizer) if path.is_dir() else None, tokenizer


class ImageInfo(BaseProcessingInfo):
    """A checkpoint's facts about images, for vLLM."""

    @property
    def processor(self) -> ImageProcessor | None:
        """Image processor; None if the checkpoint takes no images."""
        return self._of_checkpoint[0]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of jaxis."""
        return self._of_checkpoint[1]

    @property
    def _of_checkpoint(self) -> tuple[ImageProcessor | None, Tokenizer | None]:
        config = self.ctx.model_config
        if config.runner_type != "generate":
            return None, None
        token = config.hf_token if isinstance(config.hf_token, str) else None
        return _processor(str(config.model), config.revision, token)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Returns no limit of images; without a processor, vLLM runs the text alone."""
        return {} if self.processor is None else {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        del mm_counts
        return {} if self.processor is None else {IMAGE: min(seq_len, _most_embeddings(self.processor))}


def _most_embeddings(processor: ImageProcessor) -> int:
    """Returns the largest number of an image's embeddings, over a choice of sizes."""
    return max(
        len(processor.tokens(round(width), round(height))[1])
        for width in _SIDES
        for height in _SIDES
        if width * height <= MAX_PIXELS and max(width, height) <= MAX_RATIO * min(width, height)
    )


class DummyImages(BaseDummyInputsBuilder[ImageInfo]):
    """Images for vLLM's test of its front end before requests arrive."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        processor = self.info.processor
        return "" if processor is None else processor.placeholder * mm_counts.get(IMAGE, 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        del seq_len, mm_options
        from PIL import Image

        return {IMAGE: [Image.new("RGB", (64, 64))] * mm_counts.get(IMAGE, 0)}


class JaxisImages(BaseMultiModalProcessor[ImageInfo]):
    """Processor that puts images into prompts, as `PromptImages` does."""

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """Converts a prompt with images.

        Raises:
          VLLMValidationError: An image cannot be read, is too large, or has no place in the prompt.
        """
        try:
            with timing_ctx.record("jaxis_images"):
                prompt = self._put(inputs)
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=IMAGE) from error
        return mm_input(
            prompt_token_ids=list(prompt.token_ids),
            mm_kwargs=MultiModalKwargsItems({IMAGE: [_data(item) for item in prompt.inputs]}),
            mm_hashes={IMAGE: [_name(item) for item in prompt.inputs]},
            mm_placeholders={IMAGE: [_place(item) for item in prompt.inputs]},
        )

    def _put(self, inputs: ProcessorInputs) -> TokenizedPrompt:
        info, items = self.info, inputs.mm_data_items.get(IMAGE)
        if info.processor is None or items is None:
            raise RequestError("the model takes no images: send text")
        if inputs.hf_processor_mm_kwargs:
            raise RequestError(
                "mm_processor_kwargs is not supported: images are prepared as the checkpoint's files say"
            )
        if inputs.media_io_kwargs:
            raise RequestError("media_io_kwargs is not supported: leave it out")
        sources = [_source(each) for each in items.get_all_items_for_hash()]
        # vLLM has checked the number of images.
        images = PromptImages(info.processor, {IMAGE: len(sources)}, info.ctx.model_config.max_model_len)
        return images.put(TokenizedPrompt(self._text(inputs.prompt), inputs.prompt), sources)

    def _text(self, token_ids: Sequence[int]) -> str | None:
        """Returns the prompt's text, which vLLM does not pass on; None if the token ids are not those of any text."""
        if (tokenizer := self.info.tokenizer) is None:
            return None
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return text if tokenizer.encode(text, add_special_tokens=False) == list(token_ids) else None

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        """Never called."""
        raise NotImplementedError


def _source(item: Any) -> ImageSource:
    """Converts vLLM's image for `open_image`; uses the file's bytes if vLLM has them."""
    from PIL import Image

    if isinstance(item, MediaWithBytes):
        return item.original_bytes
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim == 3 and item.shape[2] == 3:
        return Image.fromarray(item)
    if not isinstance(item, Image.Image):
        kind = "missing" if item is None else f"of type {type(item).__name__}"
        raise RequestError(f"an image is {kind}: give a PIL image, or an array uint8 [height, width, 3]")
    return item


class ImageItem(MultiModalKwargsItem):
    """An image prepared in this process, as opposed to data from a client."""


def _data(item: EmbeddedInput) -> ImageItem:
    """Returns the worker's data about an image, except its name and place."""
    values = {
        "views": np.frombuffer(item.data, np.uint8).reshape(item.shape),
        "order": None if item.order is None else np.asarray(item.order, np.int32),
        "weights": None if item.weights is None else np.asarray(item.weights, np.float64),
        "is_bidirectional": np.asarray([item.is_bidirectional], np.uint8),
    }
    field = MultiModalBatchedField()
    return ImageItem(
        {
            name: MultiModalFieldElem(torch.from_numpy(np.array(value)), field)
            for name, value in values.items()
            if value is not None
        }
    )


def _name(item: EmbeddedInput) -> str:
    """Returns vLLM's name of an image, with everything that decides its keys and values in the prefix cache."""
    return item.digest.hex() + ("" if item.grid is None else f":{item.grid[0]}x{item.grid[1]}")


def _place(item: EmbeddedInput) -> PlaceholderRange:
    is_embedded = torch.zeros(item.num_tokens, dtype=torch.bool)
    is_embedded[list(item.rows)] = True
    return PlaceholderRange(item.start, item.num_tokens, is_embedded)
