"""What is scraped."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from winnow.engine.output import EngineStats
from winnow.server.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Values by name and by the label beside the model's name."""
    values = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            values[sample.name, ",".join(labels.values())] = sample.value
    return values


def test_every_promised_name_is_there_before_the_first_request() -> None:
    names = {name for name, _ in samples(Metrics("m"))}
    names |= {name.removesuffix("_count") for name in names}
    text = Metrics("m").text().decode()
    for name in ("winnow_request_success", "winnow_requests_refused"):
        assert f"# TYPE {name}_total counter" in text
    assert names >= {
        "winnow_num_requests_running",
        "winnow_num_requests_waiting",
        "winnow_time_to_first_token_seconds",
        "winnow_inter_token_latency_seconds",
        "winnow_e2e_request_latency_seconds",
        "winnow_request_queue_time_seconds",
        "winnow_prompt_tokens_total",
        "winnow_generation_tokens_total",
        "winnow_prefix_cache_query_tokens_total",
        "winnow_prefix_cache_hit_tokens_total",
        "winnow_pages_used",
        "winnow_pages_total",
        "winnow_num_preemptions_total",
        "winnow_clipped_values_total",
    }


def test_the_engines_counts_are_the_newest_ones() -> None:
    metrics = Metrics("m")
    metrics.stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    values = samples(metrics)
    assert values["winnow_num_requests_running", ""] == 1
    assert values["winnow_num_requests_waiting", ""] == 2
    assert values["winnow_pages_used", ""] == 3
    assert values["winnow_pages_cached", ""] == 4
    assert values["winnow_pages_total", ""] == 5
    assert values["winnow_num_preemptions_total", ""] == 6
    assert values["winnow_prefix_cache_query_tokens_total", ""] == 7
    assert values["winnow_prefix_cache_hit_tokens_total", ""] == 8
    assert values["winnow_clipped_values_total", ""] == 10


def test_times_and_tokens_are_counted_once_each() -> None:
    metrics = Metrics("m")
    metrics.queued(0.03)
    metrics.first_token(0.2, prompt_tokens=12)
    metrics.tokens(1, None)
    metrics.tokens(3, 0.015)
    metrics.finished("stop", 1.5)
    metrics.finished("abort", 0.1)
    metrics.refused("queue_full")
    values = samples(metrics)
    assert values["winnow_request_queue_time_seconds_sum", ""] == 0.03
    assert values["winnow_time_to_first_token_seconds_sum", ""] == 0.2
    assert values["winnow_prompt_tokens_total", ""] == 12
    assert values["winnow_generation_tokens_total", ""] == 4
    assert values["winnow_inter_token_latency_seconds_count", ""] == 3
    assert values["winnow_inter_token_latency_seconds_bucket", "0.01"] == 0
    assert values["winnow_inter_token_latency_seconds_bucket", "0.02"] == 3
    assert values["winnow_e2e_request_latency_seconds_count", ""] == 2
    assert values["winnow_request_success_total", "stop"] == 1
    assert values["winnow_request_success_total", "abort"] == 1
    assert values["winnow_requests_refused_total", "queue_full"] == 1
