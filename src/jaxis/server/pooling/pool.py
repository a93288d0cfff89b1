"""The one way to vectors: reads a request's texts, has them computed, and counts them."""

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
    """Texts of a request that are read alike.

    Attributes:
      texts: Strings or token ids.
      field: Where they stand in the request, for errors.
      is_list: Whether an error names the text's place in the field.
      kind: The name of one of the checkpoint's prompts; None is its default.
      truncate_tokens: See `InputReader.read`.
    """

    texts: Sequence[Prompt]
    field: str
    is_list: bool = True
    kind: str | None = None
    truncate_tokens: int | None = None

    def name(self, index: int) -> str:
        """How errors call one."""
        return f"{self.field}[{index}]" if self.is_list else self.field


@dataclass(frozen=True)
class PairGroup:
    """Pairs of a request, which a cross-encoder reads together.

    Attributes:
      pairs: Two strings each.
      names: How errors call the two of a pair, by its index.
      truncate_tokens, instruction: See `InputReader.read_pairs`.
    """

    pairs: Sequence[tuple[str, str]]
    names: Callable[[int], tuple[str, str]]
    truncate_tokens: int | None = None
    instruction: str | None = None


@dataclass(frozen=True)
class PooledGroups:
    """What became of a request's texts.

    Attributes:
      vectors: float32 [texts, E] of each group, or logits [texts, labels].
      num_tokens: Of all texts.
    """

    vectors: list[np.ndarray]
    num_tokens: int


def pooling_engine(context: ServerContext) -> AsyncPoolingEngine:
    """The engine, if it makes vectors or scores.

    Raises:
      RequestError: It does not.
    """
    if not isinstance(context.engine, AsyncPoolingEngine):
        raise RequestError(
            f"the model {context.model.name!r} generates text and makes no vectors: ask /v1/chat/completions, or start "
            "another server with an embedding model, or with this one and --runner pooling"
        )
    return context.engine


def embedding_info(context: ServerContext) -> PoolingInfo:
    """The facts about a model that makes vectors.

    Raises:
      RequestError: It does something else.
    """
    info = pooling_engine(context).pooling_info
    if info.classifier is not None:
        other = "/rerank or /score" if len(info.classifier.labels) == 1 else "/classify"
        raise RequestError(f"the model {context.model.name!r} makes scores and no vectors: ask {other}")
    return info


def classifier_of(context: ServerContext) -> ClassifierSettings:
    """What a classifier's logits mean.

    Raises:
      RequestError: The model is none.
    """
    if (classifier := pooling_engine(context).pooling_info.classifier) is None:
        raise RequestError(f"the model {context.model.name!r} makes vectors and has no labels: ask /v1/embeddings")
    return classifier


async def pool(context: ServerContext, groups: Sequence[TextGroup | PairGroup]) -> PooledGroups:
    """The vectors or logits of a request's texts.

    Raises:
      RequestError: An input is empty or too long, or there are too many; nothing was computed.
      RateLimitError: The request's API key has used up its minute.
      JaxisError: See `AsyncEngine.reserve` and `AsyncPoolingEngine.pool`.
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


# Below this many characters, tokenizing takes less than handing it to a thread does.
_QUICK_CHARACTERS = 1000


def _is_quick(groups: Sequence[TextGroup | PairGroup]) -> bool:
    # The length of token ids counts as well: they are only checked.
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
    """What reads the texts of an engine's requests."""
    info = engine.pooling_info
    template = None if info.classifier is None else info.classifier.template
    return InputReader(
        engine.tokenizer,
        info.settings,
        max_tokens=info.max_model_len,
        vocab_size=info.vocab_size,
        template=template,
    )
