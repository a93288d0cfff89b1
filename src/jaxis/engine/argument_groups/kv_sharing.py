"""Arguments of KV caches that other programs see: events, and blocks of other engines."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.config.kv_events import KVEventsConfig
from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.engine.argument_groups.combinations import EngineFeature
from jaxis.engine.argument_groups.info import ArgumentGroup, argument


@dataclass(frozen=True)
class KVSharingArguments(ArgumentGroup):
    """Publishing of cache events, and exchange of blocks."""

    kv_events_config: Mapping[str, Any] | None = argument(
        None,
        in_fingerprint=False,
        room="engine.kv_events",
        description=(
            "Publishes what the prefix cache holds, for gateways that route by it: a dict of vLLM's keys. See "
            "[events](kv-cache.md#events-of-the-prefix-cache)."
        ),
        metavar="JSON",
        help="Publish what the prefix cache holds, such as '{\"enable_kv_cache_events\": true}'.",
        speed_only=True,
    )
    kv_transfer_config: Mapping[str, Any] | None = argument(
        None,
        in_fingerprint=False,
        room="engine.kv_store",
        description=(
            "Hands the blocks of prompts to other engines, or takes them from there: a dict of vLLM's keys. See "
            "[prefill and decode on different servers](kv-cache.md#prefill-and-decode-on-different-servers)."
        ),
        metavar="JSON",
        help='Compute prompts for other servers, or take them from there: \'{"kv_role": "kv_both"}\'.',
        speed_only=True,
    )

    def features(self) -> dict[EngineFeature, tuple[bool, str]]:
        return {
            EngineFeature.KV_EVENTS: (self.kv_events is not None, "kv_events_config"),
            EngineFeature.KV_TRANSFER: (self.kv_transfer is not None, "kv_transfer_config"),
        }

    @functools.cached_property
    def kv_events(self) -> KVEventsConfig | None:
        """The parsed `kv_events_config`; None publishes nothing."""
        return KVEventsConfig.of(self.kv_events_config)

    @functools.cached_property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The parsed `kv_transfer_config`; None: there are no other engines."""
        return KVTransferConfig.of(self.kv_transfer_config)
