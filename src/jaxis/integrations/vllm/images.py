"""Images in vLLM's front end: jaxis' own processors make of them what the worker's tower reads. Imports no JAX.

vLLM asks a model's class for a processor, which turns a prompt with media into token ids with places in them, and data
for these places. `encoder_cache.py` makes an `EmbeddedInput` of them again, in the worker.
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
_SIDES = tuple(2 ** (exponent / 2) for exponent in range(2 * 13 + 1))  # of images whose tokens are counted, in pixels


@functools.cache
def _processor(model: str, revision: str | None, token: str | None) -> tuple[ImageProcessor | None, Tokenizer | None]:
    """A checkpoint's image processor and its tokenizer; None for what it has not."""
    path = resolve_model(model, revision=revision, token=token, with_weights=False)
    tokenizer = Tokenizer.from_path(path)
    return read_processor(path, tokenizer) if path.is_dir() else None, tokenizer


class ImageInfo(BaseProcessingInfo):
    """What vLLM asks of a checkpoint's images."""

    @property
    def processor(self) -> ImageProcessor | None:
        """What makes pixels and tokens of them; None: the checkpoint takes none."""
        return self._of_checkpoint[0]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """jaxis' own."""
        return self._of_checkpoint[1]

    @property
    def _of_checkpoint(self) -> tuple[ImageProcessor | None, Tokenizer | None]:
        config = self.ctx.model_config
        if config.runner_type != "generate":
            return None, None
        token = config.hf_token if isinstance(config.hf_token, str) else None
        return _processor(str(config.model), config.revision, token)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """See `BaseProcessingInfo`; without a processor, vLLM runs the text alone."""
        return {} if self.processor is None else {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """See `BaseProcessingInfo`."""
        del mm_counts
        return {} if self.processor is None else {IMAGE: min(seq_len, _most_embeddings(self.processor))}


def _most_embeddings(processor: ImageProcessor) -> int:
    """The most embeddings of an image, of a choice of sizes."""
    return max(
        len(processor.tokens(round(width), round(height))[1])
        for width in _SIDES
        for height in _SIDES
        if width * height <= MAX_PIXELS and max(width, height) <= MAX_RATIO * min(width, height)
    )


class DummyImages(BaseDummyInputsBuilder[ImageInfo]):
    """Images with which vLLM tries its front end before requests come."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """See `BaseDummyInputsBuilder`."""
        processor = self.info.processor
        return "" if processor is None else processor.placeholder * mm_counts.get(IMAGE, 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        """See `BaseDummyInputsBuilder`."""
        del seq_len, mm_options
        from PIL import Image

        return {IMAGE: [Image.new("RGB", (64, 64))] * mm_counts.get(IMAGE, 0)}


class JaxisImages(BaseMultiModalProcessor[ImageInfo]):
    """Puts images into prompts, as `PromptImages` does."""

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """See `BaseMultiModalProcessor`.

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
        # How many there may be, vLLM has checked.
        images = PromptImages(info.processor, {IMAGE: len(sources)}, info.ctx.model_config.max_model_len)
        return images.put(TokenizedPrompt(self._text(inputs.prompt), inputs.prompt), sources)

    def _text(self, token_ids: Sequence[int]) -> str | None:
        """The prompt's text, which vLLM does not bring along; None where token ids are not those of any."""
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
    """An image as `open_image` takes it, where vLLM has the file as its bytes."""
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
    """An image that was made in this process; what clients send as if it were one is none."""


def _data(item: EmbeddedInput) -> ImageItem:
    """What the worker needs of an image beside its name and its place."""
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
    """By which vLLM knows an image: all of it that counts where its keys and values are found in the prefix cache."""
    return item.digest.hex() + ("" if item.grid is None else f":{item.grid[0]}x{item.grid[1]}")


def _place(item: EmbeddedInput) -> PlaceholderRange:
    is_embedded = torch.zeros(item.num_tokens, dtype=torch.bool)
    is_embedded[list(item.rows)] = True
    return PlaceholderRange(item.start, item.num_tokens, is_embedded)
