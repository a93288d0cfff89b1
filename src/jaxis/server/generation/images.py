"""Images and videos of requests as parts of a prompt's contents, the same for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from jaxis.errors import RequestError
from jaxis.host.base64_text import is_data_url
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer.chat_template import IMAGE_PART, VIDEO_PART
from jaxis.vision.video import Video

_NOT_QUOTED = "+/= \t\r\n"  # characters of base64 that need no escape in a data: URL


def image_part(url: str | None, model: ServedModel, place: str) -> dict[str, Any]:
    """Returns an image as a part of a message's content in a `ChatPrompt`. It is read when the prompt is made.

    Args:
      url: The image as a data: URL, or as a URL that the server allows.
      model: Model that gets the image.
      place: Place in the request, such as "messages[0].content[1].image_url.url".

    Raises:
      RequestError: The model takes no images, or the URL is not an image's.
    """
    model.images.check_takes("image", place)
    # A request reaches no files and nothing is fetched, unless the operator allows paths or addresses.
    return {**IMAGE_PART, "image": model.image_access.source(url or "", place)}


def video_part(video: str | Sequence[str], fps: float | None, model: ServedModel, place: str) -> dict[str, Any]:
    """Returns a video as a part of a message's content in a `ChatPrompt`.

    Args:
      video: A data: URL of an image for each frame, or one data: URL of all frames (see `Video.of_url`).
      fps: Frames per second, if the request says it.
      model: Model that gets the video.
      place: Place in the request.

    Raises:
      RequestError: The model takes no videos, or the URLs are not a video's.
    """
    model.images.check_takes("video", place)
    if isinstance(video, str):
        return {**VIDEO_PART, "video": Video.of_url(video, fps, place)}
    # Frames are never fetched: a video may have a thousand.
    if not all(is_data_url(frame) for frame in video):
        raise RequestError("must have a data: URL of an image for each frame", param=place)
    return {**VIDEO_PART, "video": Video.of(video, fps, place)}


def base64_part(data: str, model: ServedModel, place: str) -> dict[str, Any]:
    """Returns an image part from the base64 of an image file; see `image_part`."""
    return image_part(f"data:;base64,{quote(data, _NOT_QUOTED)}", model, place)


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the contents of a `ChatPrompt`'s messages have images or videos."""
    contents = (message.get("content") for message in messages)
    return any(
        part["type"] in (IMAGE_PART["type"], VIDEO_PART["type"])
        for content in contents
        if isinstance(content, list)
        for part in content
    )
