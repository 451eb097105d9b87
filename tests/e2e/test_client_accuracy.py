"""What the client measures is what the server did, also at many streams.

Truth and measurement share the machine's monotonic clock. The bounds are several times what a quiet
machine shows, since tests run on busy ones too; a client that stamps after parsing breaks them.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

from firstdiff.harness.driver import drive
from firstdiff.harness.endpoint import HttpEndpoint
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Request, RequestRow
from firstdiff.tracing.store import Manifest, Run

SERVER = Path(__file__).with_name("truth_server.py")


def measure(
    path: Path, *, num_streams: int, num_requests: int, num_tokens: int
) -> tuple[list[RequestRow], float, Run]:
    """Rows of a closed loop against the truth server, and the client's CPU seconds."""
    manifest = Manifest(
        run_id="accuracy", label="accuracy", created_unix_ns=0, endpoint="", dialect="openai", model="m",
        workload={}, workload_sha256="", identity=None, client={},
    )  # fmt: skip
    cases = [Request(case_id=f"case-{index}", prompt="x") for index in range(num_requests)]
    command = [sys.executable, str(SERVER), "0.1", "0.02", str(num_tokens)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        Run.create(path, manifest) as run,
    ):
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"

        async def work() -> None:
            endpoint = HttpEndpoint(url, model="m")
            await drive(endpoint, cases, run, clock=SystemClock(), concurrency=num_streams)
            await endpoint.close()

        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            asyncio.run(work())
        finally:
            server.kill()
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return list(run.rows("requests", RequestRow)), cpu_s, run


def errors_ms(rows: list[RequestRow]) -> tuple[list[float], list[float], list[float]]:
    """By request: measured minus true TTFT, mean gap and (all together) how late each read was stamped."""
    ttft, gap, late = [], [], []
    for row in rows:
        arrived_ns, *written_ns = (int(word) for word in row.text.split())
        stamps = row.chunk_received_ns
        assert len(stamps) == len(written_ns)
        ttft.append((stamps[0] - row.sent_ns - (written_ns[0] - arrived_ns)) / 1e6)
        steps = len(stamps) - 1
        gap.append(((stamps[-1] - stamps[0]) - (written_ns[-1] - written_ns[0])) / steps / 1e6)
        late += [(stamp - truth) / 1e6 for stamp, truth in zip(stamps, written_ns, strict=True)]
    return ttft, gap, late


def test_fifty_streams_are_measured_truly(tmp_path: Path) -> None:
    rows, cpu_s, run = measure(tmp_path / "run", num_streams=50, num_requests=200, num_tokens=16)
    assert {row.outcome for row in rows} == {"ok"}
    ttft, gap, late = errors_ms(rows)
    assert min(late) > 0, "a stamp before its write"
    assert median(ttft) < 10
    assert abs(median(gap)) < 0.5
    assert median(late) < 5
    assert cpu_s / len(rows) < 0.02
    assert run.manifest.client["loop_lag_p50_ns"] < 20e6
