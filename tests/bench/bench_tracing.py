"""What remembering costs: tokens a second and gaps between tokens with everything on against everything off.

`--overhead`: two servers of one model, asked in turns (ABBA). `on` keeps its token log, sends spans to a
collector (this process, which only reads them), feeds its metrics and is scraped each second; `off` has a
ledger that forgets everything. `--folds`: rows made up as fast as they can be folded, no model: what a
request costs in spans, log and metrics, and whether the folds keep up with 1,000 requests a second on one
core with flat memory. Without either, both.

Usage: `make bench-tracing ARGS='--model smollm2-135m --blocks 8'`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from firstdiff.harness.driver import Side, drive_interleaved
from firstdiff.harness.runs import new_run
from firstdiff.harness.sessions import Target
from firstdiff.harness.workload import WorkloadSpec, make_cases
from firstdiff.regression.stats import block_estimate, quantile_ratio_range
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import RequestRow

TAIL = 0.05
NUM_TOKENS = 128
FOLD_SECONDS = 600
RATE_PER_S = 1000
FORGETFUL = """
import sys
from firstdiff.engine import server, server_ledger
from firstdiff.harness import cli
class Forgetful(server_ledger.ServerLedger):
    def begin(self, *_, **__): pass
    def feed(self, rows): pass
    def end(self, *_, **__): pass
    def end_http(self, row): pass
    def forget(self, request_id): pass
server.ServerLedger = Forgetful
cli.main(sys.argv[1:])
"""


class Sink(BaseHTTPRequestHandler):
    """A collector that reads and says yes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def sink() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """A server process; its URL."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                yield line[line.index("http://") :].split()[0].rstrip("/,;:")
                return
        raise RuntimeError("the server ended before it was ready")
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def scraping(url: str) -> Iterator[None]:
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
                response.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def overhead(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each concurrency: ratios on / off with their ranges."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        common = ["serve", "--model", arguments.model, "--dtype", arguments.dtype, "--port", "0"]
        common += ["--threads", str(arguments.threads), "--stop-on-stdin-end"]
        collector = stack.enter_context(sink())
        remembering = ["--log-dir", str(folder / "log"), "--otlp-endpoint", collector]
        on = stack.enter_context(
            serving([sys.executable, "-m", "firstdiff.harness.cli", *common, *remembering])
        )
        off = stack.enter_context(serving([sys.executable, "-c", FORGETFUL, *common]))
        stack.enter_context(scraping(on))
        found = []
        for concurrency in arguments.concurrency:
            rows = asyncio.run(ask(on, off, folder / f"c{concurrency}", concurrency, arguments))
            found.append({"concurrency": concurrency, **compared(rows)})
            print(json.dumps(found[-1]), flush=True)
        return found


async def ask(
    on: str, off: str, folder: Path, concurrency: int, arguments: argparse.Namespace
) -> dict[str, list[RequestRow]]:
    """The rows of both sides, asked in turns."""
    clock = SystemClock()
    spec = WorkloadSpec(
        kind="tokens",
        num_cases=concurrency * arguments.blocks,
        prompt_tokens=NUM_TOKENS,
        max_tokens=NUM_TOKENS,
        vocab_size=arguments.vocab_size,
        ignore_eos=True,
        logprobs=None,
        concurrency=concurrency,
    )
    cases = make_cases(spec)
    sides = []
    for label, url in (("on", on), ("off", off)):
        endpoint = await Target(url=url, label=label).connect(clock)
        run = new_run(folder / label, label=label, endpoint=endpoint, workload={}, cases=cases, clock=clock)
        sides.append(Side(label, endpoint, run))
    await drive_interleaved(
        sides,
        cases,
        clock=clock,
        order="abba",
        concurrency=concurrency,
        block_size=concurrency,
        warmup=cases[:concurrency],
    )
    for side in sides:
        await side.endpoint.close()  # type: ignore[attr-defined]
        side.run.close()
    return {side.label: list(side.run.rows("requests", RequestRow)) for side in sides}


def compared(rows: dict[str, list[RequestRow]]) -> dict[str, Any]:
    blocks: dict[str, dict[int, list[RequestRow]]] = {}
    for label, own in rows.items():
        assert all(row.outcome == "ok" for row in own), own[0].error
        by_block: dict[int, list[RequestRow]] = defaultdict(list)
        for row in own:
            by_block[row.block_index].append(row)
        blocks[label] = by_block
    logs, speeds = [], {label: [] for label in rows}
    for index in blocks["on"]:
        speed = {}
        for label in rows:
            own = blocks[label][index]
            wall_s = (max(row.finished_ns for row in own) - min(row.sent_ns for row in own)) / 1e9
            speed[label] = len(own) * NUM_TOKENS / wall_s
            speeds[label].append(speed[label])
        logs.append(math.log(speed["on"] / speed["off"]))
    estimate = block_estimate(logs, list(blocks["on"]), min_values=4, min_blocks=4)
    gaps: dict[str, dict[int, list[float]]] = {
        label: {
            index: [
                later - earlier
                for row in own
                for earlier, later in zip(row.chunk_received_ns, row.chunk_received_ns[1:], strict=False)
            ]
            for index, own in by_block.items()
        }
        for label, by_block in blocks.items()
    }
    tail = quantile_ratio_range(gaps["off"], gaps["on"], 0.99, tail=TAIL, seed=(0,), num_resamples=1000)
    found: dict[str, Any] = {
        f"tokens_s_{label}": round(sorted(values)[len(values) // 2], 1) for label, values in speeds.items()
    }
    if estimate is not None:
        low, high = estimate.bound(TAIL)
        found["throughput_change"] = [round(math.expm1(value), 4) for value in (low, estimate.value, high)]
    if tail is not None:
        found["p99_itl_change"] = [round(math.expm1(value), 4) for value in tail]
    return found | {"blocks": len(logs)}


def folds(num_seconds: int) -> dict[str, Any]:
    """Fold `num_seconds` worth of 1,000 requests a second of 20 tokens each: what each fold takes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
    from ledger_rows import STAMPS, engine_row, http_row, identity, step_row, token_rows
    from prometheus_client import CollectorRegistry

    from firstdiff.tracing.log_content import encode_log_row
    from firstdiff.tracing.metrics import MetricFold
    from firstdiff.tracing.otlp_json import encode_traces
    from firstdiff.tracing.request_spans import answer_spans, http_span
    from firstdiff.tracing.token_log import TokenLogFold

    num_tokens = 20
    metric_fold = MetricFold(CollectorRegistry(), model_name="m")
    metric_fold.feed(identity())
    token_fold = TokenLogFold()
    spent: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, int] = defaultdict(int)
    memory = []

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = call()
        spent[name] += time.perf_counter() - started_s
        return result

    def feed_metrics(rows: list[Any], request_id: str) -> None:
        metric_fold.begin(request_id, num_prompt_tokens=3, trace_id=STAMPS.trace_id)
        for row in rows:
            metric_fold.feed(row)

    def feed_log(rows: list[Any], request_id: str) -> Any:
        for row in rows:
            token_fold.feed(row)
        stamps = msgspec.structs.replace(STAMPS, request_id=request_id)
        return token_fold.end(stamps, text="text", flushed_ns=10**6, identity_sha256="s")

    num_requests = num_seconds * RATE_PER_S
    for number in range(num_requests):
        request_id = f"r{number}"
        rows = [*token_rows(num_tokens, request_id), engine_row(num_tokens, request_id), step_row(number)]
        timed("metrics", lambda rows=rows, request_id=request_id: feed_metrics(rows, request_id))
        row = timed("log", lambda rows=rows, request_id=request_id: feed_log(rows, request_id))
        timed("metrics", lambda row=row: metric_fold.observe_end(row))
        line = timed("log", lambda row=row: encode_log_row(row))
        spans = timed("spans", lambda row=row: [http_span(http_row()), *answer_spans(row, model="m")])
        sent = timed("spans", lambda spans=spans: encode_traces(spans))
        num_bytes["log"] += len(line)
        num_bytes["spans"] += len(sent)
        if (number + 1) % max(1, num_requests // 10) == 0:
            memory.append(_resident_bytes())
    total_s = sum(spent.values())
    return {
        "requests": num_requests,
        "tokens_a_request": num_tokens,
        "us_a_request": {name: round(1e6 * value / num_requests, 1) for name, value in spent.items()},
        "bytes_a_request": {name: round(value / num_requests) for name, value in num_bytes.items()},
        "requests_a_second_on_one_core": round(num_requests / total_s),
        "memory_mib_by_tenths": [round(value / 2**20, 1) for value in memory],
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--folds", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--blocks", type=int, default=8, help="Pairs of turns at each concurrency.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=int, default=FOLD_SECONDS, help="Worth of rows for --folds.")
    arguments = parser.parse_args()
    both = not (arguments.overhead or arguments.folds)
    if arguments.folds or both:
        print(json.dumps(folds(arguments.seconds)), flush=True)
    if arguments.overhead or both:
        overhead(arguments)


if __name__ == "__main__":
    main()
