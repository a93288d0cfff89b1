"""Messages between the server's process and that of an embedding model. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from jaxis.engine.client.engine_client import EngineInfo
from jaxis.engine.client.wire import AbortRequest, EngineFailed, EngineReady, Heartbeat, LoadPlanned, RequestFailed
from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.pooling.dimensions import Dimensions
from jaxis.pooling.pooling_config import PoolingSettings


@dataclass(frozen=True)
class PoolingInfo(EngineInfo):
    """Facts about an embedding model or classifier. `max_model_len` is the limit of an input's tokens.

    Attributes:
      size: E, the elements of a vector; for a classifier, the number of labels.
      settings: Pooling of hidden states.
      dimensions: Sizes that vectors may be cut to.
      classifier: Meaning of the logits; None for an embedding model.
    """

    size: int = 0
    settings: PoolingSettings = field(default_factory=lambda: PoolingSettings("mean"))
    dimensions: Dimensions = field(default_factory=Dimensions)
    classifier: ClassifierSettings | None = None


class PoolTexts(msgspec.Struct, tag="pool"):
    """A request for vectors or logits of texts.

    Attributes:
      request_id: Id that no earlier request had.
      texts: Token ids.
      client: Client of the request; clients share steps equally.
      priority: Priority of the request; lower values run first.
      second_starts: Start of the second text of each pair; empty if the texts are not pairs.
    """

    request_id: str
    texts: list[list[int]]
    client: str | None = None
    priority: int = 0
    second_starts: list[int] = []


class Pooled(msgspec.Struct, array_like=True):
    """Vectors of some texts of a request.

    Attributes:
      request_id: Id of the request.
      indices: Indices of the texts in the request.
      vectors: float32 [number of texts, E], little-endian.
    """

    request_id: str
    indices: list[int]
    vectors: bytes


class PoolingOutputs(msgspec.Struct, tag="pooled"):
    """The results of a step."""

    pooled: list[Pooled]
    failures: list[RequestFailed]


class PoolingReady(EngineReady, tag="ready"):
    """The model is loaded."""

    info: PoolingInfo


Command = PoolTexts | AbortRequest
Report = LoadPlanned | PoolingReady | EngineFailed | PoolingOutputs | Heartbeat

COMMANDS = msgspec.msgpack.Decoder(Command)
"""Decoder of the server process's messages."""
REPORTS = msgspec.msgpack.Decoder(Report)
"""Decoder of the model process's messages."""
