"""A real Prometheus with our files, scraping a real server under load; promtool on all that is made for it.

Where Prometheus is not installed, Debian's package is fetched once into the cache; else all this is skipped.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from alert_cases import CASES, promtool_tests
from prometheus_binary import NotToBeHadError, Programs, find_prometheus

from firstdiff.harness.replica import Replica
from firstdiff.tracing.deploy_dashboard import WINDOW, dashboard
from firstdiff.tracing.deploy_files import deploy_files
from firstdiff.tracing.deploy_rules import alerts, recording_rules
from firstdiff.tracing.names import METRICS
from firstdiff.tracing.span_file import read_spans

LISTENING = re.compile(r'msg="Listening on" address=(127\.0\.0\.1:\d+)')
SERVE = ["--model", "tiny-random", "--metrics-dialect", "vllm", "--max-model-len", "128"]
# So little memory that sequences lose theirs, and so few places that some requests are refused.
SERVE += ["--num-blocks", "12", "--max-num-seqs", "4", "--max-num-waiting", "2"]
LOAD_S = 6.0
PREFIX = "All requests begin with the same words, so that the prefix cache finds them: "


@pytest.fixture(scope="module")
def programs() -> Programs:
    try:
        return find_prometheus()
    except NotToBeHadError as error:
        pytest.skip(f"needs Prometheus: {error}")


@dataclass
class Watched:
    """A server under load, and the Prometheus that scrapes it."""

    replica: Replica
    netloc: str
    exposition: bytes

    def api(self, path: str, **parameters: object) -> Any:
        """The data of an answer; fails with Prometheus' own words."""
        connection = HTTPConnection(self.netloc, timeout=20)
        connection.request("GET", f"/api/v1/{path}?{urlencode(parameters)}")
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def values(self, expr: str) -> list[float]:
        """The value of each series that a query gives now."""
        return [float(series["value"][1]) for series in self.api("query", query=expr)["result"]]


@pytest.fixture(scope="module")
def watched(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    with Replica(SERVE, label="watched", log_dir=folder / "server") as replica:
        target = urlsplit(replica.url).netloc
        with prometheus(programs, folder, target) as netloc:
            load(target)
            exposition = get(target, "/metrics")
            found = Watched(replica, netloc, exposition)
            # Two scrapes and evaluations after the last request.
            time.sleep(2.5)
            yield found


@contextmanager
def prometheus(programs: Programs, folder: Path, target: str) -> Iterator[str]:
    """A Prometheus on loopback with the files as made, but for scraping each second; its address."""
    for name, content in deploy_files([target]).items():
        (folder / name).write_bytes(content.replace(b'_interval: "15s"', b'_interval: "1s"'))
    log = folder / "prometheus.log"
    command = [str(programs.prometheus), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"]
    command += ["--enable-feature=exemplar-storage"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or LISTENING.search(log.read_text()) is not None)
        match = LISTENING.search(log.read_text())
        assert match, log.read_text()
        wait_until(lambda: b"Ready" in get(match[1], "/-/ready"))
        yield match[1]
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_until(true: Callable[[], bool], *, seconds: float = 20) -> None:
    for _ in range(int(seconds / 0.05)):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError(f"it did not come true in {seconds:g} s")


def get(netloc: str, path: str) -> bytes:
    connection = HTTPConnection(netloc, timeout=20)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def load(netloc: str) -> None:
    """Eight clients at a time, for some seconds: chats, completions, mistakes; some are refused."""
    end_s = time.monotonic() + LOAD_S

    def client(number: int) -> set[int]:
        statuses = set()
        for turn in range(10_000):
            if time.monotonic() > end_s:
                break
            prompt = f"{PREFIX}{number} {turn}"
            body: dict[str, object] = {"model": "tiny-random", "max_tokens": 40, "ignore_eos": True}
            path = "/v1/completions"
            if number % 2:
                path, body = (
                    "/v1/chat/completions",
                    body | {"messages": [{"role": "user", "content": prompt}]},
                )
            else:
                body["prompt"] = prompt
            if turn % 7 == 6:
                body["temperature"] = -1
            connection = HTTPConnection(netloc, timeout=20)
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            response.read()
            connection.close()
            statuses.add(response.status)
            if response.status == 429:
                time.sleep(0.05)
        return statuses

    with ThreadPoolExecutor(8) as pool:
        statuses = set().union(*pool.map(client, range(8)))
    assert statuses == {200, 400, 429}


def promtool(programs: Programs, *arguments: object, stdin: bytes | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [programs.promtool, *map(str, arguments)], input=stdin, capture_output=True, timeout=60
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def test_promtool_takes_the_files(programs: Programs, tmp_path: Path) -> None:
    for name, content in deploy_files(["127.0.0.1:8000", "[::1]:8001"]).items():
        (tmp_path / name).write_bytes(content)
    code, said = promtool(programs, "check", "config", tmp_path / "prometheus.yml")
    assert (code, "valid prometheus config" in said) == (0, True), said
    code, said = promtool(programs, "check", "rules", tmp_path / "rules.yml")
    number = len(recording_rules()) + len(alerts())
    assert (code, f"SUCCESS: {number} rules found" in said) == (0, True), said


def test_each_alert_fires_when_it_should_and_only_then(programs: Programs, tmp_path: Path) -> None:
    assert set(CASES) == {alert.name for alert in alerts()}
    (tmp_path / "rules.yml").write_bytes(deploy_files()["rules.yml"])
    tests = tmp_path / "tests.yml"
    tests.write_text(json.dumps(promtool_tests("rules.yml")))
    code, said = promtool(programs, "test", "rules", tests)
    assert (code, "SUCCESS" in said) == (0, True), said


def test_a_wrong_alert_would_be_found(programs: Programs, tmp_path: Path) -> None:
    rules = deploy_files()["rules.yml"].decode()
    wrong = rules.replace(
        "firstdiff_request_errors:ratio_rate5m > 0.02", "firstdiff_request_errors:ratio_rate5m > 0.1"
    )
    assert wrong != rules
    (tmp_path / "rules.yml").write_text(wrong)
    tests = tmp_path / "tests.yml"
    tests.write_text(json.dumps(promtool_tests("rules.yml", only="FirstdiffErrors")))
    code, said = promtool(programs, "test", "rules", tests)
    assert code != 0
    assert "FirstdiffErrors fires" in said


def test_promtool_minds_only_names_that_are_vllms(programs: Programs, watched: Watched) -> None:
    _, said = promtool(programs, "check", "metrics", stdin=watched.exposition)
    complaints = [
        line for line in said.splitlines() if not re.match(r"vllm:\w+ metric names should not", line)
    ]
    # The histogram is called so in vLLM, where dashboards look for it.
    suffix = 'iteration_tokens_total non-counter metrics should not have "_total" suffix'
    assert complaints == [f"firstdiff_{suffix}", f"vllm:{suffix}"]


def test_the_server_is_scraped_and_every_rule_is_evaluated(watched: Watched) -> None:
    (target,) = watched.api("targets")["activeTargets"]
    assert (target["health"], target["lastError"], target["labels"]["job"]) == ("up", "", "firstdiff")
    rules = [rule for group in watched.api("rules")["groups"] for rule in group["rules"]]
    assert [rule for rule in rules if rule["health"] != "ok" or rule.get("lastError")] == []
    assert {rule["name"] for rule in rules} == {
        *(rule.record for rule in recording_rules()),
        *(alert.name for alert in alerts()),
    }


def test_every_metric_has_come(watched: Watched) -> None:
    for metric in METRICS:
        series = metric.series + ("_count" if metric.kind == "histogram" else "")
        assert watched.values(series), series


@pytest.mark.parametrize("rule", recording_rules(), ids=lambda rule: rule.record)
def test_what_is_recorded_is_there(watched: Watched, rule: Any) -> None:
    for expr in (rule.expr, rule.record):
        values = watched.values(expr)
        assert values, expr
        assert all(map(math.isfinite, values)), expr


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_what_alerts_ask_is_understood(watched: Watched, alert: Any) -> None:
    watched.values(alert.expr)
    # Each thing that it looks at is there, but for those that need an hour.
    for series in re.findall(r"[\w:]*firstdiff_[\w:]+|gen_ai_\w+", alert.expr):
        assert watched.values(series), series


PANELS = [panel for panel in dashboard()["panels"] if "targets" in panel]  # type: ignore[attr-defined]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_shows_something(watched: Watched, panel: Any) -> None:
    for target in panel["targets"]:
        expr = target["expr"].replace(WINDOW, "30s").replace("$instance", ".*").replace("$model", ".*")
        assert "$" not in expr
        assert any(map(math.isfinite, watched.values(expr))), expr


def test_the_load_was_one(watched: Watched) -> None:
    """What the panels' numbers are worth: the server was full, refused, preempted, found prefixes."""
    for name in ("num_preemptions", "prefix_cache_hits", "generation_tokens", "admission_rejections"):
        assert sum(watched.values(f"firstdiff_{name}_total")) > 0, name
    (mean_s,) = watched.values(
        "firstdiff_e2e_request_latency_seconds_sum / firstdiff_e2e_request_latency_seconds_count"
    )
    phases = " + ".join(
        f"firstdiff_request_{phase}_time_seconds_sum"
        for phase in ("tokenize", "queue", "prefill", "decode", "stream")
    )
    (parts_s,) = watched.values(f"({phases}) / firstdiff_e2e_request_latency_seconds_count")
    assert parts_s == pytest.approx(mean_s, rel=1e-6)


def test_vllms_names_have_the_same_values_in_each_scrape(watched: Watched) -> None:
    for metric in METRICS:
        if not metric.in_vllm:
            continue
        suffix = "_bucket" if metric.kind == "histogram" else ""
        ours = metric.series + suffix
        theirs = ours.replace("firstdiff_", "vllm:")
        # Over all scrapes of the load, not only the last.
        differences = watched.values(f"max_over_time(abs({ours} - {theirs})[20s:1s])")
        assert differences, theirs
        assert set(differences) == {0.0}, theirs


def test_exemplars_lead_to_traces_that_are_kept(watched: Watched) -> None:
    now_s = time.time()
    kept = {span.trace_id for span in read_spans(watched.replica.log_dir)}
    for metric in METRICS:
        if not metric.has_exemplars:
            continue
        query = f"{metric.full_name}_bucket"
        found = watched.api("query_exemplars", query=query, start=now_s - 60, end=now_s)
        traces = {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}
        assert traces, query
        assert traces <= kept


def test_a_server_that_has_gone_is_noticed(watched: Watched) -> None:
    """The last test here, since it ends the server."""
    down = next(alert for alert in alerts() if alert.name == "FirstdiffTargetDown")
    assert watched.values(down.expr) == []
    watched.replica.stop()
    wait_until(lambda: watched.values(down.expr) == [0.0])
    wait_until(
        lambda: (
            [
                one["labels"]["alertname"]
                for one in watched.api("alerts")["alerts"]
                if one["state"] == "pending"
            ].count(down.name)
            == 1
        )
    )
