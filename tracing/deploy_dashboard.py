"""A Grafana dashboard over the metrics of the table.

Owns: which panels there are and in what order. Refuses to know: files, which servers are looked at.
Invariants: every metric of the table has a panel; each query is confined to the chosen servers and models;
the words beside a panel are the table's own definitions.

Usage: `json.dumps(dashboard())`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal

from firstdiff.tracing.deploy_queries import BY_NAME, gauge, heatmap, mean, quantile, rate
from firstdiff.tracing.metric_table import GEN_AI_PREFIX, METRIC_PREFIX
from firstdiff.tracing.names import PHASES

TITLE = "Firstdiff"
UID = "firstdiff-servers"
SERVERS = 'instance=~"$instance", model_name=~"$model"'
GEN_AI_SERVERS = 'instance=~"$instance", gen_ai_request_model=~"$model"'
WINDOW = "$__rate_interval"
ENGINE = ("instance", "model_name")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_FRACTIONS = (0.5, 0.95, 0.99)
_PHASE_METRIC = {phase: f"request_{phase}_time_seconds" for phase in PHASES}
_INSIDE = ("preempted",)
"""Phases whose time the metrics of prefill and decode, with vLLM's meaning, hold too."""
_PER_ROW, _WIDTH, _HEIGHT = 3, 8, 8

_READING = """\
- requests wait, KV cache above 0.9, preemptions rise: **memory-bound** (`--num-blocks`)
- requests wait, KV cache low: **batch-bound** (`--max-num-seqs`, `--max-num-batched-tokens`)
- p99 to the first token up, median wait flat: **prefill** (longer prompts, fewer cached)
- p99 between tokens up, more requests running: **prefills hold up decoding**

Means mislead: look at p50 and p99, wait and prefill apart. A quantile is not nearer than its bucket is wide;
exact times of each request are in the token log. A dot on a latency is a trace.
"""


@dataclass(frozen=True, slots=True)
class Query:
    """What a panel asks, and what it calls the answers."""

    expr: str
    legend: str
    has_exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel; its description is the definition of `metric`."""

    title: str
    metric: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "heatmap"] = "timeseries"
    is_stacked: bool = False
    note: str = ""


def dashboard() -> dict[str, object]:
    """The dashboard as Grafana imports it; the data source is chosen in it."""
    panels: list[dict[str, object]] = []
    ids = count(1)
    y = 0
    for title, row in _rows().items():
        panels.append(_row(title, next(ids), y))
        y += 1
        for index, panel in enumerate(row):
            x = index % _PER_ROW * _WIDTH
            panels.append(_panel(panel, next(ids), x, y + index // _PER_ROW * _HEIGHT))
        y += -(-len(row) // _PER_ROW) * _HEIGHT
    reading = {
        "id": next(ids),
        "type": "text",
        "title": "How to read this",
        "gridPos": {"x": 0, "y": y, "w": _PER_ROW * _WIDTH, "h": _HEIGHT},
        "options": {"mode": "markdown", "content": _READING},
    }
    return {
        "title": TITLE,
        "uid": UID,
        "tags": ["firstdiff", "inference"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [*panels, reading],
    }


def _rows() -> dict[str, list[Panel]]:
    return {
        "Traffic": [
            _rates("Requests ended", "request_success", "finished_reason", unit="reqps"),
            _rates("Requests refused", "admission_rejections", "reason", unit="reqps"),
            _rates("Output tokens", "generation_tokens"),
            _rates("Prompt tokens", "prompt_tokens"),
            _rates("Prompt tokens from the cache", "prompt_tokens_cached"),
            _rates("Prompt tokens as steps took them in", "prompt_tokens_by_source", "source"),
        ],
        "Latency": [
            _spread("Time to first token", "time_to_first_token_seconds"),
            _spread("Between two tokens", "inter_token_latency_seconds"),
            _spread("A token, over its request", "request_time_per_output_token_seconds"),
            _spread("Whole request", "e2e_request_latency_seconds"),
            _spread("Scheduled to finished", "request_inference_time_seconds"),
            _heatmap("Time to first token, all", "time_to_first_token_seconds", unit="s"),
        ],
        "Phases": [_mean_request(), *(_spread(phase.capitalize(), _PHASE_METRIC[phase]) for phase in PHASES)],
        "Engine": [
            _gauges("Running", "num_requests_running"),
            _gauges("Waiting", "num_requests_waiting"),
            _gauges("KV cache in use", "kv_cache_usage_perc", unit="percentunit"),
            _gauges("Shape of the KV cache", "cache_config_info", "block_size", "num_gpu_blocks"),
            _rates("Preemptions", "num_preemptions"),
            _rates("Steps", "engine_steps"),
            _spread("A step", "step_time_seconds"),
            _heatmap("Tokens in a step", "iteration_tokens_total"),
            _hit_share(),
        ],
        "Requests": [
            _heatmap("Prompt lengths", "request_prompt_tokens"),
            _heatmap("Answer lengths", "request_generation_tokens"),
            _heatmap("max_tokens asked", "request_params_max_tokens"),
            _heatmap("Prompt tokens computed", "request_prefill_kv_computed_tokens"),
            _heatmap("Preemptions a request", "request_num_preemptions"),
        ],
        "Losses": [
            _rates("Corrupted requests", "corrupted_requests", unit="reqps"),
            _rates("Log rows lost", "lost_log_rows"),
            _rates("Spans dropped", "dropped_spans"),
        ],
        "OpenTelemetry's names": [
            _gen_ai("Requests and their errors", "request_duration_seconds", counts="error_type"),
            _gen_ai("Request duration", "request_duration_seconds"),
            _gen_ai("Time to first token", "time_to_first_token_seconds"),
            _gen_ai("Time per output token", "time_per_output_token_seconds"),
        ],
    }


def _legend(*labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in ("instance", "model_name", *labels))


def _rates(title: str, name: str, *labels: str, unit: str = "short") -> Panel:
    expr = rate(METRIC_PREFIX + name, by=(*ENGINE, *labels), window=WINDOW, selector=SERVERS)
    return Panel(title, METRIC_PREFIX + name, (Query(expr, _legend(*labels)),), unit, is_stacked=bool(labels))


def _gauges(title: str, name: str, *labels: str, unit: str = "short") -> Panel:
    expr = gauge(METRIC_PREFIX + name, selector=SERVERS)
    return Panel(title, METRIC_PREFIX + name, (Query(expr, _legend(*labels)),), unit)


def _spread(title: str, name: str) -> Panel:
    metric = BY_NAME[METRIC_PREFIX + name]
    queries = [
        Query(
            quantile(fraction, metric.full_name, by=ENGINE, window=WINDOW, selector=SERVERS),
            f"p{fraction * 100:g} {_legend()}",
            has_exemplars=metric.has_exemplars and fraction == _FRACTIONS[-1],
        )
        for fraction in _FRACTIONS
    ]
    average = mean(metric.full_name, by=ENGINE, window=WINDOW, selector=SERVERS)
    return Panel(title, metric.full_name, (*queries, Query(average, f"mean {_legend()}")), "s")


def _heatmap(title: str, name: str, *, unit: str = "short") -> Panel:
    expr = heatmap(METRIC_PREFIX + name, window=WINDOW, selector=SERVERS)
    return Panel(title, METRIC_PREFIX + name, (Query(expr, "{{le}}"),), unit, "heatmap")


def _mean_request() -> Panel:
    """The phases of the average request one on the other: their sum is its end-to-end latency."""
    whole = METRIC_PREFIX + "e2e_request_latency_seconds"
    number = rate(whole, by=(), window=WINDOW, selector=SERVERS, suffix="_count")
    queries = [
        Query(
            f"{rate(METRIC_PREFIX + name, by=(), window=WINDOW, selector=SERVERS, suffix='_sum')} / {number}",
            phase,
        )
        for phase, name in _PHASE_METRIC.items()
        if phase not in _INSIDE
    ]
    note = "The phases add up to the mean latency of all chosen servers; preemptions lie inside."
    return Panel(
        "Where the mean request spends its time", whole, tuple(queries), "s", is_stacked=True, note=note
    )


def _hit_share() -> Panel:
    hits, queries = (
        rate(f"{METRIC_PREFIX}prefix_cache_{what}", by=ENGINE, window=WINDOW, selector=SERVERS)
        for what in ("hits", "queries")
    )
    query = Query(f"{hits} / ({queries} > 0)", _legend())
    whole = BY_NAME[METRIC_PREFIX + "prefix_cache_queries"]
    return Panel(
        "Prefix cache: share found",
        METRIC_PREFIX + "prefix_cache_hits",
        (query,),
        "percentunit",
        note=f"{whole.full_name}: {whole.help}",
    )


def _gen_ai(title: str, name: str, *, counts: str = "") -> Panel:
    full_name = GEN_AI_PREFIX + name
    by = ("instance", "gen_ai_operation_name")
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    if counts:
        expr = rate(full_name, by=(*by, counts), window=WINDOW, selector=GEN_AI_SERVERS, suffix="_count")
        return Panel(title, full_name, (Query(expr, f"{legend} {{{{{counts}}}}}"),), "reqps", is_stacked=True)
    queries = [
        Query(
            quantile(fraction, full_name, by=by, window=WINDOW, selector=GEN_AI_SERVERS),
            f"p{fraction * 100:g} {legend}",
        )
        for fraction in _FRACTIONS
    ]
    return Panel(title, full_name, tuple(queries), "s")


def _row(title: str, number: int, y: int) -> dict[str, object]:
    position = {"x": 0, "y": y, "w": _PER_ROW * _WIDTH, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": position,
        "panels": [],
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, object]:
    definition = f"{panel.metric}: {BY_NAME[panel.metric].help}"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "exemplar": query.has_exemplars,
        }
        | ({"format": "heatmap"} if panel.kind == "heatmap" else {})
        for index, query in enumerate(panel.queries)
    ]
    found: dict[str, object] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{definition} {panel.note}".strip(),
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "targets": targets,
    }
    if panel.kind == "heatmap":
        return found | {"options": {"calculate": False, "yAxis": {"unit": panel.unit}}}
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    drawing = {"fillOpacity": 20 if panel.is_stacked else 0, "stacking": stacking, "showPoints": "never"}
    legend = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
    return found | {
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawing}, "overrides": []},
        "options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
    }


def _variables() -> list[dict[str, object]]:
    steps = BY_NAME[METRIC_PREFIX + "engine_steps"].series
    chosen = {"datasource": _SOURCE, "type": "query", "refresh": 2, "sort": 1, "multi": True}
    chosen |= {"includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {"name": "instance", "label": "Server", "query": f"label_values({steps}, instance)"} | chosen,
        {
            "name": "model",
            "label": "Model",
            "query": f'label_values({steps}{{instance=~"$instance"}}, model_name)',
        }
        | chosen,
    ]
