"""The files for Prometheus and Grafana: made from the table, checked in as made, whole and consistent."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from firstdiff.harness.cli import main
from firstdiff.tracing.deploy_dashboard import dashboard
from firstdiff.tracing.deploy_files import deploy_files, to_yaml
from firstdiff.tracing.deploy_queries import gauge, rate
from firstdiff.tracing.deploy_rules import alerts, recording_rules
from firstdiff.tracing.names import METRICS

CHECKED_IN = Path(__file__).resolve().parents[2] / "tracing" / "deploy"
NAMES = re.compile(r"\b(?:firstdiff|gen_ai_server)_\w+")


def known_names():
    """Every series that a server or a recording rule makes."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {m.full_name + suffix for m in METRICS for suffix in suffixes[m.kind]}


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] not in ("row", "text")]


def queries():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_files_checked_in_are_what_the_table_makes():
    made = deploy_files()
    assert {path.name: path.read_bytes() for path in CHECKED_IN.iterdir()} == made, (
        "run `firstdiff deploy --overwrite tracing/deploy`"
    )


def test_nothing_is_asked_for_that_no_server_has():
    recorded = {rule.record for rule in recording_rules()}
    for expr in [*queries(), *(rule.expr for rule in recording_rules()), *(a.expr for a in alerts())]:
        used = set(re.findall(r"instance_model:[\w:]+", expr))
        assert used <= recorded, expr
        rest = re.sub(r"instance_model:[\w:]+", "", expr)
        assert set(NAMES.findall(rest)) <= known_names(), expr
        assert used or NAMES.search(rest) or "up{" in rest, expr


def test_a_name_that_is_not_in_the_table_cannot_be_asked_for():
    with pytest.raises(KeyError):
        rate("firstdiff_tokens", by=(), window="5m")
    with pytest.raises(AssertionError):
        gauge("firstdiff_generation_tokens")


def test_every_metric_has_a_panel_and_its_definition():
    shown = " ".join(queries())
    described = " ".join(panel["description"] for panel in panels())
    for metric in METRICS:
        assert metric.series in shown, metric.full_name
        assert f"{metric.full_name}: {metric.help}" in described


def test_counters_are_never_read_as_they_stand():
    for expr in [*queries(), *(rule.expr for rule in recording_rules()), *(a.expr for a in alerts())]:
        for match in re.finditer(r"\b(firstdiff|gen_ai_server)_\w+?(_total|_bucket|_sum|_count)\b", expr):
            name = match.group()
            if name in ("firstdiff_iteration_tokens_total",):
                continue
            before = expr[: match.start()]
            assert before.endswith(("rate(", "increase(")), expr


def test_quantiles_are_of_summed_buckets():
    found = [
        expr for expr in [*queries(), *(r.expr for r in recording_rules())] if "histogram_quantile" in expr
    ]
    assert found
    for expr in found:
        assert re.match(r"histogram_quantile\(0\.\d+, sum by \(le, [^)]+\) \(rate\(\w+_bucket[{[]", expr), (
            expr
        )


def test_panels_neither_overlap_nor_share_an_id():
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_panels_ask_only_the_chosen_servers_and_name_traces_where_they_can():
    for panel in panels():
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))
        for target in panel["targets"]:
            # Each of its metrics is confined.
            assert len(NAMES.findall(target["expr"])) == target["expr"].count('instance=~"$instance"')
    shown = [
        panel["description"].split(":")[0]
        for panel in panels()
        if any(t["exemplar"] for t in panel["targets"])
    ]
    assert sorted(shown) == sorted(m.full_name for m in METRICS if m.has_exemplars)


def test_alerts_tell_what_and_what_to_do():
    assert len({alert.name for alert in alerts()}) == len(alerts())
    for alert in alerts():
        assert re.fullmatch(r"Firstdiff[A-Z]\w+", alert.name)
        assert "{{ $labels.instance }}" in alert.summary
        assert alert.description.endswith((".", "?"))
        assert "NaN" not in alert.expr


def test_yaml_is_what_other_readers_take_it_for():
    yaml = pytest.importorskip("yaml")
    value = {
        "a": ["x: y", 'q"{{ $labels.a }}', "two\n  lines\nof it"],
        "b": [{"c": 1, "d": ["e"]}, {"c": "#"}],
        "f": "é",
    }
    assert yaml.safe_load(to_yaml(value)) == value
    for name, content in deploy_files(["a:1", "[::1]:8000"]).items():
        assert (yaml.safe_load if name.endswith(".yml") else json.loads)(content)


def test_the_command_writes_the_files_for_its_targets(tmp_path, capsys):
    folder = tmp_path / "new" / "deploy"
    with pytest.raises(SystemExit) as end:
        main(["deploy", str(folder), "--target", "one:8000", "--target", "[::1]:8001"])
    assert not end.value.code
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == deploy_files(
        ["one:8000", "[::1]:8001"]
    )
    assert capsys.readouterr().out.splitlines() == [
        str(folder / name) for name in ("prometheus.yml", "rules.yml", "dashboard.json")
    ]


def test_a_file_of_somebody_else_is_left_alone(tmp_path, capsys):
    own = tmp_path / "prometheus.yml"
    own.write_text("global: {}\n")
    with pytest.raises(SystemExit) as end:
        main(["deploy", str(tmp_path)])
    assert end.value.code == 2
    assert "expected no prometheus.yml" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.yml"]
    with pytest.raises(SystemExit) as end:
        main(["deploy", str(tmp_path), "--overwrite"])
    assert not end.value.code
    assert own.read_bytes() == deploy_files()["prometheus.yml"]


@pytest.mark.parametrize(
    "target",
    [
        "",
        "host",
        "http://host:1",
        "host:0",
        "host:65536",
        "host:1/metrics",
        'a"\n:1',
        "-a:1",
        "a b:1",
        "[::1]",
        "x" * 300 + ":1",
    ],
)
def test_a_target_that_is_none_is_refused(target):
    with pytest.raises(ValueError, match="expected --target as HOST:PORT"):
        deploy_files([target])
