"""Endpoints that make vectors, classes, scores and rankings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import TypeAdapter

from jaxis.pooling.text_groups import PairScoring, TextGroup
from jaxis.server.context import Context, ServerContext
from jaxis.server.http.openapi import error_responses
from jaxis.server.http.sse import CLIENT_CLOSED_REQUEST, ClientDisconnectedError, run_until_disconnect
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.pooling.classifications import (
    ClassificationRequest,
    ClassificationResponse,
    classification_response,
)
from jaxis.server.pooling.cohere import CohereEmbedRequest, CohereEmbedResponse, cohere_response
from jaxis.server.pooling.embeddings import EmbeddingRequest, EmbeddingResponse, embedding_response
from jaxis.server.pooling.llama_embedding import LlamaEmbedding, LlamaEmbeddingRequest
from jaxis.server.pooling.pool import (
    classifier_of,
    embedding_info,
    pool,
    pooling_engine,
)
from jaxis.server.pooling.scores import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    rerank_response,
    score_response,
    scored_sides,
    text_of,
)
from jaxis.server.protocol import Protocol


async def check_makes_vectors(context: Context) -> None:
    """Raises RequestError if the requested model makes no vectors; a dependency of routes."""
    _ = pooling_engine(context)


_RESPONSES = error_responses(400, 401, 404, 408, 413, 429, 500, 503, 504, "default")
_LLAMA_EMBEDDINGS = TypeAdapter(list[LlamaEmbedding])
router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(check_makes_vectors)])


@router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=_RESPONSES)
async def create_embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts."""
    headers = context.ignored_fields.check(body)
    model, info = context.model.named(body.model), embedding_info(context)
    info.dimensions.check(body.dimensions)

    async def answer() -> str:
        group = TextGroup.of(body.input, "input", kind=body.prompt_name, truncate_tokens=body.truncate_prompt_tokens)
        pooled = await pool(context, [group])
        return await context.run_in_worker(
            lambda: embedding_response(body, pooled, model.name, info).model_dump_json(),
            is_quick=len(pooled.vectors[0]) == 1,
        )

    return await respond_json(request, answer, headers)


@router.post("/score", response_model=ScoreResponse, responses=_RESPONSES)
@router.post("/v1/score", response_model=ScoreResponse, responses=_RESPONSES)
async def score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """Returns scores of how well the texts of pairs match."""
    headers = context.ignored_fields.check(body)
    model, sides = context.model.named(body.model), scored_sides(body)

    async def answer() -> str:
        scores, num_tokens = await _scores(context, body, *sides)
        return score_response(scores, num_tokens, model.name).model_dump_json()

    return await respond_json(request, answer, headers)


@router.post("/classify", response_model=ClassificationResponse, responses=_RESPONSES)
async def classify(body: ClassificationRequest, request: Request, context: Context) -> Response:
    """Returns the score of each label for texts."""
    headers = context.ignored_fields.check(body)
    model, classifier = context.model.named(body.model), classifier_of(context)
    group = TextGroup.of(body.input, "input", truncate_tokens=body.truncate_prompt_tokens)
    activates = body.activates

    async def answer() -> str:
        pooled = await pool(context, [group])
        scores = classifier.scores(pooled.vectors[0], use_activation=activates)
        return classification_response(scores, classifier, pooled.num_tokens, model.name).model_dump_json()

    return await respond_json(request, answer, headers)


@router.post("/rerank", response_model=RerankResponse, responses=_RESPONSES)
@router.post("/v1/rerank", response_model=RerankResponse, responses=_RESPONSES)
@router.post("/v2/rerank", response_model=RerankResponse, responses=_RESPONSES)
async def rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """Ranks documents by how well they answer a query, the best first."""
    headers = context.ignored_fields.check(body)
    model, truncate = context.model.named(body.model), body.truncate_prompt_tokens

    async def answer() -> str:
        query = TextGroup.of(body.query, "query", truncate_tokens=truncate)
        documents = TextGroup.of([*map(text_of, body.documents)], "documents", truncate_tokens=truncate)
        scores, num_tokens = await _scores(context, body, query, documents)
        return rerank_response(body, scores, num_tokens, model.name).model_dump_json()

    return await respond_json(request, answer, headers)


@router.post("/v2/embed", response_model=CohereEmbedResponse, responses=_RESPONSES)
async def cohere_embed(body: CohereEmbedRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts, in Cohere's form."""
    headers = context.ignored_fields.check(body)
    context.model.check_name(body.model)
    info = embedding_info(context)
    info.dimensions.check(body.output_dimension, "output_dimension")
    group = body.group(info, pooling_engine(context).reader)

    async def answer() -> str:
        pooled = await pool(context, [group])
        return await context.run_in_worker(
            lambda: cohere_response(body, pooled, info).model_dump_json(), is_quick=len(body.texts) == 1
        )

    return await respond_json(request, answer, headers)


@router.post("/embedding", response_model=list[LlamaEmbedding], responses=_RESPONSES)
@router.post("/embeddings", response_model=list[LlamaEmbedding], responses=_RESPONSES, include_in_schema=False)
async def llama_embedding(body: LlamaEmbeddingRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts, in llama-server's form."""
    headers = context.ignored_fields.check(body)
    embedding_info(context)
    context.model.check_name(body.model)
    name, given = body.given()

    async def answer() -> bytes:
        group = TextGroup.of(given, name, truncate_tokens=body.truncate_prompt_tokens)
        [vectors] = (await pool(context, [group])).vectors
        return _LLAMA_EMBEDDINGS.dump_json(
            [LlamaEmbedding(index=index, embedding=[vector.tolist()]) for index, vector in enumerate(vectors)]
        )

    return await respond_json(request, answer, headers)


async def _scores(
    context: ServerContext, body: ScoreRequest | RerankRequest, first: TextGroup, second: TextGroup
) -> tuple[list[float], int]:
    """Returns the score of each pair, and the number of tokens of all texts."""
    activates, engine = body.activates, pooling_engine(context)
    scoring = PairScoring(engine.pooling_info.classifier, engine.reader, first, second, body.instruction)
    pooled = await pool(context, scoring.groups)
    return scoring.scores(pooled.vectors, use_activation=activates), pooled.num_tokens


async def respond_json(
    request: Request, answer: Callable[[], Coroutine[Any, Any, str | bytes]], headers: Mapping[str, str]
) -> Response:
    """Returns JSON. The work is cancelled if the client disconnects."""
    try:
        content = await run_until_disconnect(request.receive, answer())
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(content, media_type="application/json", headers=headers)


PROTOCOL = Protocol(routers=[router])
