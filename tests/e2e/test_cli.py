"""The command line: commands end to end on a small model, mistakes as one line and exit code 2."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_server import FakeServer, chat_events, chunked, http
from server_process import beside_progress

from firstdiff.engine.faults import FAULTS
from firstdiff.harness.dialect import DIALECTS
from firstdiff.harness.replica import Replica
from firstdiff.tracing.records import RequestRow
from firstdiff.tracing.store import Run
from firstdiff.tracing.token_log import read_token_log

SMALL = ["--workload", "text", "--cases", "6", "--max-tokens", "8", "--concurrency", "2"]
CHAT = "/v1/chat/completions"
MODELS = {"/v1/models": [http(b'{"data": [{"id": "m"}]}')]}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with Replica(["--model", "tiny-random"], label="tiny") as replica:
        yield replica


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument"),
        (["run", "http://x", "--no-such-flag"], "No such option"),
        (["run", "nonsense"], "expected a URL like http://127.0.0.1:8000, got 'nonsense'"),
        (["run", "http://x", "--cases", "0"], "expected num_cases in 1..1e+06, got 0"),
        (["run", "http://x", "--cases", "many"], "'--cases'"),
        (["run", "http://x", "--logprobs", "21"], "'--logprobs'"),
        (["run", "http://x", "--rate", "-1"], "expected a rate above 0"),
        (["run", "http://x", "--resume"], "expected --out with --resume"),
        (["run", "http://x", "--dialect", "klingon"], "expected a dialect out of"),
        (["run", "http://x", "--workload", "prose"], "expected --workload out of chat, text, copy, tokens, "),
        (["run", "http://x", "--workload", "file"], "got 'file'"),
        (["run", "http://x", "--log-dir", "/no/such"], "expected the server's log folder for --log-dir"),
        (["run", "http://x", "--out", "/dev/null/r"], "expected a folder at /dev/null for --out /dev/null/r"),
        (["run", "http://x", "--file", "f.jsonl", "--cases", "7"], "expected no --cases here"),
        (["run", "http://x", "--file", "f.jsonl", "--workload", "chat"], "expected no --workload here"),
        (["run", "http://x", "--file", "f.jsonl", "--seed", "0"], "expected no --seed here"),
        (["run", "http://x", "--prompt-tokens", "128"], "expected no --prompt-tokens here"),
        (["run", "http://x", "--workload", "copy", "--vocab-size", "9"], "expected no --vocab-size here"),
        (["run", "http://me:pass-1234@x"], "expected a URL without user name and password"),
        (["run", "http://me:pass-1234@x:p/v1"], "expected a URL without user name and password"),
        (["compare", "http://x", "http://x", "--prompt-tokens", "9"], "expected no --prompt-tokens here"),
        (["compare", "http://x", "http://x", "--report", "/no/such/x.md"], "expected a folder at /no/such"),
        (["compare", "http://x", "http://x", "--report", "/"], "expected a file to write for --report"),
        (["compare", "http://x", "http://x", "--out", "/dev/null"], "expected a folder at /dev/null"),
        (["compare", "http://x", "http://x", "--floor", "nowhere"], "expected a Run directory"),
        (["compare", "http://me:pass-1234@x", "http://x"], "expected a URL without user name and password"),
        (["eval", "http://x", "--out", "/dev/null/r"], "expected a folder at /dev/null"),
        (["demo", "--fault", "x"], "expected a fault out of"),
        (["demo", "--model", "nope"], "expected --model to be one of"),
        (["demo", "--model", "tiny-random", "--cases", "-1"], "expected num_cases"),
        (["demo", "--model", "tiny-random", "--out", "/dev/null"], "expected a folder at /dev/null"),
        (["compare", "a"], "Missing argument"),
        (["compare", "a", "b", "--format", "html"], "expected --format out of text, markdown, json, got"),
        (["compare", "nowhere", "nowhere"], "expected a Run directory"),
        (["compare", "http://x", "nowhere"], "expected two Run directories or two URLs"),
        (["serve"], "Missing option '--model'"),
        (["serve", "--model", "tiny-random", "--fault", "x"], "expected a fault out of"),
        (["serve", "--model", "no/such-model-at-all"], "no/such-model-at-all"),
        (["serve", "--model", "tiny-random", "--threads", "-1"], "expected --threads in 0..1024, got -1"),
        (
            ["serve", "--model", "tiny-random", "--dtype", "fp16"],
            "expected --dtype out of fp32, bf16, got 'fp16'",
        ),
        (["model", "pull", "gpt-9"], "gpt-9"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(firstdiff: Command, arguments: list[str], error: str) -> None:
    code, out, err = firstdiff(*arguments)
    assert code == 2, err
    assert error in err
    assert "Traceback" not in err
    assert "pass-1234" not in err
    assert out == ""
    assert beside_progress(err).startswith("firstdiff")
    assert beside_progress(err).count("\n") == 1, err


@pytest.mark.parametrize(
    "option",
    [
        *("--workload chat", "--file f", "--cases 32", "--max-tokens 48", "--seed 0", "--temperature 0"),
        *("--sampling-seed 1", "--logprobs 5", "--ignore-eos", "--prompt-tokens 128", "--vocab-size 0"),
        *("--concurrency 4", "--repeats 2", "--out d", "--model m", "--dialect vllm", "--api-key k"),
        "--timeout 600",
    ],
)
def test_what_runs_have_no_use_for_is_refused_by_name(firstdiff: Command, option: str) -> None:
    code, out, err = firstdiff("compare", "nowhere", "nowhere", *option.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"expected no {option.split()[0]} here" in err


def test_the_version_is_told(firstdiff: Command) -> None:
    assert firstdiff("--version") == (0, f"firstdiff {importlib.metadata.version('firstdiff')}\n", "")


def test_nothing_asked_is_help_and_exit_2(firstdiff: Command) -> None:
    code, out, err = firstdiff("model")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: firstdiff model [OPTIONS] COMMAND")


def test_help_names_the_choices(firstdiff: Command) -> None:
    for command in ("serve", "demo"):
        code, out, _ = firstdiff(command, "--help")
        assert code == 0
        assert f"--fault <{'|'.join(FAULTS)}>" in out
    for command in ("run", "compare", "eval"):
        assert f"--dialect <{'|'.join(DIALECTS)}>" in firstdiff(command, "--help")[1]
    assert "--dtype <fp32|bf16>" in firstdiff("serve", "--help")[1]


def test_a_port_in_use_is_named(firstdiff: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = firstdiff("serve", "--model", "tiny-random", "--port", port)
    assert code == 2
    assert str(port) in err


def test_nobody_there_is_exit_4(firstdiff: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _, err = firstdiff("run", f"http://127.0.0.1:{port}")
    assert (code, err.count("\n")) == (4, 1)
    assert f"cannot connect to 127.0.0.1:{port}" in err


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from firstdiff.harness import cli\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'zmq', 'scipy', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "cli.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("serve", "model", "run", "compare", "eval", "demo", "trace", "jaeger", "log", "deploy"):
        assert f"\n  {command} " in done.stdout


def test_run_fills_a_run(firstdiff: Command, replica: Replica, tmp_path: Path) -> None:
    path = tmp_path / "base"
    arguments = ["run", replica.url, "--out", path, "--label", "base", *SMALL, "--log-dir", replica.log_dir]
    code, out, err = firstdiff(*arguments)
    assert (code, out) == (0, f"{path}: 6 of 6 requests ok\n")
    assert "running base: 6 of 6" in err
    run = Run.open(path)
    assert run.manifest.complete
    assert (run.manifest.dialect, run.manifest.model) == ("firstdiff", "tiny-random")
    assert len(read_token_log(path)[1]) == len(list(run.rows("requests", RequestRow))) == 6

    code, _, err = firstdiff(*arguments)
    assert code == 2
    assert "which holds a Run" in err
    assert firstdiff(*arguments, "--resume", "--repeats", "2")[1] == f"{path}: 12 of 12 requests ok\n"


def test_run_with_random_tokens_asks_for_the_vocabulary(
    firstdiff: Command, replica: Replica, tmp_path: Path
) -> None:
    arguments = ["--workload", "tokens", "--prompt-tokens", "9", "--cases", "2", "--max-tokens", "3"]
    code, _, err = firstdiff("run", replica.url, "--out", tmp_path / "r", *arguments, "--rate", "50")
    assert code == 0, err
    run = Run.open(tmp_path / "r")
    assert run.manifest.workload["vocab_size"] == run.manifest.identity.vocab_size
    assert all(len(row.prompt_token_ids) == 9 for row in run.rows("requests", RequestRow))


def test_failures_are_exit_4_and_kept(firstdiff: Command, tmp_path: Path) -> None:
    with FakeServer(MODELS | {CHAT: [http(b'{"error": "no memory"}', status=500)]}) as server:
        code, out, err = firstdiff("run", server.url, "--out", tmp_path / "r", "--cases", "3")
    assert (code, out) == (4, f"{tmp_path / 'r'}: 0 of 3 requests ok\n")
    assert "first failure: case chat-00000, failed: status 500: no memory" in err
    assert {row.status for row in Run.open(tmp_path / "r").rows("requests", RequestRow)} == {500}


def test_a_full_disk_is_exit_4_and_the_run_goes_on_later(firstdiff: Command, tmp_path: Path) -> None:
    path = tmp_path / "r"
    arguments = ["--out", path, "--cases", "40", "--warmup", "0"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FakeServer(MODELS | {CHAT: chunked(chat_events(["yes"]))}) as server:
        # A file that may not grow further, as where a disk is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            code, out, err = firstdiff("run", server.url, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (code, out) == (4, "")
        (said,) = [line for line in err.splitlines() if not line.startswith("running")]
        assert re.match(rf"firstdiff: expected room for {path}/(requests|spans)\.jsonl, got: ", said)
        assert firstdiff("run", server.url, *arguments, "--resume")[1] == f"{path}: 40 of 40 requests ok\n"


def test_nothing_foreign_steers_the_terminal(firstdiff: Command, tmp_path: Path) -> None:
    said = json.dumps({"error": "\x1b[2J\x1b]0;owned\x07\r\nPASS\x9b1m\u202e"}).encode()
    with FakeServer(MODELS | {CHAT: [http(said, status=500)]}) as server:
        arguments = ["run", server.url, "--out", tmp_path / "r", "--cases", "1", "--warmup", "0"]
        code, out, err = firstdiff(*arguments, "--label", "\x1b[31mPASS\r")
    assert code == 4
    assert r"status 500: \x1b[2J\x1b]0;owned\x07\r\nPASS\x9b1m\u202e" in err
    assert r"running \x1b[31mPASS\r: 1 of 1" in err
    assert all(char.isprintable() or char == "\n" for char in out + err)

    listing = {"/v1/models": [http(json.dumps({"data": [{"id": "\x1b[2Jm\n"}]}).encode())]}
    with FakeServer(listing) as server:
        code, out, err = firstdiff("run", server.url, "--model", "m")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert r"\x1b[2Jm\n" in err


def test_an_evaluation_without_any_answer_is_exit_4(firstdiff: Command, tmp_path: Path) -> None:
    failing = [http(b'{"error": "no\\n\\u001b[2Jmemory"}', status=500)]
    with FakeServer(MODELS | {CHAT: failing, "/v1/completions": failing}) as server:
        code, out, err = firstdiff("eval", server.url, "--out", tmp_path / "r", "--limit", "12")
    assert code == 4, err
    assert r"failed: status 500: no\n\x1b[2Jmemory" in out
    assert out.count("\n") == 2
    assert {row.outcome for row in Run.open(tmp_path / "r").rows("requests", RequestRow)} == {"failed"}


def test_a_log_of_another_server_is_said(firstdiff: Command, replica: Replica, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    arguments = ["run", replica.url, *SMALL, "--log-dir", tmp_path / "other"]
    code, out, err = firstdiff(*arguments, "--out", tmp_path / "r")
    assert (code, out) == (0, f"{tmp_path / 'r'}: 6 of 6 requests ok\n")
    assert f"expected the rows of 6 answered requests in {tmp_path / 'other'}, got 0" in err
    assert not (tmp_path / "r" / "tokens.jsonl").exists()


def test_a_file_is_asked_whole(firstdiff: Command, tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text("".join(f'{{"messages": [{{"role": "user", "content": "{n}"}}]}}\n' for n in range(40)))
    with FakeServer(MODELS | {CHAT: chunked(chat_events(["yes"]))}) as server:
        code, out, _ = firstdiff("run", server.url, "--file", file, "--out", tmp_path / "r")
    assert (code, out) == (0, f"{tmp_path / 'r'}: 40 of 40 requests ok\n")
    assert Run.open(tmp_path / "r").manifest.workload["num_cases"] == 40


def test_runs_of_one_server_pass(firstdiff: Command, replica: Replica, tmp_path: Path) -> None:
    for label in ("base", "twin"):
        arguments = ["--out", tmp_path / label, "--label", label, *SMALL, "--log-dir", replica.log_dir]
        assert firstdiff("run", replica.url, *arguments)[0] == 0
    report = tmp_path / "report.json"
    sides = [tmp_path / "base", tmp_path / "twin"]
    code, out, err = firstdiff(
        "compare", *sides, "--latency-margin", "10", "--format", "json", "--report", report
    )
    verdict = json.loads(out)
    assert verdict == json.loads(report.read_text())
    assert code == {"pass": 0, "fail": 1, "unknown": 3, "invalid": 4}[verdict["status"]], err
    assert "fail" not in {finding["status"] for finding in verdict["findings"] if finding["part"] == "tokens"}
    assert firstdiff("compare", *sides, "--alpha", "7")[0] == 2


def test_comparing_urls_finds_other_tokens(firstdiff: Command, tmp_path: Path) -> None:
    good, bad = (MODELS | {CHAT: chunked(chat_events(["one ", word, "three"]))} for word in ("two ", "2 "))
    with FakeServer(good) as base, FakeServer(bad) as candidate:
        code, out, err = firstdiff(
            "compare", base.url, candidate.url, "--out", tmp_path, "--cases", "20", "--report", tmp_path / "r"
        )
    verdict = json.loads((tmp_path / "candidate" / "verdict.json").read_bytes())
    tokens = [finding["status"] for finding in verdict["findings"] if finding["part"] == "tokens"]
    assert "fail" in tokens, out + err
    # On a busy machine this client may be late, which makes the whole invalid.
    assert (code, verdict["status"]) in ((1, "fail"), (4, "invalid"))
    assert (tmp_path / "r").read_text() == out
    for label in ("base", "candidate"):
        rows = list(Run.open(tmp_path / label).rows("requests", RequestRow))
        assert len(rows) == 40
        assert {row.repeat_index for row in rows} == {0, 1}


def test_an_interrupted_run_is_kept_and_says_so(replica: Replica, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "firstdiff.harness.cli",
        "run",
        replica.url,
        "--out",
        str(tmp_path / "r"),
    ]
    command += ["--workload", "text", "--cases", "5000", "--max-tokens", "4", "--warmup", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        rows = tmp_path / "r" / "requests.jsonl"
        while process.poll() is None and not (rows.exists() and rows.stat().st_size):
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    run = Run.open(tmp_path / "r")
    assert not run.manifest.complete
    assert list(run.rows("requests", RequestRow))
