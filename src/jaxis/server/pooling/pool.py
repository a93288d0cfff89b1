"""Pooling for every protocol: reads a request's texts, computes their vectors or logits, and counts their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.errors import DeadlineExceededError, OverloadedError, RequestError
from jaxis.pooling.async_pooling import AsyncPoolingEngine
from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.pooling.pooling_info import PoolingInfo
from jaxis.pooling.text_groups import PairGroup, TextGroup
from jaxis.server.context import ServerContext

# Number of characters up to which tokenizing takes less time than handing it to a thread.
_QUICK_CHARACTERS = 1000


@dataclass(frozen=True)
class PooledGroups:
    """Results for a request's texts.

    Attributes:
      vectors: float32 [texts, E] of each group, or logits [texts, labels].
      num_tokens: Tokens of all texts.
    """

    vectors: list[np.ndarray]
    num_tokens: int


def pooling_engine(context: ServerContext) -> AsyncPoolingEngine:
    """Returns the engine, if it makes vectors or scores.

    Raises:
      RequestError: The engine generates text.
    """
    if not isinstance(context.engine, AsyncPoolingEngine):
        raise RequestError(
            f"the model {context.model.name!r} generates text and makes no vectors: ask /v1/chat/completions, or start "
            "another server with an embedding model, or with this one and --runner pooling"
        )
    return context.engine


def embedding_info(context: ServerContext) -> PoolingInfo:
    """Returns the facts of a model that makes vectors.

    Raises:
      RequestError: The model does not make vectors.
    """
    info = pooling_engine(context).pooling_info
    if info.classifier is not None:
        other = "/rerank or /score" if len(info.classifier.labels) == 1 else "/classify"
        raise RequestError(f"the model {context.model.name!r} makes scores and no vectors: ask {other}")
    return info


def classifier_of(context: ServerContext) -> ClassifierSettings:
    """Returns the settings of a classifier, which give its logits' meaning.

    Raises:
      RequestError: The model is not a classifier.
    """
    if (classifier := pooling_engine(context).pooling_info.classifier) is None:
        raise RequestError(f"the model {context.model.name!r} makes vectors and has no labels: ask /v1/embeddings")
    return classifier


async def pool(context: ServerContext, groups: Sequence[TextGroup | PairGroup]) -> PooledGroups:
    """Computes the vectors or logits of a request's texts.

    Raises:
      RequestError: An input is empty or too long, or there are too many. Nothing was computed.
      RateLimitError: The API key has used up its limit for this minute.
      JaxisError: An error of `AsyncEngine.reserve` or `AsyncPoolingEngine.pool`.
    """
    engine = pooling_engine(context)
    context.accounting.admit()
    arrival, timeout = time.monotonic(), context.config.request_timeout_seconds
    usage = context.accounting.start()
    try:
        with engine.reserve(sum(group.num_texts for group in groups)):
            async with asyncio.timeout(timeout):
                read = await context.run_in_worker(
                    lambda: [group.read(engine.reader) for group in groups],
                    is_quick=sum(group.num_characters for group in groups) <= _QUICK_CHARACTERS,
                )
                token_ids = [each.token_ids for group in read for each in group]
                if not token_ids:
                    return PooledGroups([np.zeros((0, 1), np.float32)] * len(read), 0)
                lengths = [len(ids) for ids in token_ids]
                with context.metrics.prompts(lengths, arrival):
                    vectors = await engine.pool(
                        token_ids,
                        second_starts=[each.second_start for group in read for each in group],
                        priority=context.accounting.priority(0),
                        client=context.accounting.client(),
                    )
                if usage is not None:
                    usage.add_prompt(sum(lengths))
    except OverloadedError:
        context.metrics.rejected("overloaded")
        raise
    except TimeoutError:
        raise DeadlineExceededError(
            f"the request was aborted: its answer took longer than the {timeout:g} s that this server allows"
        ) from None
    ends = np.cumsum([len(group) for group in read])[:-1]
    return PooledGroups(np.split(vectors, ends), sum(lengths))
