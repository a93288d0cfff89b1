"""Requests and answers of /score and /rerank, with vLLM's, Cohere's and Jina's fields."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.pooling.async_pooling import MAX_TEXTS
from jaxis.pooling.text_groups import TextGroup, check_sides
from jaxis.server.http.body import LenientModel, is_none, new_id
from jaxis.server.pooling.fields import PoolingUsage, ScoringRequest, Texts


class Document(LenientModel):
    """A document as an object."""

    text: str


Documents = Annotated[list[str | Document], Field(min_length=1, max_length=MAX_TEXTS)]


class ScoreRequest(ScoringRequest):
    """Two lists of texts of the same length, or a string and a list.

    Attributes:
      text_1, text_2: The texts; `queries` and `documents`, or `data_1` and `data_2`, are other names for them.
      instruction: Instruction to the model, as in `RerankRequest`.
    """

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Documents | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    instruction: str | None = None


class Score(BaseModel):
    """Score of how well a pair matches: the larger the better."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    """Scores of the pairs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankRequest(ScoringRequest):
    """A query, and documents to rank by it.

    Attributes:
      documents: Strings, or objects with a `text`.
      top_n: Number of the best documents to return; None or 0 for all.
      return_documents: True or None repeats the documents in the answer.
      instruction: Task in words, for models that read one, such as Qwen3-Reranker; None for the one of its model card.
    """

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class RankedText(BaseModel):
    text: str


class Ranked(BaseModel):
    """Index of a document in the request, and its score as an answer to the query."""

    index: int
    document: RankedText | None = Field(default=None, exclude_if=is_none)
    relevance_score: float


class RerankResponse(BaseModel):
    """Documents, the best first; equal ones in the order of the request."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage


def text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def scored_sides(request: ScoreRequest) -> tuple[TextGroup, TextGroup]:
    """Returns both sides. A side with one string is paired with each string of the other side.

    Raises:
      RequestError: A side is missing, or their lengths differ and neither is one.
    """
    first = _side(request, ("text_1", "queries", "data_1"))
    second = _side(request, ("text_2", "documents", "data_2"))
    check_sides(first, second)
    return first, second


def score_response(scores: Sequence[float], num_tokens: int, model: str) -> ScoreResponse:
    return ScoreResponse(
        id=new_id("score"),
        created=int(time.time()),
        model=model,
        data=[Score(index=index, score=score) for index, score in enumerate(scores)],
        usage=PoolingUsage.of(num_tokens),
    )


def rerank_response(request: RerankRequest, scores: Sequence[float], num_tokens: int, model: str) -> RerankResponse:
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: request.top_n or None]
    with_documents = request.return_documents is not False
    return RerankResponse(
        id=new_id("rerank"),
        model=model,
        results=[
            Ranked(
                index=index,
                document=RankedText(text=text_of(request.documents[index])) if with_documents else None,
                relevance_score=scores[index],
            )
            for index in order
        ],
        usage=PoolingUsage.of(num_tokens),
    )


def _side(request: ScoreRequest, names: Sequence[str]) -> TextGroup:
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        what = "is missing" if not given else f"and {given[1]} are the same: send one"
        raise RequestError(what, param=given[0] if given else names[0])
    value = getattr(request, given[0])
    texts = value if isinstance(value, str) else [*map(text_of, value)]
    return TextGroup.of(texts, given[0], truncate_tokens=request.truncate_prompt_tokens)
