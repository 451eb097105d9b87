"""Recording and alert rules for Prometheus, made from the table of metrics.

Owns: which rules there are and what each alert tells its reader to do. Refuses to know: files, YAML, who is
woken. Invariants: an alert rests on rates, quantiles of summed buckets and moments that lasted, never on one
scrape; "slower" means slower than this server was in the hour before; nothing recorded is NaN, so that an
idle stretch spoils no average.

Usage: `for rule in recording_rules(): print(rule.record, rule.expr)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firstdiff.tracing.deploy_queries import gauge_over_time, increase, quantile, rate
from firstdiff.tracing.metric_table import METRIC_PREFIX, METRICS

JOB = "firstdiff"
"""The name under which Prometheus scrapes our servers."""

WINDOW = "5m"
QUANTILES = {"p50": 0.5, "p99": 0.99}
SERVER = ("job", "instance", "model_name")
_PREFIX = "instance_model"
_BEFORE_WINDOW, _BEFORE_OFFSET = "1h", "15m"

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Recording:
    """A query whose answer is kept under a name of its own."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """A query that has answers when something is wrong, for at least `lasting`."""

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str
    description: str


def recorded(name: str, operation: str) -> str:
    """The name of a recorded series: of which metric, and what was done with it."""
    return f"{_PREFIX}:{METRIC_PREFIX}{name}:{operation}"


def recording_rules() -> list[Recording]:
    """Rates of all counters of the engine, quantiles of all its latencies, and the shares made of them."""
    rules: list[Recording] = []
    for metric in METRICS:
        if metric.prefix != METRIC_PREFIX:
            continue
        if metric.kind == "counter":
            expr = rate(metric.full_name, by=(*SERVER, *metric.labels), window=WINDOW)
            rules.append(Recording(recorded(metric.name, f"rate{WINDOW}"), expr))
        elif metric.kind == "histogram" and metric.name.endswith("_seconds"):
            for label, fraction in QUANTILES.items():
                expr = quantile(fraction, metric.full_name, by=SERVER, window=WINDOW)
                rules.append(Recording(recorded(metric.name, f"{label}_rate{WINDOW}"), f"{expr} >= 0"))
    server = ", ".join(SERVER)
    ended = f"sum by ({server}) ({recorded('request_success', f'rate{WINDOW}')})"
    failed = f'sum by ({server}) ({recorded("request_success", f"rate{WINDOW}")}{{finished_reason="error"}})'
    hits, queries = (recorded(f"prefix_cache_{what}", f"rate{WINDOW}") for what in ("hits", "queries"))
    preempted = recorded("num_preemptions", f"rate{WINDOW}")
    shares = {
        "request_errors": f"{failed} / ({ended} > 0)",
        "prefix_cache_hits": f"{hits} / ({queries} > 0)",
        "preemptions_per_request": f"{preempted} / ({ended} > 0)",
    }
    return rules + [Recording(recorded(name, f"ratio_rate{WINDOW}"), expr) for name, expr in shares.items()]


def alerts() -> list[Alert]:
    """How load, faults and losses show, each with what to look at."""
    return [*_overload(), *_slower(), *_faults(), *_losses()]


def _overload() -> list[Alert]:
    # A gauge is a sample: only one that was never zero for five minutes is a queue.
    waiting = f"{gauge_over_time('min', 'firstdiff_num_requests_waiting', WINDOW)} > 0"
    usage = "firstdiff_kv_cache_usage_perc"
    rejected = rate("firstdiff_admission_rejections", by=("job", "instance"), window=WINDOW)
    asked = rate(
        "gen_ai_server_request_duration_seconds", by=("job", "instance"), window=WINDOW, suffix="_count"
    )
    return [
        Alert(
            "FirstdiffMemoryBound",
            f"{waiting}\nand {gauge_over_time('avg', usage, WINDOW)} > 0.9\n"
            f"and {increase('firstdiff_num_preemptions', WINDOW)} > 0",
            "2m",
            "warning",
            "{{ $labels.instance }} has no memory left for more requests",
            "Requests wait, over nine tenths of the KV blocks are in use and sequences lose theirs. Give it "
            "more --num-blocks, or fewer requests: a smaller --max-num-seqs, another replica.",
        ),
        Alert(
            "FirstdiffBatchBound",
            f"{waiting}\nand {gauge_over_time('max', usage, WINDOW)} < 0.7",
            "5m",
            "warning",
            "{{ $labels.instance }} lets requests wait with memory to spare",
            "Requests wait although under seven tenths of the KV blocks are in use: seats or the token "
            "budget of a step are short. Raise --max-num-seqs or --max-num-batched-tokens, or add a replica.",
        ),
        Alert(
            "FirstdiffPreemptions",
            f"{recorded('preemptions_per_request', f'ratio_rate{WINDOW}')} > 0.1",
            "5m",
            "warning",
            "{{ $labels.instance }} computes many answers partly twice",
            '{{ $value | printf "%.2f" }} preemptions a request: each loses its KV blocks and is computed '
            "again. See request_preempted_time_seconds for what that costs; give it more --num-blocks.",
        ),
        Alert(
            "FirstdiffRejections",
            f"{rejected}\n/ ({asked} > 0)\n> 0.05",
            "5m",
            "warning",
            "{{ $labels.instance }} refuses requests",
            "{{ $value | humanizePercentage }} of the requests are refused before the engine sees them; "
            "admission_rejections says why: its queue is full, or it is shutting down or dead.",
        ),
    ]


def _before(series: str) -> str:
    return f"avg_over_time({series}[{_BEFORE_WINDOW}] offset {_BEFORE_OFFSET})"


def _slower() -> list[Alert]:
    def p(label: str, name: str) -> str:
        return recorded(name, f"{label}_rate{WINDOW}")

    ttft, queue = p("p99", "time_to_first_token_seconds"), p("p50", "request_queue_time_seconds")
    gap = p("p99", "inter_token_latency_seconds")
    running = [
        f"sum by ({', '.join(SERVER)}) ({gauge_over_time('avg', 'firstdiff_num_requests_running', *when)})"
        for when in ((WINDOW, ""), (_BEFORE_WINDOW, _BEFORE_OFFSET))
    ]
    return [
        Alert(
            "FirstdiffPrefillSlower",
            f"{ttft} > 1.5 * {_before(ttft)}\nand {queue} <= 1.2 * {_before(queue)} + 0.01",
            "10m",
            "warning",
            "{{ $labels.instance }}: first tokens come later, and not for waiting",
            "The 99th percentile of the time to the first token is {{ $value | humanizeDuration }}, over "
            "1.5 times its average of the hour before, while the median wait is what it was: longer "
            "prompts, fewer of them cached, or a slower prefill. Compare request_prefill_time_seconds with "
            "request_prefill_kv_computed_tokens, and follow an exemplar to its trace.",
        ),
        Alert(
            "FirstdiffDecodeInterference",
            f"{gap} > 1.5 * {_before(gap)}\nand {running[0]}\n> 1.2 * {running[1]}",
            "10m",
            "warning",
            "{{ $labels.instance }}: tokens come slower as more requests run",
            "The 99th percentile of the gap between tokens is {{ $value | humanizeDuration }}, over 1.5 "
            "times its average of the hour before, with more requests in a step: their prefills hold up "
            "decoding. Lower --max-num-batched-tokens or --max-num-seqs, or add a replica.",
        ),
    ]


def _faults() -> list[Alert]:
    return [
        Alert(
            "FirstdiffTargetDown",
            f'up{{job="{JOB}"}} == 0',
            "1m",
            "critical",
            "{{ $labels.instance }} does not answer",
            "Prometheus could not read its metrics for a minute: is the server up, and reachable from here?",
        ),
        Alert(
            "FirstdiffStalled",
            f"{gauge_over_time('min', 'firstdiff_num_requests_running', WINDOW)} > 0\n"
            f"and {increase('firstdiff_engine_steps', WINDOW)} == 0",
            "1m",
            "critical",
            "{{ $labels.instance }} has requests and makes no step",
            "No step ended in five minutes although requests run: the engine hangs or has died. See /health "
            "and the server's log.",
        ),
        Alert(
            "FirstdiffErrors",
            f"{recorded('request_errors', f'ratio_rate{WINDOW}')} > 0.02",
            "5m",
            "critical",
            "{{ $labels.instance }} fails requests",
            "{{ $value | humanizePercentage }} of the requests end with the reason error: the server's log "
            "and the spans with error.type say which.",
        ),
        Alert(
            "FirstdiffCorruptedRequests",
            f"{increase('firstdiff_corrupted_requests', '15m')} > 0",
            "0m",
            "critical",
            "{{ $labels.instance }} computed something that is no number",
            "Logits were not finite: the weights, a kernel or the memory are not what they should be. Take "
            "it out of service and compare it with a sound replica.",
        ),
    ]


def _losses() -> list[Alert]:
    return [
        Alert(
            "FirstdiffLostLogRows",
            f"{increase('firstdiff_lost_log_rows', '15m')} > 0",
            "0m",
            "warning",
            "{{ $labels.instance }} lost rows of its log",
            "The disk is full, gone or too slow for --log-dir. A Run with lost rows gives the verdict "
            "unknown.",
        ),
        Alert(
            "FirstdiffDroppedSpans",
            f"{increase('firstdiff_dropped_spans', '15m')} > 0",
            "0m",
            "info",
            "{{ $labels.instance }} dropped spans",
            "The collector at --otlp-endpoint is down, slow or refuses: traces have holes. Answers and the "
            "token log are not affected.",
        ),
    ]
