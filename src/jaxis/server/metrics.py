"""Metrics in Prometheus's format, under the names that vLLM made common, with `jaxis:` in front."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxis.engine.async_engine import EngineStats
from jaxis.outputs import RequestOutput
from jaxis.sampling_params import SamplingParams

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """One server's metrics, in a registry of its own.

    Args:
      model_name: The label `model_name` of every metric.
      stats: Tells the engine's state at the moment.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # process_resident_memory_bytes, process_cpu_seconds_total, ...
        self._registry.register(_EngineCollector(model_name, stats))
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose answer has begun.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._success = Counter(
            "jaxis:request_success",
            "Completions by the reason why they ended.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._rejected = Counter(
            "jaxis:request_rejected",
            "Requests refused before they were queued.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self._failed = self._counter("request_failed", "Requests that ended in an error.")
        self._first_token = self._seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token = self._seconds("inter_token_latency_seconds", "Between one token and the next.")
        self._e2e = self._seconds("e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self._queue = self._seconds("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = self._seconds("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._seconds("request_decode_time_seconds", "From the first token to the last.")
        self._num_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._num_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )

    def rejected(self, reason: str) -> None:
        """Counts a request that was refused before it was queued."""
        self._rejected.labels(self._model_name, reason).inc()

    @contextmanager
    def request(self, params: SamplingParams) -> Iterator[RequestObserver]:
        """Observes one request, which lasts as long as the block."""
        observer = RequestObserver(self, params)
        try:
            yield observer
        except GeneratorExit:
            raise
        except Exception:
            self._failed.inc()
            raise
        finally:
            observer.end()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"jaxis:{name}", text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(f"jaxis:{name}", text, ("model_name",), registry=self._registry, buckets=tuple(buckets))
        return histogram.labels(self._model_name)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, _SECONDS)


class RequestObserver:
    """Times one request and counts its tokens."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._arrival = self._last = time.monotonic()
        self._first: float | None = None
        self._num_tokens = 0
        self._num_unfinished = params.n

    def add(self, output: RequestOutput) -> None:
        """Takes in what a step brought."""
        metrics, now = self._metrics, time.monotonic()
        num_new = sum(len(completion.token_ids) for completion in output.outputs)
        num_gaps = max((len(completion.token_ids) for completion in output.outputs), default=0)
        if self._first is None:
            self._last = self._begin(output, now)
            num_gaps -= 1
        if num_gaps > 0:  # several tokens at once are told as their mean
            metrics._inter_token.observe((now - self._last) / num_gaps)
        if num_new:
            self._last = now
            self._num_tokens += num_new
            metrics._generation_tokens.inc(num_new)
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._num_unfinished -= 1
                metrics._success.labels(metrics._model_name, completion.finish_reason).inc()

    def end(self) -> None:
        """The request has ended; if that was before its time, its completions count as aborted."""
        metrics = self._metrics
        if self._num_unfinished:
            metrics._success.labels(metrics._model_name, "abort").inc(self._num_unfinished)
        if self._first is not None:
            metrics._e2e.observe(time.monotonic() - self._arrival)
            metrics._decode.observe(self._last - self._first)
            metrics._num_generation_tokens.observe(self._num_tokens)

    def _begin(self, output: RequestOutput, now: float) -> float:
        """Takes in the first tokens, and returns when they were there."""
        metrics = self._metrics
        now = output.first_token_time or now
        self._first = now
        scheduled = output.first_scheduled_time or now
        metrics._first_token.observe(now - self._arrival)
        metrics._queue.observe(max(0.0, scheduled - self._arrival))
        metrics._prefill.observe(max(0.0, now - scheduled))
        metrics._prompt_tokens.inc(len(output.prompt_token_ids))
        metrics._num_prompt_tokens.observe(len(output.prompt_token_ids))
        return now


class _EngineCollector(Collector):
    """The engine's state, read when it is asked for."""

    _GAUGES = (
        ("num_requests_running", "Sequences in the running batch."),
        ("num_requests_waiting", "Sequences that wait to be admitted."),
    )
    _COUNTERS = (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        ("num_preemptions", "Times that a sequence lost its cache blocks to another."),
    )

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Prometheus's call."""
        stats = self._stats()
        for name, text in self._GAUGES:
            yield self._with_value(
                GaugeMetricFamily(f"jaxis:{name}", text, labels=["model_name"]), getattr(stats, name)
            )
        usage = GaugeMetricFamily("jaxis:kv_cache_usage_perc", "KV cache in use, 0 to 1.", labels=["model_name"])
        yield self._with_value(usage, stats.kv_cache_usage)
        for name, text in self._COUNTERS:
            yield self._with_value(
                CounterMetricFamily(f"jaxis:{name}", text, labels=["model_name"]), getattr(stats, name)
            )

    def _with_value(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model_name], value)
        return family
