"""Request metrics under vLLM's names.

Dashboards, load tools and autoscalers of the Gateway API inference extension read these names; they
are served in addition to our own metrics. Counters are updated once per request and step, not per
token.

Source: vLLM, "Production Metrics"; Gateway API inference extension, "Model Server Protocol".
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_TOKENS = tuple(float(2**power) for power in range(18))
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", _SECONDS),
    "inter_token_latency_seconds": ("Gap between steps, shared by a step's tokens", _TOKEN_SECONDS),
    "time_per_output_token_seconds": ("The same by its older name", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean of one request", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", _SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request", _TOKENS),
    "request_generation_tokens": ("Output tokens of a request", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens",
    "generation_tokens": "Output tokens",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "spec_decode_num_drafts": "Trees verified",
    "spec_decode_num_draft_tokens": "Draft tokens verified",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
}


class StepHistogram:
    """A histogram filled by one thread, for events more frequent than requests. Costs a fifth of
    the client library's histogram, which takes a lock for each value.

    Args:
        bounds: upper bounds, ascending, each inclusive; larger values count in `+Inf`.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds a sample of the current state to a metric family. May be called by any thread."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures that only an engine has.

    Attributes:
        kv_usage: share of KV pages that sequences hold, in [0, 1].
        num_preemptions: number since start-up.
    """

    model_id: str
    num_running: int
    num_waiting: int
    kv_usage: float
    num_pages: int
    page_size: int
    num_preemptions: int


@dataclass(slots=True)
class _Model:
    histograms: dict[str, StepHistogram] = field(
        default_factory=lambda: {
            name: StepHistogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()
        }
    )
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_drafted: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    num_running: int = 0
    num_waiting: int = 0
    gaps: StepHistogram = field(init=False)  # the histogram that every step fills

    def __post_init__(self) -> None:
        self.gaps = self.histograms["inter_token_latency_seconds"]

    @property
    def counts(self) -> dict[str, int]:
        lengths = dict(self.accepted_lengths)
        return {
            "prompt_tokens": self.num_prompt,
            "generation_tokens": self.num_generated,
            "prefix_cache_queries": self.num_prompt,
            "prefix_cache_hits": self.num_cached,
            "spec_decode_num_drafts": sum(lengths.values()),
            "spec_decode_num_draft_tokens": self.num_drafted,
            "spec_decode_num_accepted_tokens": sum(n * times for n, times in lengths.items()),
        }


@dataclass(slots=True)
class RequestFigures:
    """Figures of one unfinished request; times in seconds of one monotonic clock.

    Attributes:
        begin_s: when it arrived.
        started_s: when it left the queue; None while it waits.
        first_s, last_s: when the first and the last step brought tokens.
        num_first_tokens: tokens of the first step.
    """

    model: _Model
    begin_s: float
    started_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0


class VllmMetrics(Collector):
    """Figures of every model's requests. Filled by one thread, read by any.

    Args:
        engine: called for each scrape; None counts running and waiting requests from reported
            events.
    """

    def __init__(self, engine: Callable[[], EngineFigures | None] | None = None) -> None:
        self._engine = engine
        self._models: defaultdict[str, _Model] = defaultdict(_Model)

    def count(self, model: str, name: str) -> int:
        """Returns a counter of a model, by its name without `vllm:` and `_total`."""
        return self._models[model].counts[name]

    def begin(self, model: str, now_s: float) -> RequestFigures:
        figures = self._models[model]
        figures.num_waiting += 1
        return RequestFigures(figures, now_s)

    def start(self, request: RequestFigures, num_cached: int, now_s: float) -> None:
        """Counts a request that has left the queue, with `num_cached` prompt tokens found in the
        prefix cache."""
        figures = request.model
        request.started_s = now_s
        figures.num_waiting -= 1
        figures.num_running += 1
        figures.histograms["request_queue_time_seconds"].observe(now_s - request.begin_s)
        figures.num_cached += num_cached

    def tokens(
        self,
        request: RequestFigures,
        num_tokens: int,
        now_s: float,
        num_drafted: int = 0,
        num_accepted: int = 0,
    ) -> None:
        """Counts tokens of a step.

        Args:
            num_drafted: draft tokens verified in the step; 0 for a plain step.
        """
        figures = request.model
        if request.first_s is None:
            request.first_s = now_s
            request.num_first_tokens = num_tokens
            figures.histograms["time_to_first_token_seconds"].observe(now_s - request.begin_s)
        else:
            figures.gaps.observe((now_s - request.last_s) / num_tokens, num_tokens)
        request.last_s = now_s
        request.num_tokens += num_tokens
        figures.num_generated += num_tokens
        if num_drafted:
            figures.num_drafted += num_drafted
            figures.accepted_lengths[num_accepted] += 1

    def end(self, request: RequestFigures, num_prompt: int, reason: str) -> None:
        """Counts a request that has ended; the reason is `stop`, `length`, `abort` or `error`."""
        figures = request.model
        if request.started_s is None:
            figures.num_waiting -= 1
        else:
            figures.num_running -= 1
            figures.num_prompt += num_prompt
        figures.ended[reason] += 1
        if request.first_s is None or reason not in ("stop", "length"):
            return
        histograms = figures.histograms
        histograms["e2e_request_latency_seconds"].observe(request.last_s - request.begin_s)
        histograms["request_prompt_tokens"].observe(num_prompt)
        histograms["request_generation_tokens"].observe(request.num_tokens)
        num_later = request.num_tokens - request.num_first_tokens
        if num_later > 0:
            mean_s = (request.last_s - request.first_s) / num_later
            histograms["request_time_per_output_token_seconds"].observe(mean_s)

    def collect(self) -> Iterator[Metric]:
        models = dict(self._models)
        yield from _load(models, None if self._engine is None else self._engine())
        for name, meaning in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
            for model, figures in models.items():
                counter.add_metric((model, _ENGINE), figures.counts[name])
            yield counter
        for name, (meaning, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
            # `time_per_output_token` is the older name of `inter_token_latency`.
            source = name.replace("time_per_output_token", "inter_token_latency", 1)
            source = source if source in _HISTOGRAMS else name
            for model, figures in models.items():
                figures.histograms[source].add_to(histogram, (model, _ENGINE))
            yield histogram
        yield from _labelled_counters(models)


def _load(models: Mapping[str, _Model], engine: EngineFigures | None) -> Iterator[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests in steps", labels=_LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in queue", labels=_LABELS)
    if engine is None:
        for model, figures in models.items():
            running.add_metric((model, _ENGINE), figures.num_running)
            waiting.add_metric((model, _ENGINE), figures.num_waiting)
        yield from (running, waiting)
        return
    labels = (engine.model_id, _ENGINE)
    running.add_metric(labels, engine.num_running)
    waiting.add_metric(labels, engine.num_waiting)
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of KV pages held, 1 is all", labels=_LABELS
    )
    usage.add_metric(labels, engine.kv_usage)
    preempted = CounterMetricFamily(
        "vllm:num_preemptions", "Sequences that lost their pages", labels=_LABELS
    )
    preempted.add_metric(labels, engine.num_preemptions)
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Tokens a page and pages, as labels",
        labels=(*_LABELS, "block_size", "num_gpu_blocks"),
    )
    config.add_metric((*labels, str(engine.page_size), str(engine.num_pages)), 1)
    yield from (running, waiting, usage, preempted, config)


def _labelled_counters(models: Mapping[str, _Model]) -> Iterator[Metric]:
    accepted = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Trees of which the token at this depth, from 0, was accepted",
        labels=(*_LABELS, "position"),
    )
    ended = CounterMetricFamily(
        "vllm:request_success",
        "Requests that ended, by reason: stop, length, abort, error",
        labels=(*_LABELS, "finished_reason"),
    )
    for model, figures in models.items():
        lengths = dict(figures.accepted_lengths)
        for position in range(max(lengths, default=0)):
            count = sum(lengths[length] for length in lengths if length > position)
            accepted.add_metric((model, _ENGINE, str(position)), count)
        for reason, count in sorted(figures.ended.items()):
            ended.add_metric((model, _ENGINE, reason), count)
    yield from (accepted, ended)
