"""The files that put our servers under Prometheus and Grafana.

Owns: which files there are, their format. Refuses to know: what rules and panels say, disks. Invariants: the
same table gives the same bytes; a target is checked before it stands in a file.

Usage: `files = deploy_files(["127.0.0.1:8000"])`, then write each under its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from firstdiff.tracing.deploy_dashboard import dashboard
from firstdiff.tracing.deploy_rules import JOB, Alert, alerts, recording_rules

DEFAULT_TARGET = "127.0.0.1:8000"
RULES_FILE = "rules.yml"
_TARGET = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})", re.ASCII)
_HEADER = "# Made by `firstdiff deploy`.\n"
_SCRAPE_HEADER = (
    _HEADER + "# prometheus --config.file=prometheus.yml --enable-feature=exemplar-storage\n"
    "# (exemplars lead from a latency to a trace; from version 2.26 on)\n"
)

Plain = str | int | Mapping[str, "Plain"] | Sequence["Plain"]


def deploy_files(targets: Sequence[str] = (DEFAULT_TARGET,)) -> dict[str, bytes]:
    """Each file's content by its name; ValueError for a target that is no HOST:PORT."""
    for target in targets:
        _check_target(target)
    scrape: Plain = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [RULES_FILE],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}]}],
    }
    recordings = [{"record": rule.record, "expr": rule.expr} for rule in recording_rules()]
    groups: Plain = {
        "groups": [
            {"name": "firstdiff-recorded", "rules": recordings},
            {"name": "firstdiff-alerts", "rules": [_alert(alert) for alert in alerts()]},
        ]
    }
    return {
        "prometheus.yml": (_SCRAPE_HEADER + to_yaml(scrape)).encode(),
        RULES_FILE: (_HEADER + to_yaml(groups)).encode(),
        "dashboard.json": (json.dumps(dashboard(), indent=2) + "\n").encode(),
    }


def to_yaml(value: Plain) -> str:
    """`value` as YAML that reads well: strings in double quotes as in JSON, longer ones as blocks."""
    return "\n".join(_lines(value)) + "\n"


def _alert(alert: Alert) -> Plain:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }


def _lines(value: Plain) -> list[str]:
    lines: list[str] = []
    if isinstance(value, str) and "\n" in value:
        return ["|-", *(f"  {line}" for line in value.split("\n"))]
    if isinstance(value, str | int):
        return [json.dumps(value)]
    if isinstance(value, Mapping):
        for key, inner in value.items():
            first, *rest = _lines(inner)
            if isinstance(inner, str | int):
                lines += [f"{key}: {first}", *rest]
            else:
                lines += [f"{key}:", *(f"  {line}" for line in (first, *rest))]
        return lines
    for inner in value:
        first, *rest = _lines(inner)
        lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return lines


def _check_target(target: str) -> None:
    match = _TARGET.fullmatch(target)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise ValueError(f"expected --target as HOST:PORT of a server, without http://, got {target[:200]!r}")
