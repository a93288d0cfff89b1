"""Images of requests in the one form in which prompts have them, whatever a protocol calls its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer.chat_template import IMAGE_PART
from jaxis.vision.prompt_images import NO_IMAGES


def image_part(url: str | None, model: ServedModel, place: str) -> dict[str, Any]:
    """An image as a part of a content of a `ChatPrompt`; it is read when the prompt is made.

    Args:
      url: The image as a data: URL, or one that the server allows.
      model: The model that shall see it.
      place: Where the request has it, such as "messages[0].content[1].image_url.url".

    Raises:
      RequestError: The model takes no images, or this is none.
    """
    if model.images is None:
        raise RequestError(NO_IMAGES, param=place)
    # Unless the operator allows it, never a path or an address: a request reaches no files, and nothing is fetched.
    return {**IMAGE_PART, "image": model.image_access.source(url or "", place)}


def base64_part(data: str, model: ServedModel, place: str) -> dict[str, Any]:
    """The same of an image whose file is given in base64."""
    return image_part(f"data:;base64,{data}", model, place)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether contents of a `ChatPrompt` have parts that are images."""
    contents = (message.get("content") for message in messages)
    return any(
        part["type"] == IMAGE_PART["type"] for content in contents if isinstance(content, list) for part in content
    )
