"""Images and videos of a prompt: finds them in messages, reads them, and replaces placeholder tokens by them."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxis.errors import ContextLengthError, RequestError
from jaxis.prompts import EmbeddedInput, Message, TokenizedPrompt
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.chat_template import IMAGE_PART, VIDEO_PART
from jaxis.vision.decode import MAX_DECODING, ImageFile, ImageSource, decode_image, open_image
from jaxis.vision.processors import read_processor
from jaxis.vision.processors.processor import ImageProcessor, Seconds, Span, VideoProcessor, ViewGroup
from jaxis.vision.video import MAX_VIDEO_PIXELS, Video, videos_of_prompt

if TYPE_CHECKING:
    from PIL.Image import Image

MediaSource = ImageSource | Video
MediaKind = Literal["image", "video"]

_ONLY_IMAGES = "this model does not support video input: send images and text"
_DECODING = threading.Semaphore(MAX_DECODING)  # limits images with pixels in memory, over all requests


class PromptImages:
    """Puts images into a model's prompts. Thread-safe.

    Args:
      processor: Processor of the model's images.
      max_inputs: Largest numbers of images and videos in a prompt, such as {"image": 32, "video": 32}.
      max_model_len: Largest number of tokens of a prompt and its output.
    """

    def __init__(self, processor: ImageProcessor, max_inputs: Mapping[str, int], max_model_len: int) -> None:
        self._processor, self._max_inputs, self._max_model_len = processor, max_inputs, max_model_len

    @classmethod
    def of_model(
        cls, files: Path, tokenizer: Tokenizer | None, max_inputs: Mapping[str, int], max_model_len: int
    ) -> PromptImages:
        """Returns the instance for a model whose image encoder is loaded."""
        processor = read_processor(files, tokenizer)
        assert processor is not None, "an encoder is loaded with its processor"
        return cls(processor, max_inputs, max_model_len)

    def check_takes(self, kind: MediaKind, place: str) -> None:
        """Raises a RequestError about a place in the request if the model takes no inputs of this kind."""
        if kind == "video" and self._processor.video is None:
            raise RequestError(f": {_ONLY_IMAGES}", param=place)

    def put(self, prompt: TokenizedPrompt, sources: Sequence[MediaSource]) -> TokenizedPrompt:
        """Returns the prompt with placeholders replaced by images and videos, each kind in its order.

        Args:
          prompt: Prompt with a placeholder token for each image and video.
          sources: Images and videos.

        Raises:
          ContextLengthError: The images have too many tokens; this is checked before any image is decoded.
          RequestError: An image cannot be read, there are too many, or the number of placeholders differs.
        """
        if not sources:
            return prompt
        videos = [source for source in sources if isinstance(source, Video)]
        images = [source for source in sources if not isinstance(source, Video)]
        if videos and self._processor.video is None:
            raise RequestError(_ONLY_IMAGES)
        for kind, given in (("image", images), ("video", videos)):
            if len(given) > (most := self._max_inputs.get(kind, 0)):
                raise RequestError(
                    f"the prompt has {len(given)} {kind}s, and at most {most} are taken: send fewer, or start with a "
                    "larger limit_mm_per_prompt"
                )
        processor = self._processor.of_prompt(len(images))
        token_ids, places = processor.spelled(prompt.token_ids, prompt.text)
        spans = [(Span(place, place + 1), each) for place, each in _paired(places, images, processor, "images")]
        if (of_videos := processor.video) is not None:
            places = [i for i, token_id in enumerate(token_ids) if token_id == of_videos.placeholder_id]
            pairs = _paired(places, videos, of_videos, "videos")
            spans += [(of_videos.span(token_ids, place), each) for place, each in pairs]
        image_names, video_names = (_names(kind, len(each)) for kind, each in (("image", images), ("video", videos)))
        opened = [
            _OpenVideo.of(source, of_videos, next(video_names))
            if isinstance(source, Video) and of_videos is not None
            else _OpenImage(open_image(source, name := next(image_names)), name)
            for _, source in spans
        ]
        num_tokens = len(token_ids) + sum(each.least_tokens(processor) - 1 for each in opened)
        if num_tokens > self._max_model_len:
            raise ContextLengthError(num_tokens, self._max_model_len, at_least=True)
        expanded: list[int] = []
        inputs: list[EmbeddedInput] = []
        end = 0
        for (span, _), each in sorted(zip(spans, opened, strict=True), key=lambda pair: pair[0][0].start):
            expanded += token_ids[end : span.start]
            with _DECODING:
                parts = each.parts(processor)
            for part in parts:
                if isinstance(part, ViewGroup):
                    inputs.append(_input(part, len(expanded), processor))
                    part = part.token_ids
                expanded += part
            end = span.stop
        return dataclasses.replace(prompt, token_ids=expanded + token_ids[end:], inputs=tuple(inputs))


class NoImages:
    """Stand-in for `PromptImages` for a model that takes no images: it refuses them.

    Args:
      reason: Reason for which the model's image encoder was left out; empty if the model has none.
    """

    def __init__(self, reason: str = "") -> None:
        self._reason = reason

    def put(self, prompt: TokenizedPrompt, sources: Sequence[MediaSource]) -> TokenizedPrompt:
        """Returns a prompt without images unchanged; raises a RequestError for one with images."""
        if not sources:
            return prompt
        raise RequestError(self._refusal("video" if isinstance(sources[0], Video) else "image"))

    def check_takes(self, kind: MediaKind, place: str) -> None:
        """Raises a RequestError about a place in the request."""
        raise RequestError(f": {self._refusal(kind)}", param=place)

    def _refusal(self, kind: MediaKind) -> str:
        return self._reason or f"this model does not support {kind} input: send text"


@dataclasses.dataclass(frozen=True)
class _OpenImage:
    """An image of a prompt whose header was read."""

    image: Image | ImageFile
    name: str

    def least_tokens(self, processor: ImageProcessor) -> int:
        """Returns the smaller count of both orientations, since decoding may rotate the pixels."""
        width, height = self.image.size
        return min(len(processor.tokens(*size)[0]) for size in ((width, height), (height, width)))

    def parts(self, processor: ImageProcessor) -> Sequence[ViewGroup | list[int]]:
        return processor.parts(decode_image(self.image, self.name, keeps_alpha=processor.keeps_alpha))


@dataclasses.dataclass(frozen=True)
class _OpenVideo:
    """A video of a prompt whose frames' headers were read."""

    frames: list[Image | ImageFile]
    seconds: Seconds
    processor: VideoProcessor
    name: str

    @classmethod
    def of(cls, video: Video, processor: VideoProcessor, name: str) -> _OpenVideo:
        frames = [open_image(frame, f"frame {i + 1} of {name}") for i, frame in enumerate(video.frames)]
        if sum(math.prod(frame.size) for frame in frames) > MAX_VIDEO_PIXELS:
            raise RequestError(
                f"{name} has {len(frames)} frames with more than {MAX_VIDEO_PIXELS} pixels: send fewer, or smaller ones"
            )
        return cls(frames, Seconds(video.seconds, video.seconds_between), processor, name)

    def least_tokens(self, processor: ImageProcessor) -> int:
        """Returns the smaller count of both orientations, since decoding may rotate the pixels."""
        del processor
        width, height = self.frames[0].size
        return min(self.processor.least_tokens(len(self.frames), *size) for size in ((width, height), (height, width)))

    def parts(self, processor: ImageProcessor) -> Sequence[ViewGroup | list[int]]:
        del processor
        decoded = (decode_image(frame, f"frame {i + 1} of {self.name}") for i, frame in enumerate(self.frames))
        first = next(decoded)
        size = self.processor.target_size(len(self.frames), *first.size)
        return self.processor.parts(self._of_one_size(first, decoded), size, self.seconds)

    def _of_one_size(self, first: Image, others: Iterable[Image]) -> Iterator[Image]:
        yield first
        for i, frame in enumerate(others, 2):
            if frame.size != first.size:
                raise RequestError(
                    f"frame {i} of {self.name} has {frame.width} x {frame.height} pixels, and the first "
                    f"{first.width} x {first.height}: send frames of one size"
                )
            yield frame


def _paired(
    places: Sequence[int], sources: Sequence[Any], processor: ImageProcessor | VideoProcessor, kind: str
) -> Iterator[tuple[int, Any]]:
    if len(places) != len(sources):
        raise RequestError(
            f"the prompt has {len(places)} placeholders {processor.placeholder} for {len(sources)} {kind}: it needs "
            "one for each, and none in its text"
        )
    return zip(places, sources, strict=True)


def _names(kind: str, count: int) -> Iterator[str]:
    """Yields the name of each image or video in errors."""
    return (f"{kind} {i + 1} of {count}" if count > 1 else f"the {kind}" for i in range(count))


def _input(part: ViewGroup, start: int, processor: ImageProcessor) -> EmbeddedInput:
    return EmbeddedInput(
        processor.digest(part),
        start,
        len(part.token_ids),
        tuple(part.rows),
        part.views.shape,
        part.views.tobytes(),
        is_bidirectional=processor.is_bidirectional,
        grid=part.grid,
        times=part.times,
        order=None if part.order is None else tuple(part.order),
        weights=None if part.weights is None else tuple(part.weights),
    )


def take_images(messages: Sequence[Message]) -> tuple[Sequence[Message], list[MediaSource]]:
    """Replaces media in messages by parts {"type": "image"} or {"type": "video"}, as chat templates expect.

    Args:
      messages: One conversation. Parts of contents may be OpenAI's `image_url`, vLLM's `image_pil` and `video_url`,
        {"type": "image", "image": ...}, and {"type": "video", "video": frames, "fps": 2}.

    Returns:
      The changed messages, and the sources of their images and videos in order.

    Raises:
      RequestError: A part has no image or no frames.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        return messages, []  # the renderer reports the error
    taken: list[Message] = []
    sources: list[MediaSource] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            taken.append(message)
            continue
        parts: list[Any] = []
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("image_url", "image_pil", "image", "video_url", "video"):
                parts.append(part)
                continue
            place = f"messages[{i}].content[{j}]"
            source = part.get(kind)
            if isinstance(source, Mapping):
                source = source.get("url")
            if source is None:
                raise RequestError(f"is of type {kind!r} and has no {kind!r}", param=place)
            if kind in ("video_url", "video"):
                sources.append(_video_of_part(kind, source, part, f"{place}.{kind}"))
                parts.append(VIDEO_PART)
            else:
                sources.append(source)
                parts.append(IMAGE_PART)
        taken.append({**message, "content": parts})
    return taken, sources


def _video_of_part(kind: str, source: Any, part: Mapping[str, Any], place: str) -> Video:
    if isinstance(source, Video):
        return source
    fps = part.get("fps", part.get("sample_fps"))
    return Video.of_url(source, fps, place) if kind == "video_url" else Video.of(source, fps, place)


def images_of_prompt(data: object, where: str) -> list[MediaSource]:
    """Returns the images and videos of vLLM's `multi_modal_data`: {"image": one or a list, "video": one or a list}.

    Raises:
      RequestError: The value has another type.
    """
    if not isinstance(data, Mapping) or set(data) - {"image", "video"}:
        raise RequestError(
            f'{where}: multi_modal_data must be {{"image": an image, or a list of images, "video": the frames of a '
            "video, or a list of those}"
        )
    images, videos = data.get("image"), data.get("video")
    listed = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
    return listed + ([] if videos is None else videos_of_prompt(videos, where))
