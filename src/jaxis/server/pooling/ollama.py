"""Ollama's endpoints of vectors: requests, answers and routes."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field

from jaxis.pooling.async_pooling import MAX_TEXTS
from jaxis.pooling.text_groups import TextGroup
from jaxis.server.context import Context
from jaxis.server.http.body import LenientModel
from jaxis.server.ollama.ollama_schema import OllamaOptions
from jaxis.server.ollama.routes import OLLAMA_RESPONSES, OllamaRoute
from jaxis.server.pooling.pool import embedding_info, pool
from jaxis.server.pooling.routes import check_makes_vectors, respond_json
from jaxis.server.protocol import Protocol

router = APIRouter(prefix="/api", route_class=OllamaRoute, dependencies=[Depends(check_makes_vectors)])


class OllamaEmbedRequest(LenientModel):
    """Request of /api/embed.

    Attributes:
      input: A string or a list of strings; None or an empty one only loads the model.
      truncate: True or None cuts strings that are too long; False refuses them.
      dimensions: Number of elements to return, for models trained with vectors that can be cut.
      keep_alive: Without effect; the model stays loaded.
    """

    model: str | None = None
    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(BaseModel):
    """Answer of /api/embed, with durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingRequest(LenientModel):
    """Request of /api/embeddings, with one string; see `OllamaEmbedRequest`."""

    model: str | None = None
    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(BaseModel):
    """Answer of /api/embeddings."""

    embedding: list[float]


@router.post("/embed", response_model=OllamaEmbeddings, responses=OLLAMA_RESPONSES)
async def ollama_embed(body: OllamaEmbedRequest, request: Request, context: Context) -> Response:
    """Returns the vectors of texts. Texts that are too long are cut, unless `truncate` is false."""
    headers = context.ignored_fields.check(body)
    start, model, info = time.monotonic_ns(), context.model.named(body.model), embedding_info(context)
    info.dimensions.check(body.dimensions)

    async def answer() -> str:
        group = TextGroup.of(body.input or [], "input", truncate_tokens=None if body.truncate is False else -1)
        pooled = await pool(context, [group])
        return OllamaEmbeddings(
            model=model.name,
            embeddings=info.dimensions.cut(pooled.vectors[0], body.dimensions).tolist(),
            total_duration=time.monotonic_ns() - start,
            prompt_eval_count=pooled.num_tokens,
        ).model_dump_json()

    return await respond_json(request, answer, headers)


@router.post("/embeddings", response_model=OllamaEmbedding, responses=OLLAMA_RESPONSES)
async def ollama_embeddings(body: OllamaEmbeddingRequest, request: Request, context: Context) -> Response:
    """Returns the vector of one string."""
    headers = context.ignored_fields.check(body)
    embedding_info(context)
    context.model.check_name(body.model)

    async def answer() -> str:
        if not body.prompt:  # only loads the model
            return OllamaEmbedding(embedding=[]).model_dump_json()
        group = TextGroup.of(body.prompt, "prompt", truncate_tokens=-1)
        [vectors] = (await pool(context, [group])).vectors
        return OllamaEmbedding(embedding=vectors[0].tolist()).model_dump_json()

    return await respond_json(request, answer, headers)


PROTOCOL = Protocol(routers=[router], is_on=lambda config: config.ollama_api)
