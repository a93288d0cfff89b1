"""Pooling for every protocol: reads a request's texts, computes their vectors or logits, and counts their tokens."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.errors import DeadlineExceededError, OverloadedError, RequestError
from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.pooling.client.async_pooling import AsyncPoolingEngine
from jaxis.pooling.client.wire import PoolingInfo
from jaxis.pooling.inputs import InputReader, PoolingInput
from jaxis.prompts import Prompt
from jaxis.server.context import ServerContext


@dataclass(frozen=True)
class TextGroup:
    """Texts of a request that are read in the same way.

    Attributes:
      field: Field of the request that has them, for errors.
      is_list: True if errors name the text's index in the field.
      kind: Name of one of the checkpoint's prompts; None for its default.
      truncate_tokens: Length to which longer texts are cut; see `InputReader.read`.
    """

    texts: Sequence[Prompt]
    field: str
    is_list: bool = True
    kind: str | None = None
    truncate_tokens: int | None = None

    def name(self, index: int) -> str:
        return f"{self.field}[{index}]" if self.is_list else self.field


@dataclass(frozen=True)
class PairGroup:
    """Pairs of a request, which a cross-encoder reads together.

    Attributes:
      names: Returns the names of a pair's strings in errors, by its index.
      truncate_tokens, instruction: Arguments of `InputReader.read_pairs`.
    """

    pairs: Sequence[tuple[str, str]]
    names: Callable[[int], tuple[str, str]]
    truncate_tokens: int | None = None
    instruction: str | None = None


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
        with engine.reserve(sum(map(_size, groups))):
            async with asyncio.timeout(timeout):
                read = await context.run_in_worker(functools.partial(_read, engine, groups), is_quick=_is_quick(groups))
                token_ids = [each.token_ids for group in read for each in group]
                if not token_ids:
                    return PooledGroups([np.zeros((0, engine.pooling_info.size), np.float32) for _ in read], 0)
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


# Number of characters up to which tokenizing takes less time than handing it to a thread.
_QUICK_CHARACTERS = 1000


def _is_quick(groups: Sequence[TextGroup | PairGroup]) -> bool:
    # Token ids count, too, although they are only checked.
    return sum(len(text) for group in groups for text in _texts(group)) <= _QUICK_CHARACTERS


def _size(group: TextGroup | PairGroup) -> int:
    return len(group.pairs if isinstance(group, PairGroup) else group.texts)


def _texts(group: TextGroup | PairGroup) -> Iterable[Prompt]:
    return itertools.chain.from_iterable(group.pairs) if isinstance(group, PairGroup) else group.texts


def _read(engine: AsyncPoolingEngine, groups: Sequence[TextGroup | PairGroup]) -> list[list[PoolingInput]]:
    reader = reader_of(engine)
    return [
        reader.read_pairs(
            group.pairs, truncate_tokens=group.truncate_tokens, instruction=group.instruction, names=group.names
        )
        if isinstance(group, PairGroup)
        else reader.read(group.texts, truncate_tokens=group.truncate_tokens, kind=group.kind, name=group.name)
        for group in groups
    ]


@functools.lru_cache(maxsize=8)
def reader_of(engine: AsyncPoolingEngine) -> InputReader:
    """Returns the reader of the texts of an engine's requests."""
    info = engine.pooling_info
    template = None if info.classifier is None else info.classifier.template
    return InputReader(
        engine.tokenizer,
        info.settings,
        max_tokens=info.max_model_len,
        vocab_size=info.vocab_size,
        template=template,
    )
