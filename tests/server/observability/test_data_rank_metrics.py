"""What each data rank does, from the engine's process to Prometheus."""

from __future__ import annotations

import pytest

from jaxis import SamplingParams
from jaxis.engine.client import wire
from jaxis.engine.client.engine_client import EngineInfo, EngineStats, RankStats
from jaxis.host.channel import MessageReader, to_frame
from jaxis.server.observability.metrics import ModelMetrics, ServerMetrics

INFO = EngineInfo("folder", None, SamplingParams(), 100, 4, 1600, 50, frozenset())


@pytest.mark.parametrize("ranks", [(), (RankStats(3, 0.5), RankStats(0, 0.0))])
def test_gauges_of_each_rank_reach_the_metrics(ranks: tuple[RankStats, ...]) -> None:
    [heartbeat] = MessageReader(wire.REPORTS).feed(
        to_frame(wire.Heartbeat(True, EngineStats(num_requests_running=3, ranks=ranks)))
    )
    assert isinstance(heartbeat, wire.Heartbeat)
    assert heartbeat.stats.ranks == ranks
    metrics = ServerMetrics()
    metrics.add(ModelMetrics("m", INFO, lambda: heartbeat.stats))
    text = metrics.render().decode()
    assert 'jaxis:num_requests_running{model_name="m"} 3.0' in text
    lines = [line for line in text.splitlines() if line.startswith("jaxis:data_rank")]
    assert lines == [
        f'jaxis:data_rank_{name}{{model_name="m",rank="{rank}"}} {value}'
        for name, values in (("num_requests_running", (3.0, 0.0)), ("kv_cache_usage_perc", (0.5, 0.0)))
        for rank, value in enumerate(values[: len(ranks)])
    ]
