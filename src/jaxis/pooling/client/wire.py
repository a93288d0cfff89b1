"""The messages between the server's process and one that makes vectors. Imports no JAX."""

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
    """The facts about an engine that makes vectors; `max_model_len` is the most tokens of an input.

    Attributes:
      size: E, the elements of a vector; of a classifier, its labels.
      settings: How hidden states become vectors.
      dimensions: To how many elements vectors may be cut.
      classifier: What its numbers mean, if it classifies; None: it makes vectors.
    """

    size: int = 0
    settings: PoolingSettings = field(default_factory=lambda: PoolingSettings("mean"))
    dimensions: Dimensions = field(default_factory=Dimensions)
    classifier: ClassifierSettings | None = None


class PoolTexts(msgspec.Struct, tag="pool"):
    """Make vectors of texts.

    Attributes:
      request_id: Never used before.
      texts: Token ids.
      client: Whose request it is; clients share steps equally.
      priority: The lower value is served first.
      second_starts: Where the second text of each pair begins; empty if they are no pairs.
    """

    request_id: str
    texts: list[list[int]]
    client: str | None = None
    priority: int = 0
    second_starts: list[int] = []


class Pooled(msgspec.Struct, array_like=True):
    """Vectors of some texts of a request.

    Attributes:
      request_id: The request's.
      indices: Which of its texts.
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
"""Decodes what the server's process sends."""
REPORTS = msgspec.msgpack.Decoder(Report)
"""Decodes what the model's process sends."""
