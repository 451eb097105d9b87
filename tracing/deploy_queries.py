"""Queries for Prometheus over the metrics of the table.

Owns: how a rate, a quantile and a mean are asked for. Refuses to know: who asks, rules, panels. Invariants: a
name that is not in the table is a KeyError, so nothing asks for a metric that no server has; counters are
read through a rate or an increase, so that a restart counts as one; a quantile is taken of the summed rates
of buckets, never of quantiles.

Usage: `quantile(0.99, "firstdiff_time_to_first_token_seconds", by=("instance",), window="5m")`.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstdiff.tracing.metric_table import METRICS, Metric

BY_NAME: dict[str, Metric] = {metric.full_name: metric for metric in METRICS}


def gauge(name: str, *, selector: str = "") -> str:
    """A gauge as it stands."""
    metric = _of_kind(name, "gauge")
    return f"{metric.series}{_braces(selector)}"


def gauge_over_time(function: str, name: str, window: str, offset: str = "") -> str:
    """`min`, `avg` or `max` of a gauge over a window, which ended `offset` ago; one for each engine."""
    return f"{function}_over_time({gauge(name)}[{window}]{f' offset {offset}' if offset else ''})"


def increase(name: str, window: str) -> str:
    """How far a counter went, one for each engine and label."""
    return f"increase({_of_kind(name, 'counter').series}[{window}])"


def rate(name: str, *, by: Sequence[str], window: str, selector: str = "", suffix: str = "") -> str:
    """A counter's rate a second; of a histogram's `_count` or `_sum` with that suffix."""
    metric = _of_kind(name, "histogram" if suffix else "counter")
    return f"sum by ({', '.join(by)}) (rate({metric.series}{suffix}{_braces(selector)}[{window}]))"


def mean(name: str, *, by: Sequence[str], window: str, selector: str = "") -> str:
    """What a histogram observed on average."""
    total, count = (
        rate(name, by=by, window=window, selector=selector, suffix=suffix) for suffix in ("_sum", "_count")
    )
    return f"{total} / {count}"


def quantile(fraction: float, name: str, *, by: Sequence[str], window: str, selector: str = "") -> str:
    """An estimate of a histogram's quantile, as near as its buckets are wide; NaN when it saw nothing."""
    buckets = rate(name, by=("le", *by), window=window, selector=selector, suffix="_bucket")
    return f"histogram_quantile({fraction:g}, {buckets})"


def heatmap(name: str, *, window: str, selector: str = "") -> str:
    """How often each bucket of a histogram was hit."""
    metric = _of_kind(name, "histogram")
    return f"sum by (le) (increase({metric.series}_bucket{_braces(selector)}[{window}]))"


def _of_kind(name: str, kind: str) -> Metric:
    metric = BY_NAME[name]
    assert metric.kind == kind, (name, metric.kind, kind)
    return metric


def _braces(selector: str) -> str:
    return f"{{{selector}}}" if selector else ""
