"""Requests under vLLM's names, as a scraper reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from shared.telemetry.vllm_metrics import EngineFigures, StepHistogram, VllmMetrics

ENGINE = EngineFigures(
    model_id="m",
    num_running=3,
    num_waiting=2,
    kv_usage=0.25,
    num_pages=100,
    page_size=16,
    num_preemptions=7,
)


def _scrape(metrics: VllmMetrics) -> dict[str, float]:
    """Returns every sample by name, with the labels that are not the model's and the engine's."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            assert sample.labels["model_name"] == "m"
            samples[" ".join([sample.name, *labels.values()])] = sample.value
    return samples


def test_a_request_is_timed_from_its_arrival_to_its_last_token() -> None:
    metrics = VllmMetrics()
    request = metrics.begin("m", 10.0)
    metrics.start(request, 4, 10.5)
    metrics.tokens(request, 1, 11.0)
    metrics.tokens(request, 3, 11.3, 5, 2)
    metrics.tokens(request, 1, 11.4)
    assert _scrape(metrics)["vllm:num_requests_running"] == 1
    metrics.end(request, 8, "stop")
    samples = _scrape(metrics)
    assert samples["vllm:num_requests_running"] == 0
    assert samples["vllm:request_queue_time_seconds_sum"] == 0.5
    assert samples["vllm:time_to_first_token_seconds_sum"] == 1.0
    assert round(samples["vllm:e2e_request_latency_seconds_sum"], 9) == 1.4
    # Three tokens share 0.3 s, the fourth takes 0.1 s.
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert samples[f"vllm:{name}_count"] == 4
        assert round(samples[f"vllm:{name}_sum"], 9) == 0.4
    assert round(samples["vllm:request_time_per_output_token_seconds_sum"], 9) == 0.1
    assert samples["vllm:prompt_tokens_total"] == 8
    assert samples["vllm:generation_tokens_total"] == 5
    assert samples["vllm:prefix_cache_queries_total"] == 8
    assert samples["vllm:prefix_cache_hits_total"] == 4
    assert samples["vllm:request_success_total stop"] == 1
    assert samples["vllm:spec_decode_num_drafts_total"] == 1
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == 5
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == 2
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total 0"] == 1
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total 1"] == 1


def test_what_was_cut_off_counts_but_is_not_timed_to_its_end() -> None:
    metrics = VllmMetrics()
    waiting = metrics.begin("m", 0.0)
    running = metrics.begin("m", 0.0)
    metrics.start(running, 0, 0.1)
    metrics.tokens(running, 1, 0.2)
    samples = _scrape(metrics)
    assert (samples["vllm:num_requests_waiting"], samples["vllm:num_requests_running"]) == (1, 1)
    metrics.end(waiting, 8, "error")
    metrics.end(running, 8, "abort")
    samples = _scrape(metrics)
    assert (samples["vllm:num_requests_waiting"], samples["vllm:num_requests_running"]) == (0, 0)
    assert samples["vllm:e2e_request_latency_seconds_count"] == 0
    assert samples["vllm:request_success_total error"] == 1
    assert samples["vllm:request_success_total abort"] == 1
    assert samples["vllm:prompt_tokens_total"] == 8, "what never ran has read no prompt"


def test_an_engine_speaks_for_its_load() -> None:
    metrics = VllmMetrics(lambda: ENGINE)
    metrics.begin("m", 0.0)
    samples = _scrape(metrics)
    assert samples["vllm:num_requests_running"] == 3
    assert samples["vllm:num_requests_waiting"] == 2
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert samples["vllm:num_preemptions_total"] == 7
    assert samples["vllm:cache_config_info 16 100"] == 1


def test_an_engine_that_does_not_answer_takes_nothing_else_away() -> None:
    metrics = VllmMetrics(lambda: None)
    metrics.begin("m", 0.0)
    samples = _scrape(metrics)
    assert "vllm:kv_cache_usage_perc" not in samples
    assert "vllm:generation_tokens_total" in samples


def test_a_bound_is_inclusive_and_the_last_bucket_holds_the_rest() -> None:
    histogram = StepHistogram((1.0, 2.0))
    for value, count in ((1.0, 2), (1.5, 1), (2.5, 3)):
        histogram.observe(value, count)
    assert histogram.count == 6
    family = HistogramMetricFamily("h", "…")
    histogram.add_to(family, ())
    values = [(s.labels.get("le"), s.value) for s in family.samples]
    assert values == [("1", 2), ("2", 3), ("+Inf", 6), (None, 6), (None, 11.0)]
