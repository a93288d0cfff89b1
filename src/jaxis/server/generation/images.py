"""Images and videos of requests in the one form in which prompts have them, whatever a protocol calls its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from jaxis.errors import RequestError
from jaxis.host.base64_text import is_data_url
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer.chat_template import IMAGE_PART, VIDEO_PART
from jaxis.vision.prompt_images import NO_IMAGES, NO_VIDEOS, ONLY_IMAGES
from jaxis.vision.video import Video

_NOT_QUOTED = "+/= \t\r\n"  # of base64, which in a URL means itself


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
        raise RequestError(f": {NO_IMAGES}", param=place)
    # Unless the operator allows it, never a path or an address: a request reaches no files, and nothing is fetched.
    return {**IMAGE_PART, "image": model.image_access.source(url or "", place)}


def video_part(video: str | Sequence[str], fps: float | None, model: ServedModel, place: str) -> dict[str, Any]:
    """The same of a video.

    Args:
      video: A data: URL of an image for each frame, or one of all frames (see `Video.of_url`).
      fps: Frames in a second, if the request says it.
      model: The model that shall see it.
      place: Where the request has it.

    Raises:
      RequestError: The model takes no videos, or this is none.
    """
    if model.images is None or not model.images.takes_videos:
        raise RequestError(f": {NO_VIDEOS if model.images is None else ONLY_IMAGES}", param=place)
    if isinstance(video, str):
        return {**VIDEO_PART, "video": Video.of_url(video, fps, place)}
    # Of a thousand frames, none is fetched.
    if not all(is_data_url(frame) for frame in video):
        raise RequestError("must have a data: URL of an image for each frame", param=place)
    return {**VIDEO_PART, "video": Video.of(video, fps, place)}


def base64_part(data: str, model: ServedModel, place: str) -> dict[str, Any]:
    """The same of an image whose file is given in base64."""
    return image_part(f"data:;base64,{quote(data, _NOT_QUOTED)}", model, place)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether contents of a `ChatPrompt` have parts that are images or videos."""
    contents = (message.get("content") for message in messages)
    return any(
        part["type"] in (IMAGE_PART["type"], VIDEO_PART["type"])
        for content in contents
        if isinstance(content, list)
        for part in content
    )
