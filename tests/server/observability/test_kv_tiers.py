"""What the tiers of KV blocks have done, from the engine's process to Prometheus."""

from __future__ import annotations

import pytest

from jaxis import SamplingParams
from jaxis.engine.client import wire
from jaxis.engine.client.engine_client import EngineInfo, EngineStats
from jaxis.engine.kv_connector import TierStats
from jaxis.host.channel import MessageReader, to_frame
from jaxis.server.observability.metrics import ModelMetrics, ServerMetrics

INFO = EngineInfo("folder", None, SamplingParams(), 100, 4, 1600, 50, frozenset())


@pytest.mark.parametrize("tiers", [{}, {"host": TierStats(1, 2, 3, 4, 5, 6, 7), "disk": TierStats(loaded_blocks=8)}])
def test_counters_of_each_tier_reach_the_metrics(tiers: dict[str, TierStats]) -> None:
    [heartbeat] = MessageReader(wire.REPORTS).feed(to_frame(wire.Heartbeat(True, EngineStats(kv_tiers=tiers))))
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.stats.kv_tiers == tiers
    metrics = ServerMetrics()
    metrics.add(ModelMetrics("m", INFO, lambda: heartbeat.stats))
    text = metrics.render().decode()
    assert ("kv_offload" in text) == bool(tiers)
    names = ("saved_blocks", "saved_bytes", "loaded_blocks", "loaded_bytes", "missed_blocks", "failed_blocks")
    for tier, stats in tiers.items():
        for name in names:
            line = f'jaxis:kv_offload_{name}_total{{model_name="m",tier="{tier}"}} {float(getattr(stats, name))}'
            assert line in text
        assert f'jaxis:kv_offload_used_bytes{{model_name="m",tier="{tier}"}} {float(stats.used_bytes)}' in text
