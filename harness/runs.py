"""Making a Run for an endpoint and a workload: its name, its manifest, its cases.

Owns: run ids and the client's part of the manifest. Refuses to know: pacing, verdicts.
Invariants: a run id is unique to side and moment, short and printable, since it begins every request id;
the manifest's workload fields make the same cases again.

Usage: `run = new_run(path, label="base", endpoint=endpoint, workload=spec_fields, cases=cases, clock=clock)`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from firstdiff.harness.client_health import machine_summary
from firstdiff.harness.endpoint import HttpEndpoint
from firstdiff.harness.workload import workload_sha256
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import Request
from firstdiff.tracing.store import Manifest, Run

_MAX_LABEL_CHARS = 24


def new_run_id(label: str, *, unix_ns: int) -> str:
    """`<label>-<UTC time>-<microseconds in hex>`: sorts by time within a label."""
    moment = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    short = re.sub(r"[^A-Za-z0-9_.]+", "-", label)[:_MAX_LABEL_CHARS].strip("-") or "run"
    return f"{short}-{moment:%Y%m%d-%H%M%S}-{unix_ns % 10**9 // 1000:05x}"


def new_run(
    path: Path,
    *,
    label: str,
    endpoint: HttpEndpoint,
    workload: dict[str, Any],
    cases: Sequence[Request],
    clock: Clock,
) -> Run:
    """Create the Run at `path`; ValueError when one is there already.

    `workload` is what made `cases`, as plain fields.
    """
    created_unix_ns = clock.now_unix_ns()
    manifest = Manifest(
        run_id=new_run_id(label, unix_ns=created_unix_ns),
        label=label,
        created_unix_ns=created_unix_ns,
        endpoint=endpoint.url,
        dialect=endpoint.dialect.name,
        model=endpoint.model,
        workload=workload,
        workload_sha256=workload_sha256(cases),
        identity=endpoint.identity,
        client={"firstdiff": importlib.metadata.version("firstdiff"), **machine_summary()},
    )
    return Run.create(path, manifest)
