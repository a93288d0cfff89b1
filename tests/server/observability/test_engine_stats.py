"""Figures of data ranks and of the tiers of KV blocks, from the engine's process to Prometheus."""

from __future__ import annotations

import pytest

from jaxis import SamplingParams
from jaxis.engine.client import wire
from jaxis.engine.client.engine_client import EngineInfo, EngineStats, RankStats
from jaxis.engine.kv_connector import TierStats
from jaxis.host.channel import MessageReader, to_frame
from jaxis.server.observability.metrics import ModelMetrics, ServerMetrics

INFO = EngineInfo("folder", None, SamplingParams(), 100, 4, 1600, 50, frozenset())


def page_of(stats: EngineStats) -> str:
    """The metrics of a server whose engine's process reports these."""
    [heartbeat] = MessageReader(wire.REPORTS).feed(to_frame(wire.Heartbeat(True, stats)))
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.stats == stats
    metrics = ServerMetrics()
    metrics.add(ModelMetrics("m", INFO, lambda: heartbeat.stats))
    return metrics.render().decode()


@pytest.mark.parametrize("ranks", [(), (RankStats(3, 0.5), RankStats(0, 0.0))])
def test_gauges_of_each_rank_reach_the_metrics(ranks: tuple[RankStats, ...]) -> None:
    text = page_of(EngineStats(num_requests_running=3, ranks=ranks))
    assert 'jaxis:num_requests_running{model_name="m"} 3.0' in text
    lines = [line for line in text.splitlines() if line.startswith("jaxis:data_rank")]
    assert lines == [
        f'jaxis:data_rank_{name}{{model_name="m",rank="{rank}"}} {value}'
        for name, values in (("num_requests_running", (3.0, 0.0)), ("kv_cache_usage_perc", (0.5, 0.0)))
        for rank, value in enumerate(values[: len(ranks)])
    ]


@pytest.mark.parametrize("tiers", [{}, {"host": TierStats(1, 2, 3, 4, 5, 6, 7), "disk": TierStats(loaded_blocks=8)}])
def test_counters_of_each_tier_reach_the_metrics(tiers: dict[str, TierStats]) -> None:
    text = page_of(EngineStats(kv_tiers=tiers))
    assert ("kv_offload" in text) == bool(tiers)
    names = ("saved_blocks", "saved_bytes", "loaded_blocks", "loaded_bytes", "missed_blocks", "failed_blocks")
    for tier, stats in tiers.items():
        for name in names:
            line = f'jaxis:kv_offload_{name}_total{{model_name="m",tier="{tier}"}} {float(getattr(stats, name))}'
            assert line in text
        assert f'jaxis:kv_offload_used_bytes{{model_name="m",tier="{tier}"}} {float(stats.used_bytes)}' in text
