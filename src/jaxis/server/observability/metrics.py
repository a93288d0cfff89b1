"""Metrics in Prometheus's format, under vLLM's names with the prefix `jaxis:` or a configured one.

Histograms have vLLM's buckets (vllm/v1/metrics/loggers.py), so that its dashboards and alerts read the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxis.engine.client.engine_client import EngineInfo, EngineStats
from jaxis.engine.speculation import DraftCounts
from jaxis.outputs import RequestOutput
from jaxis.sampling_params import SamplingParams

# fmt: off
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
_CHOICES = (1, 2, 5, 10, 20)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Metrics of the engine's state, with their texts.
_GAUGES = {
    "num_requests_running": "Sequences in the running batch.",
    "num_requests_waiting": "Sequences that wait to be admitted.",
    "engine_process_memory_bytes": "Resident memory of the engine's process; 0 if it has none of its own.",
    "kv_cache_usage_perc": "KV cache in use, 0 to 1.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Times that a sequence lost its cache blocks to another.",
}
_KV_COUNTERS = {
    "saved_blocks": "KV blocks written to the tier.",
    "saved_bytes": "Bytes written to the tier.",
    "loaded_blocks": "KV blocks found in the tier and read from it.",
    "loaded_bytes": "Bytes read from the tier.",
    "missed_blocks": "KV blocks looked for in the tier and not found.",
    "failed_blocks": "KV blocks not saved or read because of an error.",
}
_DRAFT_COUNTERS = {
    "num_drafts": "Drafts, each of some tokens, that steps computed.",
    "num_draft_tokens": "Draft tokens that steps computed.",
    "num_accepted_tokens": "Draft tokens that were right.",
}


class ServerMetrics(Collector):
    """Metrics of a server and of its models.

    Attributes:
      registry: Registry to which other metrics of the server may be added.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes, process_cpu_seconds_total, ...
        self._http = Counter(
            "http_requests",
            "Requests by route and by the first digit of their status, as 2xx.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._models: list[ModelMetrics] = []

    def add(self, model: ModelMetrics) -> None:
        self._models.append(model)

    def http_response(self, handler: str, method: str, status: int) -> None:
        """Counts an answer. `handler` is the route's pattern rather than the path, to bound the number of labels."""
        # A client can send any method, and each label would stay forever.
        self._http.labels(handler, method if method in _METHODS else "other", f"{status // 100}xx").inc()

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. Metrics of one name from several models are merged, as the format demands."""
        merged: dict[str, Metric] = {}
        for registry in (self.registry, *(model.registry for model in self._models)):
            for metric in registry.collect():
                if metric.name in merged:
                    merged[metric.name].samples += metric.samples
                else:
                    merged[metric.name] = metric
        yield from merged.values()

    def render(self) -> bytes:
        return generate_latest(self)


class ModelMetrics:
    """One model's metrics, in a registry of its own, with the label `model_name`.

    Args:
      model_name: Value of the label.
      info: Facts of the engine.
      stats: Returns the engine's current state.
      prefix: First part of the metrics' names, before a colon.
    """

    def __init__(
        self, model_name: str, info: EngineInfo, stats: Callable[[], EngineStats], *, prefix: str = "jaxis"
    ) -> None:
        self._prefix = prefix
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name, prefix)
        self._engine.watch(info, stats)
        self.registry.register(self._engine)
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose answer has begun.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._success = Counter(
            f"{prefix}:request_success",
            "Completions by the reason why they ended.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that the prefix cache held.")
        self._rejected = Counter(
            f"{prefix}:admission_rejections",
            "Requests refused before they were queued.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        # The labels exist from the start, since a rate does not see a step from absent to one.
        for reason in ("stop", "length", "abort"):
            self._success.labels(model_name, reason)
        self._rejected.labels(model_name, "overloaded")
        self._failed = self._counter("request_failed", "Requests that ended in an error.")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between one token and the next.", _TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time a token after its first.", _TOKEN_SECONDS
        )
        self._e2e = self._seconds("e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self._queue = self._seconds("request_queue_time_seconds", "From arrival to the first step.")
        self._inference = self._seconds("request_inference_time_seconds", "From the first step to the last token.")
        self._prefill = self._seconds("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._seconds("request_decode_time_seconds", "From the first token to the last.")
        tokens = _one_two_five(info.max_model_len)
        self._num_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._num_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", tokens
        )
        self._n = self._histogram("request_params_n", "The parameter n of a request.", _CHOICES)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens of a request that has one.", tokens
        )

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._model_name, reason).inc()

    def watch(self, info: EngineInfo, stats: Callable[[], EngineStats]) -> None:
        """Reports another engine of the model from now on. The counts of requests continue."""
        self._engine.watch(info, stats)

    def watch_none(self) -> None:
        """Reports no engine from now on, since the model is not loaded."""
        self._engine.watch_none()

    @contextmanager
    def prompts(self, num_tokens: list[int], arrival: float) -> Iterator[None]:
        """Observes a request without generated tokens, which lasts as long as the `with` block.

        Args:
          num_tokens: Length of each prompt.
          arrival: Time of arrival in `time.monotonic` seconds.
        """
        reason = "abort"
        try:
            yield
            reason = "stop"
            self._prompt_tokens.inc(sum(num_tokens))
            for number in num_tokens:
                self._num_prompt_tokens.observe(number)
            self._e2e.observe(time.monotonic() - arrival)
        except Exception:
            self._failed.inc()
            raise
        finally:
            self._success.labels(self._model_name, reason).inc(len(num_tokens))

    @contextmanager
    def request(self, params: SamplingParams, arrival: float) -> Iterator[RequestObserver]:
        """Observes one request, which arrived at `time.monotonic` seconds and lasts as long as the `with` block."""
        observer = RequestObserver(self, params, arrival)
        try:
            yield observer
        except GeneratorExit:
            raise
        except Exception:
            self._failed.inc()
            raise
        finally:
            observer.end()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            f"{self._prefix}:{name}", text, ("model_name",), registry=self.registry, buckets=tuple(buckets)
        )
        return histogram.labels(self._model_name)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, _REQUEST_SECONDS)


def _one_two_five(highest: int) -> list[int]:
    steps = (digit * 10**exponent for exponent in range(len(str(highest))) for digit in (1, 2, 5))
    return [step for step in steps if step <= highest]


class RequestObserver:
    """Times one request and counts its tokens; times are `time.monotonic` seconds.

    Attributes:
      first_scheduled: Time of its first step; None before.
      first_token: Time of its first token; None before.
      last_token: Time of its newest token.
      num_prompt_tokens, num_cached_tokens: Tokens of its prompt; prompt tokens found in the prefix cache.
      num_tokens: Generated tokens so far, by completion.
      finish_reasons: Finish reasons of the ended completions, in the order of their ends.
    """

    def __init__(self, metrics: ModelMetrics, params: SamplingParams, arrival: float) -> None:
        self._metrics = metrics
        self.params = params
        self.arrival = self.last_token = arrival
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = [0] * params.n
        self.finish_reasons: list[str] = []

    def add(self, output: RequestOutput) -> None:
        metrics, now = self._metrics, time.monotonic()
        num_new = sum(len(completion.token_ids) for completion in output.outputs)
        num_gaps = max((len(completion.token_ids) for completion in output.outputs), default=0)
        if self.first_token is None:
            self._begin(output, now)
            num_gaps -= 1
        if num_gaps > 0:  # several tokens at once count by their mean
            metrics._inter_token.observe((now - self.last_token) / num_gaps)
        if num_new:
            self.last_token = now
            metrics._generation_tokens.inc(num_new)
        for completion in output.outputs:
            self.num_tokens[completion.index] += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)
                metrics._success.labels(metrics._model_name, completion.finish_reason).inc()

    def end(self) -> None:
        """Ends the observation. Unfinished completions count as aborted."""
        metrics = self._metrics
        if num_unfinished := self.params.n - len(self.finish_reasons):
            metrics._success.labels(metrics._model_name, "abort").inc(num_unfinished)
        metrics._n.observe(self.params.n)
        if self.params.max_tokens is not None:
            metrics._max_tokens.observe(self.params.max_tokens)
        if self.first_token is None:
            return
        metrics._e2e.observe(time.monotonic() - self.arrival)
        decode_seconds = self.last_token - self.first_token
        metrics._decode.observe(decode_seconds)
        metrics._inference.observe(self.last_token - (self.first_scheduled or self.first_token))
        if (num_later := max(self.num_tokens) - 1) > 0:
            metrics._per_token.observe(decode_seconds / num_later)
        metrics._num_generation_tokens.observe(sum(self.num_tokens))

    def _begin(self, output: RequestOutput, now: float) -> None:
        """Observes the values that are known with the first token."""
        metrics = self._metrics
        self.first_token = self.last_token = output.first_token_time or now
        self.first_scheduled = min(output.first_scheduled_time or self.first_token, self.first_token)
        self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        metrics._first_token.observe(self.first_token - self.arrival)
        metrics._queue.observe(max(0.0, self.first_scheduled - self.arrival))
        metrics._prefill.observe(self.first_token - self.first_scheduled)
        metrics._prompt_tokens.inc(self.num_prompt_tokens)
        metrics._cached_tokens.inc(self.num_cached_tokens)
        metrics._num_prompt_tokens.observe(self.num_prompt_tokens)


class _EngineCollector(Collector):
    """The engine's state, read at each scrape."""

    def __init__(self, model_name: str, prefix: str) -> None:
        self._model_name = model_name
        self._prefix = prefix
        self._watched: tuple[EngineInfo, Callable[[], EngineStats]] | None = None

    def watch(self, info: EngineInfo, stats: Callable[[], EngineStats]) -> None:
        self._watched = info, stats

    def watch_none(self) -> None:
        self._watched = None

    def collect(self) -> Iterable[Metric]:
        if self._watched is None:
            return
        info, stats = self._watched[0], self._watched[1]()
        values = (
            stats.num_requests_running,
            stats.num_requests_waiting,
            stats.process_memory_bytes,
            stats.kv_cache_usage,
        )
        for (name, text), value in zip(_GAUGES.items(), values, strict=True):
            yield self._gauge(name, text, {(): value})
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, {(): getattr(stats, name)})
        yield from self._data_ranks(stats)
        yield from self._kv_tiers(stats)
        if stats.drafts is not None:
            yield from self._draft_counters(stats.drafts)
        yield self._cache_config(info)

    def _data_ranks(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields metrics of each data rank if there are several. The other metrics are sums over all ranks."""
        for name, field in (("num_requests_running",) * 2, ("kv_cache_usage_perc", "kv_cache_usage")):
            values = {(str(number),): getattr(rank, field) for number, rank in enumerate(stats.ranks)}
            if values:
                yield self._gauge(f"data_rank_{name}", _GAUGES[name], values, "rank")

    def _kv_tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields metrics of the blocks beyond the devices, by tier; none if nothing is offloaded."""
        tiers = stats.kv_tiers.items()
        for name, text in _KV_COUNTERS.items() if tiers else ():
            values = {(tier,): getattr(counted, name) for tier, counted in tiers}
            yield self._counter(f"kv_offload_{name}", text, values, "tier")
        if tiers:
            used = {(tier,): counted.used_bytes for tier, counted in tiers}
            yield self._gauge("kv_offload_used_bytes", "Bytes that the tier holds.", used, "tier")

    def _draft_counters(self, drafts: DraftCounts) -> Iterable[Metric]:
        for name, text in _DRAFT_COUNTERS.items():
            yield self._counter(f"spec_decode_{name}", text, {(): getattr(drafts, name)})
        text = "Draft tokens that were right, by their place from 0."
        places = {(str(place),): value for place, value in enumerate(drafts.num_accepted_by_position)}
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, places, "position")

    def _gauge(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", *labels]), values)

    def _counter(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", *labels]), values)

    def _filled(self, family: Any, values: Mapping[tuple[str, ...], float]) -> Metric:
        """Adds values to a family of metrics, by their labels after the model's name."""
        for labels, value in values.items():
            family.add_metric([self._model_name, *labels], value)
        return family

    def _cache_config(self, info: EngineInfo) -> Metric:
        """Returns a gauge that is always 1. Its labels are for gateways that route by prefix."""
        labels = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_cache_tokens // info.block_size),  # vLLM's name, whatever the device
        }
        text = "The KV cache's layout, as labels."
        return self._gauge("cache_config_info", text, {tuple(labels.values()): 1}, *labels)
