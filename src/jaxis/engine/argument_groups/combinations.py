"""Features of an engine that do not combine, with reasons; docs/proof.md lists them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from jaxis.errors import ConfigError


class EngineFeature(enum.Enum):
    """A feature of an engine, with its name in the documentation."""

    NO_PREFIX_CACHE = "no prefix cache"
    HOSTS = "several hosts"
    STAGES = "pipeline stages"
    DATA_RANKS = "data ranks"
    DECODE_CONTEXT = "decode context parallelism"
    KV_EVENTS = "KV cache events"
    KV_OFFLOADING = "KV cache offloading"
    KV_TRANSFER = "prefill and decode on different servers"
    ADAPTERS = "adapters by request"
    LAYER_DRAFTS = "drafts by layers or another model"


class Refusal(NamedTuple):
    """Two features that an engine cannot have at once, with the reason as it follows "because"."""

    first: EngineFeature
    second: EngineFeature
    because: str


REFUSALS = (
    Refusal(EngineFeature.KV_EVENTS, EngineFeature.NO_PREFIX_CACHE, "events say what the prefix cache holds"),
    Refusal(EngineFeature.KV_OFFLOADING, EngineFeature.NO_PREFIX_CACHE, "the prefix cache finds the blocks"),
    Refusal(EngineFeature.KV_TRANSFER, EngineFeature.NO_PREFIX_CACHE, "the prefix cache finds the blocks"),
    Refusal(EngineFeature.KV_OFFLOADING, EngineFeature.HOSTS, "only the leader would save its part of a block"),
    Refusal(EngineFeature.KV_TRANSFER, EngineFeature.HOSTS, "only the leader would send its part of a block"),
    Refusal(EngineFeature.KV_TRANSFER, EngineFeature.STAGES, "servers exchange the blocks of whole models"),
    Refusal(EngineFeature.ADAPTERS, EngineFeature.HOSTS, "only the leader would have them"),
    Refusal(EngineFeature.ADAPTERS, EngineFeature.STAGES, "only the first stage would have them"),
    Refusal(EngineFeature.ADAPTERS, EngineFeature.DATA_RANKS, "a step has one set of adapters"),
    Refusal(EngineFeature.ADAPTERS, EngineFeature.KV_EVENTS, "events do not say which adapter computed a block"),
    Refusal(EngineFeature.ADAPTERS, EngineFeature.KV_TRANSFER, "servers do not tell each other their adapters"),
    Refusal(EngineFeature.LAYER_DRAFTS, EngineFeature.HOSTS, "followers do not run the layers that draft"),
    Refusal(
        EngineFeature.LAYER_DRAFTS,
        EngineFeature.STAGES,
        "the layers that draft need all hidden states",
    ),
    Refusal(EngineFeature.LAYER_DRAFTS, EngineFeature.DATA_RANKS, "the layers that draft run on one rank"),
    Refusal(EngineFeature.DATA_RANKS, EngineFeature.STAGES, "a stage has the devices of one rank"),
    Refusal(EngineFeature.DECODE_CONTEXT, EngineFeature.STAGES, "the caches of stages are planned for whole contexts"),
)


def check_combinations(asked_for: Mapping[EngineFeature, str]) -> None:
    """Checks that an engine can have all these features at once.

    Args:
      asked_for: Features with the arguments that ask for them, such as "nnodes=2".

    Raises:
      ConfigError: Two of them do not combine.
    """
    for first, second, because in REFUSALS:
        if first in asked_for and second in asked_for:
            raise ConfigError(
                f"{asked_for[first]} does not combine with {asked_for[second]}, because {because}: leave one of them "
                "out"
            )
