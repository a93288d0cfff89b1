"""Images of a prompt: found in messages, read, and put in the place of the tokens that stand for them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxis.errors import ContextLengthError, RequestError
from jaxis.prompts import EmbeddedInput, Message, TokenizedPrompt
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_template import IMAGE_PART
from jaxis.vision.decode import ImageSource, decode_image, open_image
from jaxis.vision.processors import read_processor
from jaxis.vision.processors.processor import ImageProcessor

NO_IMAGES = "this model does not support image input: send text"

_DECODING = threading.Semaphore(2)  # images whose pixels are in memory at once, all requests together


class PromptImages:
    """Puts images into a model's prompts. May be used from several threads.

    Args:
      processor: The model's.
      max_images: Most of a prompt.
      max_model_len: Most tokens of a prompt and its output.
    """

    def __init__(self, processor: ImageProcessor, max_images: int, max_model_len: int) -> None:
        self._processor, self._max_images, self._max_model_len = processor, max_images, max_model_len

    @classmethod
    def of_model(
        cls, files: Path, tokenizer: Tokenizer | None, max_images: int, max_model_len: int
    ) -> PromptImages | None:
        """Those of a model whose engine takes so many images (see `read_processor`); None: it takes none."""
        processor = read_processor(files, tokenizer) if max_images else None
        return None if processor is None else cls(processor, max_images, max_model_len)

    def put(self, prompt: TokenizedPrompt, sources: Sequence[ImageSource]) -> TokenizedPrompt:
        """The prompt with its images, in their order, in place of its placeholders.

        Args:
          prompt: Has a placeholder token for each image.
          sources: The images.

        Raises:
          ContextLengthError: The images have too many tokens, which is found before any is decoded.
          RequestError: An image cannot be read, there are too many, or there are more or fewer placeholders.
        """
        if not sources:
            return prompt
        if len(sources) > self._max_images:
            raise RequestError(
                f"the prompt has {len(sources)} images, and at most {self._max_images} are taken: send fewer, or start "
                "with a larger limit_mm_per_prompt"
            )
        processor = self._processor.of_prompt(len(sources))
        token_ids, places = processor.spelled(prompt.token_ids, prompt.text)
        if len(places) != len(sources):
            raise RequestError(
                f"the prompt has {len(places)} placeholders {processor.placeholder} for {len(sources)} images: it "
                "needs one for each, and none in its text"
            )
        names = [f"image {i + 1} of {len(sources)}" if len(sources) > 1 else "the image" for i in range(len(sources))]
        opened = [open_image(source, name) for source, name in zip(sources, names, strict=True)]
        self._check_length(processor, len(token_ids), [image.size for image in opened])
        expanded: list[int] = []
        inputs: list[EmbeddedInput] = []
        start = 0
        for place, image, name in zip(places, opened, names, strict=True):
            with _DECODING:
                upright = decode_image(image, name)
                parts = processor.parts(upright)
            expanded += token_ids[start:place]
            for part in parts:
                inputs.append(
                    EmbeddedInput(
                        processor.digest(part),
                        len(expanded),
                        len(part.token_ids),
                        tuple(part.rows),
                        part.views.shape,
                        part.views.tobytes(),
                        is_bidirectional=processor.is_bidirectional,
                        grid=processor.grid(*upright.size),
                        order=None if part.order is None else tuple(part.order),
                        weights=None if part.weights is None else tuple(part.weights),
                    )
                )
                expanded += part.token_ids
            start = place + 1
        return dataclasses.replace(prompt, token_ids=expanded + token_ids[start:], inputs=tuple(inputs))

    def _check_length(self, processor: ImageProcessor, num_tokens: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Raises a ContextLengthError for images too large; on their side, they may have a few tokens less."""
        for width, height in sizes:
            both = (processor.tokens(*size) for size in ((width, height), (height, width)))
            num_tokens += min(len(token_ids) for token_ids, _ in both) - 1
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(num_tokens, self._max_model_len, at_least=True)


def with_images(
    prompt: TokenizedPrompt, sources: Sequence[ImageSource], images: PromptImages | None
) -> TokenizedPrompt:
    """See `PromptImages.put`; without images, of which a model may take none, the prompt is as it was.

    Raises:
      RequestError: There are images, and the model takes none.
    """
    if not sources:
        return prompt
    if images is None:
        raise RequestError(NO_IMAGES, param="messages")
    return images.put(prompt, sources)


def take_images(messages: Sequence[Message]) -> tuple[Sequence[Message], list[ImageSource]]:
    """Messages with a part {"type": "image"} for each image, as chat templates take them, and the images in order.

    Args:
      messages: One conversation; parts of contents may be OpenAI's `image_url`, vLLM's `image_pil`, and
        {"type": "image", "image": ...}.

    Raises:
      RequestError: A part has no image.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        return messages, []  # what renders them says what is wrong
    taken: list[Message] = []
    sources: list[ImageSource] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            taken.append(message)
            continue
        parts: list[Any] = []
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("image_url", "image_pil", "image"):
                parts.append(part)
                continue
            source = part.get(kind)
            if isinstance(source, Mapping):
                source = source.get("url")
            if source is None:
                raise RequestError(f"is of type {kind!r} and has no {kind!r}", param=f"messages[{i}].content[{j}]")
            parts.append(IMAGE_PART)
            sources.append(source)
        taken.append({**message, "content": parts})
    return taken, sources


def images_of_prompt(data: object, where: str) -> list[ImageSource]:
    """The images of vLLM's `multi_modal_data`: {"image": one, or a list}.

    Raises:
      RequestError: It is something else.
    """
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise RequestError(f'{where}: multi_modal_data must be {{"image": an image, or a list of images}}')
    images = data.get("image")
    return [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
