"""Metric of the adapters in use, under vLLM's name and labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxis.engine.scheduling.places import PlaceUse


class AdapterMetrics(Collector):
    """Reads a model's adapters at each scrape.

    Args:
      use: Returns the adapters in use; None before the first step.
      names_of: Returns the names of an adapter, given its digest.
      model_name: Value of the label.
      prefix: First part of the metric's name, before a colon.
    """

    def __init__(
        self,
        use: Callable[[], PlaceUse | None],
        names_of: Callable[[bytes], Iterable[str]],
        model_name: str,
        prefix: str,
    ) -> None:
        self._use, self._names_of, self._model_name, self._prefix = use, names_of, model_name, prefix

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        text = "Adapters of requests that run and of those that wait; the value is the time."
        gauge = GaugeMetricFamily(f"{self._prefix}:lora_requests_info", text, labels=labels)
        if (use := self._use()) is not None:
            values = (str(use.num_places), self._names(use.running), self._names(use.waiting))
            gauge.add_metric((self._model_name, *values), time.time())
        yield gauge

    def _names(self, digests: Iterable[bytes]) -> str:
        return ",".join(sorted(name for digest in digests for name in self._names_of(digest)))
