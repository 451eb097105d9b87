"""For each alert a life of a server in which it fires, and one as near to it in which it is quiet.

A series is written as promtool has it, one value a minute. Usage: `promtool_tests(rules_file)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from firstdiff.tracing.deploy_rules import Alert, alerts

SERVER = 'job="firstdiff", instance="a:1", model_name="m", engine="0"'
GEN_AI = 'job="firstdiff", instance="a:1", gen_ai_operation_name="chat", error_type=""'
MINUTES = 130
CHANGE = 100
"""The minute in which a server of the longer lives changes."""

Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """`shown` is the alert's value as its description has it."""

    fires: Series
    quiet: Series
    at: str = "20m"
    shown: str = ""


def named(name: str, extra: str = "") -> str:
    return f"firstdiff_{name}{{{SERVER}{', ' + extra if extra else ''}}}"


def steady(value: float) -> str:
    return f"{value}x{MINUTES}"


def counting(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


def then(before: float, after: float) -> str:
    """A gauge that changes."""
    return " ".join([str(before)] * CHANGE + [str(after)] * (MINUTES - CHANGE))


def latencies(name: str, bounds: tuple[float, float], *, is_slower: bool) -> Series:
    """60 observations a minute below the first bound; after CHANGE, where it is slower, below the second."""
    fast, all_ = [], []
    for minute in range(MINUTES):
        all_.append(60 * minute)
        fast.append(60 * min(minute, CHANGE) if is_slower else 60 * minute)
    values = {str(bounds[0]): fast, str(bounds[1]): all_, "+Inf": all_}
    return {
        named(f"{name}_bucket", f'le="{le}"'): " ".join(map(str, counts)) for le, counts in values.items()
    }


def ended(*, well: float, badly: float) -> Series:
    success = "request_success_total"
    return {
        named(success, 'finished_reason="stop"'): counting(well),
        named(success, 'finished_reason="error"'): counting(badly),
    }


def pressed(*, waiting: str, usage: float, preemptions: float) -> Series:
    return {
        named("num_requests_waiting"): waiting,
        named("kv_cache_usage_perc"): steady(usage),
        named("num_preemptions_total"): counting(preemptions),
    }


def refused(per_minute: float) -> Series:
    return {
        named("admission_rejections_total", 'reason="queue_full"'): counting(per_minute),
        f"gen_ai_server_request_duration_seconds_count{{{GEN_AI}}}": counting(50),
    }


def first_tokens(*, queue_grows: bool) -> Series:
    return latencies("time_to_first_token_seconds", (0.1, 0.5), is_slower=True) | latencies(
        "request_queue_time_seconds", (0.01, 0.4), is_slower=queue_grows
    )


def gaps(*, running: float) -> Series:
    slower = latencies("inter_token_latency_seconds", (0.01, 0.05), is_slower=True)
    return slower | {named("num_requests_running"): then(2, running)}


def lost(name: str) -> Case:
    # A restart begins again at 0, which is no loss.
    once = " ".join(["0"] * 12 + ["3"] * (MINUTES - 12))
    restarted = " ".join(["3"] * 12 + ["0"] * (MINUTES - 12))
    return Case({named(name): once}, {named(name): restarted})


WAVES = " ".join(["5", "0"] * (MINUTES // 2))

CASES = {
    "FirstdiffMemoryBound": Case(
        pressed(waiting=steady(3), usage=0.95, preemptions=1),
        pressed(waiting=steady(3), usage=0.95, preemptions=0),
    ),
    "FirstdiffBatchBound": Case(
        pressed(waiting=steady(3), usage=0.3, preemptions=0),
        pressed(waiting=WAVES, usage=0.3, preemptions=0),
    ),
    "FirstdiffPreemptions": Case(
        ended(well=10, badly=0) | {named("num_preemptions_total"): counting(3)},
        ended(well=60, badly=0) | {named("num_preemptions_total"): counting(3)},
        shown="0.30",
    ),
    "FirstdiffRejections": Case(refused(10), refused(2), shown="20%"),
    "FirstdiffPrefillSlower": Case(
        first_tokens(queue_grows=False), first_tokens(queue_grows=True), at="125m", shown="496ms"
    ),
    "FirstdiffDecodeInterference": Case(gaps(running=6), gaps(running=2), at="125m", shown="49.6ms"),
    "FirstdiffTargetDown": Case(
        {'up{job="firstdiff", instance="a:1"}': steady(0)}, {'up{job="firstdiff", instance="a:1"}': steady(1)}
    ),
    "FirstdiffStalled": Case(
        {named("num_requests_running"): steady(1), named("engine_steps_total"): steady(7)},
        {named("num_requests_running"): steady(1), named("engine_steps_total"): counting(5)},
    ),
    "FirstdiffErrors": Case(ended(well=95, badly=5), ended(well=99, badly=1), shown="5%"),
    "FirstdiffCorruptedRequests": lost("corrupted_requests_total"),
    "FirstdiffLostLogRows": lost("lost_log_rows_total"),
    "FirstdiffDroppedSpans": lost("dropped_spans_total"),
}


def promtool_tests(rules_file: str, *, only: str = "") -> dict[str, object]:
    """The file for `promtool test rules`, of all alerts or of one; JSON is YAML too."""
    tests: list[object] = []
    for alert in alerts():
        if only not in ("", alert.name):
            continue
        case = CASES[alert.name]
        tests.append(_test(alert, case, case.fires, is_firing=True))
        tests.append(_test(alert, case, case.quiet, is_firing=False))
    return {"rule_files": [rules_file], "evaluation_interval": "1m", "tests": tests}


def _test(alert: Alert, case: Case, series: Series, *, is_firing: bool) -> dict[str, object]:
    # All alerts that fire, by name: in each life this one, or none.
    fired = [{"labels": f'{{alertname="{alert.name}"}}', "value": 1}] if is_firing else []
    return {
        "interval": "1m",
        "name": f"{alert.name} {'fires' if is_firing else 'is quiet'}",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": case.at,
                "exp_samples": fired,
            }
        ],
        "alert_rule_test": [
            {
                "alertname": alert.name,
                "eval_time": case.at,
                "exp_alerts": [_told(alert, case, next(iter(series)))] if is_firing else [],
            }
        ],
    }


def _told(alert: Alert, case: Case, series: str) -> dict[str, object]:
    """The alert's labels, those of the series that its query keeps, and its words with the values in them."""
    kept = dict(re.findall(r'(\w+)="([^"]*)"', series))
    dropped = _DROPPED.get(alert.name, ())
    labels = {name: value for name, value in kept.items() if name not in dropped}
    description = re.sub(r"\{\{ \$value [^}]+\}\}", case.shown, alert.description)
    summary = alert.summary.replace("{{ $labels.instance }}", "a:1")
    return {
        "exp_labels": labels | {"severity": alert.severity},
        "exp_annotations": {"summary": summary, "description": description},
    }


_SUMMED = ("engine", "le", "finished_reason")
_DROPPED = {
    "FirstdiffPreemptions": _SUMMED,
    "FirstdiffErrors": _SUMMED,
    "FirstdiffPrefillSlower": _SUMMED,
    "FirstdiffDecodeInterference": _SUMMED,
    "FirstdiffRejections": ("engine", "model_name", "reason"),
}
