"""Construction of the publisher of events of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxis.engine.execution.programs import Programs
from jaxis.engine.kv_connector import KVConnector
from jaxis.host.extras import check_extra

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs


def make_connector(
    args: EngineArgs,
    programs: Programs,
    block_size: int,
    fingerprint: str,
    blocks_fingerprint: Callable[[], str],
    inner: KVConnector,
) -> KVConnector:
    """Returns a connector that publishes events; `inner`, which has none to report, if the arguments ask for none.

    Raises:
      ConfigError: The address cannot be used, or the extra is missing.
    """
    del fingerprint, blocks_fingerprint
    if args.kv_events is None:
        return inner
    check_extra("kv-events", "kv_events_config")
    from jaxis.engine.kv_events.publisher import CacheEvents

    executor = programs.executor
    num_ranks = executor.stages[-1].context.ranks.num_ranks
    return CacheEvents(args.kv_events, tuple(executor.plan.num_blocks), block_size, num_ranks)
