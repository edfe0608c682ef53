"""What Prometheus scrapes. Knows no HTTP; times are given, in seconds, never read.

The engine's own counts are taken from its newest statistics when somebody asks, so that they cost a
step nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from winnow.engine.output import EngineStats

_LABEL = "model_name"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_GAUGES = (
    ("winnow_num_requests_running", "num_running", "Requests that hold pages."),
    ("winnow_num_requests_waiting", "num_waiting", "Requests that wait for pages or a place."),
    ("winnow_pages_used", "pages_used", "Pages of 128 tokens that live requests hold."),
    ("winnow_pages_cached", "pages_cached", "Pages that nobody holds but a prefix may find."),
    ("winnow_pages_total", "pages_total", "Pages that there are for requests."),
)
_TOTALS = (
    (
        "winnow_prefix_cache_query_tokens",
        "prefix_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    (
        "winnow_prefix_cache_hit_tokens",
        "prefix_hit_tokens",
        "Prompt tokens found in the prefix cache.",
    ),
    (
        "winnow_num_preemptions",
        "preemptions",
        "Times that a request gave its pages back to be computed again.",
    ),
    (
        "winnow_clipped_values",
        "values_clipped",
        "Values saturated because the cache's format did not hold them.",
    ),
)


class Metrics:
    """Every metric of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.stats: EngineStats | None = None
        """The engine's newest; set after each step."""
        self.model_name = model_name
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.registry.register(_EngineCollector(self))
        self._first_token = self._histogram(
            "winnow_time_to_first_token_seconds", "From a request to its first token.",
            _FIRST_TOKEN_S,
        )  # fmt: skip
        self._between = self._histogram(
            "winnow_inter_token_latency_seconds", "Between tokens of one answer.",
            _BETWEEN_TOKENS_S,
        )  # fmt: skip
        self._whole = self._histogram(
            "winnow_e2e_request_latency_seconds", "From a request to the end of its answer.",
            _WHOLE_S,
        )  # fmt: skip
        self._queued = self._histogram(
            "winnow_request_queue_time_seconds", "From a request to its first step.",
            _FIRST_TOKEN_S,
        )  # fmt: skip
        self._prompt = self._counter(
            "winnow_prompt_tokens", "Tokens of prompts that got an answer."
        ).labels(model_name)
        self._generated = self._counter("winnow_generation_tokens", "Tokens generated.").labels(
            model_name
        )
        self._finished = self._counter(
            "winnow_request_success", "Answers that ended, by their reason.", "finished_reason"
        )
        self._refused = self._counter(
            "winnow_requests_refused", "Requests answered with an error, by its code.", "reason"
        )

    def queued(self, seconds: float) -> None:
        """An answer's first row was computed."""
        self._queued.observe(seconds)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """An answer began."""
        self._first_token.observe(seconds)
        self._prompt.inc(prompt_tokens)
        self.prompt_tokens += prompt_tokens

    def tokens(self, count: int, seconds_each: float | None) -> None:
        """Tokens came, that long after those before them; None for the first."""
        self._generated.inc(count)
        self.generation_tokens += count
        if seconds_each is not None:
            for _ in range(count):
                self._between.observe(seconds_each)

    def finished(self, reason: str, seconds: float) -> None:
        """An answer ended by itself (stop, length, error) or was cut (abort, timeout)."""
        self._finished.labels(self.model_name, reason).inc()
        self._whole.observe(seconds)

    def refused(self, reason: str) -> None:
        """A request got an error instead of an answer."""
        self._refused.labels(self.model_name, reason).inc()

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, [_LABEL], registry=self.registry, buckets=buckets)
        return histogram.labels(self.model_name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [_LABEL, *labels], registry=self.registry)


class _EngineCollector(Collector):
    """The engine's statistics as metrics; zeros until there are some."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        stats, label = self._metrics.stats, [self._metrics.model_name]
        for name, attribute, text in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=[_LABEL])
            gauge.add_metric(label, getattr(stats, attribute, 0))
            yield gauge
        for name, attribute, text in _TOTALS:
            total = CounterMetricFamily(name, text, labels=[_LABEL])
            total.add_metric(label, getattr(stats, attribute, 0))
            yield total
