"""The worker's side of vLLM's encoder cache: vLLM's scheduler decides what is added and removed."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxis.engine.embedded_inputs.encoder import InputEncoder
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.errors import EngineError
from jaxis.prompts import EmbeddedInput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_PIXEL_BYTES = 256 * 2**20


class EncoderCache:
    """Images that steps may need. An image is encoded in the first step that needs it.

    vLLM omits an image's pixels from a request whose prefix it has cached. It does not send them again after it has
    preempted a request, whose image may have to be encoded again. So pixels are kept, as far as there is room.

    Args:
      encoder: Encoder of images, which keeps the results that are in use.
    """

    def __init__(self, encoder: InputEncoder) -> None:
        self._encoder = encoder
        self._held: dict[str, EmbeddedInput] = {}  # by vLLM's identifier
        self._seen: OrderedDict[bytes, EmbeddedInput] = OrderedDict()  # by digest, least recently seen first
        self._seen_bytes = 0

    def read(self, features: Iterable[Any]) -> list[tuple[str, EmbeddedInput]]:
        """Reads the images of a request, with vLLM's identifiers.

        Args:
          features: vLLM's features, each a MultiModalFeatureSpec.
        """
        images: list[tuple[str, EmbeddedInput]] = []
        for feature in features:
            image = _read(feature)
            if image.data:
                self._keep(image)
            images.append((feature.identifier, self.with_pixels(image)))
        return images

    def with_pixels(self, image: EmbeddedInput) -> EmbeddedInput:
        """Returns the image with its pixels, if they are known."""
        seen = self._seen.get(image.digest)
        if image.data or seen is None:
            return image
        self._seen.move_to_end(image.digest)
        return dataclasses.replace(
            image,
            shape=seen.shape,
            data=seen.data,
            is_bidirectional=seen.is_bidirectional,
            order=seen.order,
            weights=seen.weights,
        )

    def update(self, output: SchedulerOutput, images_of: Callable[[str], Sequence[tuple[str, EmbeddedInput]]]) -> None:
        """Drops the images that the scheduler dropped, then adds those of the step.

        Args:
          output: The step.
          images_of: Returns the images of a request, given its id.
        """
        for identifier in output.free_encoder_mm_hashes:
            self._drop(identifier)
        for request_id, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                identifier, image = images_of(request_id)[index]
                self._drop(identifier)
                if image.data:
                    self._held[identifier] = image
                    self._encoder.hold([image])

    def check(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Raises EngineError for a step that needs an image which is not cached."""
        digests = {image.digest for image in self._held.values()}
        for entry in scheduled:
            for image in cast(Iterable[EmbeddedInput], entry.spans):
                needed = image.rows[image.rows_between(entry.start, entry.start + entry.num_tokens)]
                if needed and image.digest not in digests:
                    raise EngineError(
                        f"vLLM's scheduler goes on with the request {entry.sequence.seq_id} within an image that the "
                        "worker does not have any more: give a larger kv_cache_memory_bytes, so that it preempts less"
                    )

    def clear(self) -> None:
        """Drops all images."""
        for identifier in list(self._held):
            self._drop(identifier)

    def _drop(self, identifier: str) -> None:
        if (image := self._held.pop(identifier, None)) is not None:
            self._encoder.let_go([image])

    def _keep(self, image: EmbeddedInput) -> None:
        if (known := self._seen.pop(image.digest, None)) is not None:
            self._seen_bytes -= len(known.data)
        self._seen[image.digest] = image
        self._seen_bytes += len(image.data)
        while self._seen_bytes > _PIXEL_BYTES:
            self._seen_bytes -= len(self._seen.popitem(last=False)[1].data)


def _read(feature: Any) -> EmbeddedInput:
    """Reads an image; without pixels if vLLM omits them because its results are cached.

    Args:
      feature: vLLM's MultiModalFeatureSpec, from `images.py`.
    """
    digest, *grid = feature.mm_hash.replace("x", ":").split(":")
    place = feature.mm_position
    data = {name: element.data.numpy() for name, element in (feature.data or {}).items()}
    views = data.get("views")
    order, weights = (None if name not in data else tuple(data[name].tolist()) for name in ("order", "weights"))
    return EmbeddedInput(
        bytes.fromhex(digest),
        place.offset,
        place.length,
        tuple(place.is_embed.nonzero().flatten().tolist()),
        () if views is None else views.shape,
        b"" if views is None else views.tobytes(),
        is_bidirectional=views is not None and bool(data["is_bidirectional"][0]),
        grid=(int(grid[0]), int(grid[1])) if grid else None,
        order=order,
        weights=weights,
    )
