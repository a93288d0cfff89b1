"""Endpoints that make vectors, classes, scores and rankings."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import TypeAdapter

from jaxis.pooling.pairs import pair_indices, similarities
from jaxis.server.context import Context, ServerContext
from jaxis.server.http.openapi import error_responses
from jaxis.server.http.sse import CLIENT_CLOSED_REQUEST, ClientDisconnectedError, run_until_disconnect
from jaxis.server.http.strict_json import StrictJSONRoute
from jaxis.server.ollama.routes import OLLAMA_RESPONSES, OllamaRoute
from jaxis.server.pooling.classifications import (
    ClassificationRequest,
    ClassificationResponse,
    classification_response,
)
from jaxis.server.pooling.cohere import CohereEmbedRequest, CohereEmbedResponse, cohere_response
from jaxis.server.pooling.embeddings import (
    EmbeddingRequest,
    EmbeddingResponse,
    as_texts,
    embedding_response,
    text_group,
)
from jaxis.server.pooling.other_servers import (
    LlamaEmbedding,
    LlamaEmbeddingRequest,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
)
from jaxis.server.pooling.pool import (
    PairGroup,
    TextGroup,
    classifier_of,
    embedding_info,
    pool,
    pooling_engine,
    reader_of,
)
from jaxis.server.pooling.scores import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    Side,
    rerank_response,
    score_response,
    scored_sides,
    text_of,
)


async def _check_makes_vectors(context: Context) -> None:
    _ = pooling_engine(context)


_RESPONSES = error_responses(400, 401, 404, 408, 413, 429, 500, 503, 504, "default")
_LLAMA_EMBEDDINGS = TypeAdapter(list[LlamaEmbedding])
router = APIRouter(route_class=StrictJSONRoute, dependencies=[Depends(_check_makes_vectors)])
ollama_router = APIRouter(prefix="/api", route_class=OllamaRoute, dependencies=[Depends(_check_makes_vectors)])


@router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=_RESPONSES)
async def create_embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts."""
    headers = context.ignored_fields.check(body)
    model, info = context.model.named(body.model), embedding_info(context)
    info.dimensions.check(body.dimensions)

    async def answer() -> str:
        pooled = await pool(context, [text_group(body)])
        return await context.run_in_worker(
            lambda: embedding_response(body, pooled, model.name, info).model_dump_json(),
            is_quick=len(pooled.vectors[0]) == 1,
        )

    return await _respond(request, answer, headers)


@router.post("/score", response_model=ScoreResponse, responses=_RESPONSES)
@router.post("/v1/score", response_model=ScoreResponse, responses=_RESPONSES)
async def score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """Returns scores of how well the texts of pairs match."""
    headers = context.ignored_fields.check(body)
    model, sides = context.model.named(body.model), scored_sides(body)

    async def answer() -> str:
        scores, num_tokens = await _scores(context, body, *sides)
        return score_response(scores, num_tokens, model.name).model_dump_json()

    return await _respond(request, answer, headers)


@router.post("/classify", response_model=ClassificationResponse, responses=_RESPONSES)
async def classify(body: ClassificationRequest, request: Request, context: Context) -> Response:
    """Returns the score of each label for texts."""
    headers = context.ignored_fields.check(body)
    model, classifier = context.model.named(body.model), classifier_of(context)
    texts, is_list = as_texts(body.input)
    group = TextGroup(texts, "input", is_list, truncate_tokens=body.truncate_prompt_tokens)
    activates = body.activates

    async def answer() -> str:
        pooled = await pool(context, [group])
        scores = classifier.scores(pooled.vectors[0], use_activation=activates)
        return classification_response(scores, classifier, pooled.num_tokens, model.name).model_dump_json()

    return await _respond(request, answer, headers)


@router.post("/rerank", response_model=RerankResponse, responses=_RESPONSES)
@router.post("/v1/rerank", response_model=RerankResponse, responses=_RESPONSES)
@router.post("/v2/rerank", response_model=RerankResponse, responses=_RESPONSES)
async def rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """Ranks documents by how well they answer a query, the best first."""
    headers = context.ignored_fields.check(body)
    model = context.model.named(body.model)

    async def answer() -> str:
        sides = Side("query", [body.query], is_list=False), Side("documents", list(map(text_of, body.documents)))
        scores, num_tokens = await _scores(context, body, *sides)
        return rerank_response(body, scores, num_tokens, model.name).model_dump_json()

    return await _respond(request, answer, headers)


@router.post("/v2/embed", response_model=CohereEmbedResponse, responses=_RESPONSES)
async def cohere_embed(body: CohereEmbedRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts, in Cohere's form."""
    headers = context.ignored_fields.check(body)
    context.model.check_name(body.model)
    info = embedding_info(context)
    info.dimensions.check(body.output_dimension, "output_dimension")
    group = body.group(info, reader_of(pooling_engine(context)))

    async def answer() -> str:
        pooled = await pool(context, [group])
        return await context.run_in_worker(
            lambda: cohere_response(body, pooled, info).model_dump_json(), is_quick=len(body.texts) == 1
        )

    return await _respond(request, answer, headers)


@router.post("/embedding", response_model=list[LlamaEmbedding], responses=_RESPONSES)
@router.post("/embeddings", response_model=list[LlamaEmbedding], responses=_RESPONSES, include_in_schema=False)
async def llama_embedding(body: LlamaEmbeddingRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts, in llama-server's form."""
    headers = context.ignored_fields.check(body)
    embedding_info(context)
    context.model.check_name(body.model)
    name, given = body.given()
    texts, is_list = as_texts(given)

    async def answer() -> bytes:
        group = TextGroup(texts, name, is_list, truncate_tokens=body.truncate_prompt_tokens)
        [vectors] = (await pool(context, [group])).vectors
        return _LLAMA_EMBEDDINGS.dump_json(
            [LlamaEmbedding(index=index, embedding=[vector.tolist()]) for index, vector in enumerate(vectors)]
        )

    return await _respond(request, answer, headers)


@ollama_router.post("/embed", response_model=OllamaEmbeddings, responses=OLLAMA_RESPONSES)
async def ollama_embed(body: OllamaEmbedRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts. Texts that are too long are cut, unless `truncate` is false."""
    headers = context.ignored_fields.check(body)
    start, model, info = time.monotonic_ns(), context.model.named(body.model), embedding_info(context)
    info.dimensions.check(body.dimensions)
    texts, is_list = as_texts(body.input) if body.input else ([], True)

    async def answer() -> str:
        group = TextGroup(texts, "input", is_list, truncate_tokens=None if body.truncate is False else -1)
        pooled = await pool(context, [group])
        return OllamaEmbeddings(
            model=model.name,
            embeddings=info.dimensions.cut(pooled.vectors[0], body.dimensions).tolist(),
            total_duration=time.monotonic_ns() - start,
            prompt_eval_count=pooled.num_tokens,
        ).model_dump_json()

    return await _respond(request, answer, headers)


@ollama_router.post("/embeddings", response_model=OllamaEmbedding, responses=OLLAMA_RESPONSES)
async def ollama_embeddings(body: OllamaEmbeddingRequest, request: Request, context: Context) -> Response:
    """Returns the vector of one string."""
    headers = context.ignored_fields.check(body)
    embedding_info(context)
    context.model.check_name(body.model)

    async def answer() -> str:
        if not body.prompt:  # only loads the model
            return OllamaEmbedding(embedding=[]).model_dump_json()
        group = TextGroup([body.prompt], "prompt", is_list=False, truncate_tokens=-1)
        [vectors] = (await pool(context, [group])).vectors
        return OllamaEmbedding(embedding=vectors[0].tolist()).model_dump_json()

    return await _respond(request, answer, headers)


async def _scores(
    context: ServerContext, body: ScoreRequest | RerankRequest, first: Side, second: Side
) -> tuple[list[float], int]:
    """Returns the score of each pair, and the number of tokens of all texts."""
    indices, truncate = pair_indices(len(first.texts), len(second.texts)), body.truncate_prompt_tokens
    activates, reader = body.activates, reader_of(pooling_engine(context))
    if (classifier := pooling_engine(context).pooling_info.classifier) is not None:
        classifier.check_scores()
        pairs = [(first.texts[i], second.texts[j]) for i, j in indices]
        names = [(first.name(i), second.name(j)) for i, j in indices]
        pooled = await pool(context, [PairGroup(pairs, names.__getitem__, truncate, body.instruction)])
        return classifier.scores(pooled.vectors[0], use_activation=activates)[:, 0].tolist(), pooled.num_tokens
    reader.check_instruction(body.instruction)
    # Each side gets the checkpoint's prompt for its kind of text.
    kinds = [kind if reader.has_kind(kind) else None for kind in ("query", "document")]
    sides = [
        TextGroup(side.texts, side.field, side.is_list, kind=kind, truncate_tokens=truncate)
        for side, kind in zip((first, second), kinds, strict=True)
    ]
    pooled = await pool(context, sides)
    vectors = pooled.vectors
    return similarities(vectors[0][[i for i, _ in indices]], vectors[1][[j for _, j in indices]]), pooled.num_tokens


async def _respond(
    request: Request, answer: Callable[[], Coroutine[Any, Any, str | bytes]], headers: Mapping[str, str]
) -> Response:
    """Returns JSON. The work is cancelled if the client disconnects."""
    try:
        content = await run_until_disconnect(request.receive, answer())
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(content, media_type="application/json", headers=headers)
