"""Request and answer of /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxis.pooling.async_pooling import MAX_TEXTS
from jaxis.pooling.pooling_info import PoolingInfo
from jaxis.server.http.body import NotApplied
from jaxis.server.pooling.fields import NOT_APPLIED, PoolingRequest, PoolingUsage, Texts, TokenIds
from jaxis.server.pooling.pool import PooledGroups

Inputs = str | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingRequest(PoolingRequest):
    """Texts to embed.

    Attributes:
      input: A string, token ids, or a list of strings or of lists of token ids.
      encoding_format: Form of the vectors: a list of numbers, or little-endian float32 in base64.
      dimensions: Number of elements to return, for models trained with vectors that can be cut.
      prompt_name: Name of one of the checkpoint's prompts, such as "query".
    """

    not_applied: ClassVar[dict[str, NotApplied]] = NOT_APPLIED

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None


class EmbeddingObject(BaseModel):
    """Vector of an input: numbers, or base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Vectors, in the order of the texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingObject]
    usage: PoolingUsage


def embedding_response(
    request: EmbeddingRequest, pooled: PooledGroups, model: str, info: PoolingInfo
) -> EmbeddingResponse:
    [vectors] = pooled.vectors
    vectors = info.dimensions.cut(vectors, request.dimensions)
    is_base64 = request.encoding_format == "base64"
    return EmbeddingResponse.model_construct(
        model=model,
        data=[
            EmbeddingObject.model_construct(
                index=index,
                embedding=base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist(),
            )
            for index, vector in enumerate(vectors)
        ],
        usage=PoolingUsage.of(pooled.num_tokens),
    )
