"""Request and answer of /v2/embed, Cohere's endpoint of vectors."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from jaxis.errors import RequestError
from jaxis.pooling.inputs import InputReader
from jaxis.pooling.pooling_info import PoolingInfo
from jaxis.pooling.text_groups import TextGroup
from jaxis.server.http.body import LenientModel, NotApplied, is_none, new_id
from jaxis.server.pooling.fields import Texts
from jaxis.server.pooling.pool import PooledGroups

# Steps of int8 on each side of zero. In vectors of length 1 and size E, elements beyond 8 / sqrt(E) are clipped.
_INT8_STEPS, _INT8_RANGE = 127, 8.0
_PROMPTS = {"search_query": "query", "search_document": "document"}
_TEXTS_ONLY = "inputs are text: send texts"


def _integers(vectors: np.ndarray) -> np.ndarray:
    """Rescales float32 [texts, E] to length 1, and returns integers from -127 to 127 as float32."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    factor = max(1.0, vectors.shape[1] ** 0.5 / _INT8_RANGE) * _INT8_STEPS
    units = vectors / np.where(lengths > 0, lengths, 1)
    return np.clip(np.round(units * factor), -_INT8_STEPS, _INT8_STEPS)


def _bits(vectors: np.ndarray) -> np.ndarray:
    """Packs the signs of float32 [texts, E] into uint8 [texts, E / 8]: bits of positive elements, highest bit first."""
    return np.packbits(vectors > 0, axis=1)


_WRITTEN: dict[str, Callable[[np.ndarray], list[Any]]] = {
    "float": lambda vectors: vectors.tolist(),
    "int8": lambda vectors: _integers(vectors).astype(np.int8).tolist(),
    "uint8": lambda vectors: (_integers(vectors) + 128).astype(np.uint8).tolist(),
    "binary": lambda vectors: (_bits(vectors).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vectors: _bits(vectors).tolist(),
    "base64": lambda vectors: [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors],
}
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedRequest(LenientModel):
    """Texts to embed.

    Attributes:
      input_type: Purpose of the texts; selects a prompt of the checkpoint, if it has one for this purpose.
      texts: Texts, at least one.
      max_tokens: Length to which longer texts are cut; None for the model's limit.
      output_dimension: Number of elements to return, for models trained with vectors that can be cut.
      embedding_types: Encodings of the vectors; None for numbers.
      truncate: "END" or None cuts texts that are too long; "NONE" refuses them.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {
        "images": NotApplied(([],), _TEXTS_ONLY),
        "inputs": NotApplied(([],), _TEXTS_ONLY),
        "priority": NotApplied(),
    }

    model: str | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    texts: Texts
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = None
    truncate: Literal["NONE", "END"] | None = None

    def group(self, info: PoolingInfo, reader: InputReader) -> TextGroup:
        """Returns the request's group of texts.

        Raises:
          RequestError: `max_tokens` is set with `truncate="NONE"`.
        """
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise RequestError("is for texts that may be cut: leave it out, or truncate='NONE'", param="max_tokens")
        kind = _PROMPTS.get(self.input_type or "", self.input_type)
        return TextGroup(
            self.texts,
            "texts",
            kind=kind if kind is not None and reader.has_kind(kind) else None,
            truncate_tokens=None if self.truncate == "NONE" else min(self.max_tokens or -1, info.max_model_len),
        )


class CohereEmbeddings(BaseModel):
    """Vectors of all texts, in each requested encoding."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    float_: list[list[float]] | None = Field(default=None, alias="float", exclude_if=is_none)
    int8: list[list[int]] | None = Field(default=None, exclude_if=is_none)
    uint8: list[list[int]] | None = Field(default=None, exclude_if=is_none)
    binary: list[list[int]] | None = Field(default=None, exclude_if=is_none)
    ubinary: list[list[int]] | None = Field(default=None, exclude_if=is_none)
    base64: list[str] | None = Field(default=None, exclude_if=is_none)


class CohereVersion(BaseModel):
    version: Literal["2"] = "2"


class CohereUnits(BaseModel):
    """Number of computed tokens."""

    input_tokens: int


class CohereMeta(BaseModel):
    """Metadata of an answer."""

    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbedResponse(BaseModel):
    """Vectors of a request's texts, in their order."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta


def cohere_response(request: CohereEmbedRequest, pooled: PooledGroups, info: PoolingInfo) -> CohereEmbedResponse:
    [vectors] = pooled.vectors
    vectors = info.dimensions.cut(vectors, request.output_dimension)
    kinds = dict.fromkeys(request.embedding_types or ["float"])
    return CohereEmbedResponse(
        id=new_id("embd"),
        embeddings=CohereEmbeddings.model_validate({kind: _WRITTEN[kind](vectors) for kind in kinds}),
        texts=request.texts,
        meta=CohereMeta(api_version=CohereVersion(), billed_units=CohereUnits(input_tokens=pooled.num_tokens)),
    )
