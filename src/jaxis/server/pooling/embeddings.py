"""/v1/embeddings: its request, what that asks for, and its answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxis.pooling.client.async_pooling import MAX_TEXTS
from jaxis.pooling.client.wire import PoolingInfo
from jaxis.prompts import Prompt
from jaxis.server.http.body import NotApplied
from jaxis.server.pooling.fields import NOT_APPLIED, PoolingRequest, PoolingUsage, Texts, TokenIds
from jaxis.server.pooling.pool import PooledGroups, TextGroup

Inputs = str | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingRequest(PoolingRequest):
    """Texts.

    Attributes:
      input: A string, token ids, or a list of strings or of lists of token ids.
      encoding_format: A list of numbers, or little-endian float32 in base64.
      dimensions: How many elements to return, of a model that was trained to have vectors cut.
      prompt_name: The kind of text, such as "query", for which the checkpoint has words to put before it.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = NOT_APPLIED

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None


class EmbeddingObject(BaseModel):
    """An input's vector: numbers, or base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """All of them, in the order of the texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingObject]
    usage: PoolingUsage


def as_texts(inputs: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> tuple[list[Prompt], bool]:
    """The texts of an input, and whether it is a list of them."""
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        return [inputs], False  # pyright: ignore[reportReturnType]
    return list(inputs), True  # pyright: ignore[reportReturnType, reportArgumentType]


def text_group(request: EmbeddingRequest) -> TextGroup:
    """What a request asks for."""
    texts, is_list = as_texts(request.input)
    return TextGroup(texts, "input", is_list, kind=request.prompt_name, truncate_tokens=request.truncate_prompt_tokens)


def embedding_response(
    request: EmbeddingRequest, pooled: PooledGroups, model: str, info: PoolingInfo
) -> EmbeddingResponse:
    """The answer."""
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
