"""The token log of real servers: checked, replayed on sound and faulty ones, redacted, rotated, killed."""

from __future__ import annotations

import http.client
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from firstdiff.harness.cli import main
from firstdiff.harness.replica import Replica
from firstdiff.tracing.log_files import TOKENS_FILE, log_files
from firstdiff.tracing.token_log import hash_identity, read_log

TINY = ["--model", "tiny-random"]
GREEDY = {"max_tokens": 12, "temperature": 0}
BODIES: list[dict[str, Any]] = [
    {"prompt": "SECRETone def f(x):", "logprobs": 3, **GREEDY},
    {"prompt": ["SECRETtwo", "and three"], "n": 2, "max_tokens": 6, "temperature": 1.0, "seed": 5},
    {"prompt": "stop here", "stop": ["e", "SECRETstop"], "max_tokens": 40, "temperature": 0},
    {
        "prompt": "shown",
        "stop": ["e"],
        "include_stop_str_in_output": True,
        "max_tokens": 40,
        "temperature": 0,
    },
    {"prompt": [1, 5, 9, 33], "echo": True, "logprobs": 0, "max_tokens": 4, "user": "SECRETuser"},
    {"prompt": "a long one " * 30, "truncate_prompt_tokens": 8, "add_special_tokens": False, **GREEDY},
    {"prompt": "salted", "cache_salt": "SECRETsalt", "top_k": 5, "repetition_penalty": 1.2, "max_tokens": 5},
    {"prompt": "held", "guided_regex": "(SECRET|[a-f]+)x", "max_tokens": 8, "metadata": {"SECRETkey": "v"}},
    {"prompt": "x", "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 30, "temperature": 2.0},
    {"messages": [{"role": "user", "content": "SECRETchat é \u001b[31m"}], "stream": True, **GREEDY},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        **GREEDY,
    },
]


def ask(url: str, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    connection.request("POST", path, body=msgspec.json.encode(body))
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status == 200, answer
    return answer


def log(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["log", *arguments])
    return int(end.value.code or 0), capsys.readouterr().out


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with Replica(TINY, log_dir=tmp_path_factory.mktemp("sound")) as server:
        yield server


@pytest.fixture(scope="module")
def logged(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of BODIES, as a sound server wrote it, saved before anything else is asked."""
    for body in BODIES:
        ask(replica.url, body)
    saved = tmp_path_factory.mktemp("saved")
    for _ in range(200):
        if len(read_log(replica.log_dir).rows) == len(BODIES) + 3:
            break
        signal.sigtimedwait([], 0.02)
    (saved / TOKENS_FILE).write_bytes((replica.log_dir / TOKENS_FILE).read_bytes())
    return str(saved)


def test_the_log_of_a_sound_server_is_sound(logged: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = log(capsys, "validate", logged, "--tokenizer", "tiny-random")
    assert code == 0, out
    assert f"{len(BODIES) + 3} requests: 0 defects, 0 unknown" in out
    found = read_log(Path(logged))
    (server,) = found.identities
    assert server.eos_token_ids == [0, 2]
    assert server.special_tokens == {"bos_token": 1, "eos_token": 2, "pad_token": 2, "unk_token": 0}
    assert server.rng_scheme == "philox4x32-10-gumbel"
    assert {row.identity_sha256 for row in found.rows} == {hash_identity(server)}
    by_prompt = {row.asked.body: row for row in found.rows if row.asked is not None and row.asked.body}
    assert len(by_prompt) == len(BODIES), "each body once, with its first answer"
    assert all(msgspec.json.decode(body) in BODIES for body in by_prompt if body is not None)


def test_a_row_says_what_was_asked_and_told(logged: str) -> None:
    rows = read_log(Path(logged)).rows
    bodies = [msgspec.json.decode(row.asked.body) if row.asked and row.asked.body else None for row in rows]

    def row_of(index: int) -> Any:
        return rows[bodies.index(BODIES[index])]

    assert len(row_of(0).top_logprobs) == 12
    assert all(len(tops) == 3 for tops in row_of(0).top_logprobs)
    assert [tops[0][1] for tops in row_of(0).top_logprobs] == row_of(0).logprobs
    several = [row for row in rows if row.num_choices == 4]
    assert sorted((row.choice_index, row.prompt_index) for row in several) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert {row.told.usage.completion_tokens for row in several if row.told and row.told.usage} == {24}
    stopped = row_of(2)
    assert (stopped.told.finish_reason, stopped.told.stop_match) == ("stop", "e")
    assert "e" not in stopped.text
    assert row_of(3).text.endswith("e")
    assert row_of(4).asked.add_special_tokens is None
    assert row_of(4).asked.prompt_text_sha256 is None
    assert row_of(5).asked.num_truncated_tokens > 10
    assert row_of(5).asked.add_special_tokens is False
    assert row_of(6).asked.has_cache_salt
    assert row_of(9).told.usage is None, "a stream that did not ask for it"
    assert row_of(10).told.usage.completion_tokens == row_of(10).told.num_tokens


def test_a_sound_server_repeats_its_log(
    replica: Replica, logged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--free"], ["--forced"]):
        out_folder = str(tmp_path / "-".join(["run", *flags]))
        code, out = log(
            capsys, "replay", logged, replica.url, "--out", out_folder, "--concurrency", "4", *flags
        )
        assert " 0 different" in out
        assert " 0 failed" in out
        # A forced answer of what was sampled without log-probabilities tells nothing.
        assert code == (3 if flags == ["--forced"] else 0), out
    assert "moved by 0 nats at most" in out
    code, out = log(capsys, "diff", logged, str(replica.log_dir))
    assert code == 0, out


def test_a_faulty_server_is_found_by_its_log(
    logged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Replica([*TINY, "--fault", "kv-block-off-by-one"], log_dir=tmp_path / "faulty") as faulty:
        code, out = log(capsys, "replay", logged, faulty.url, "--out", str(tmp_path / "forced"))
        assert code == 1, out
        assert "note: the endpoint has other faults than the log's server" in out
        assert re.search(r"different: \S+: at token \d+ \(\d+ \".*after \"", out)
        code, out = log(capsys, "replay", logged, faulty.url, "--free", "--out", str(tmp_path / "free"))
        assert code == 1, out
        assert re.search(r"different: \S+: they part at token \d+: \d+ .* and \d+", out)
        row = read_log(Path(logged)).rows[0]
        one = ["--request", row.request_id, "--out", str(tmp_path / "one")]
        code, out = log(capsys, "replay", logged, faulty.url, *one)
        assert "1 of 1 requests replayed" in out
    code, out = log(capsys, "replay", logged, faulty.url, "--out", str(tmp_path / "gone"))
    assert code == 4


@pytest.mark.parametrize("content", ["ids", "hash"])
def test_a_redacted_log_holds_no_secret_and_is_still_of_use(
    replica: Replica, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "log"
    with Replica([*TINY, "--log-content", content], log_dir=folder) as server:
        answers = [ask(server.url, body) for body in BODIES]
    written = b"".join(path.read_bytes() for path in folder.glob("*.jsonl"))
    assert b"SECRET" not in written
    texts = [choice["text"] for choice in msgspec.json.decode(answers[0])["choices"]]
    assert texts[0]
    assert texts[0].encode() not in written
    rows = read_log(folder).rows
    assert len(rows) == len(BODIES) + 3
    assert {row.content for row in rows} == {content}
    assert (b'"token_ids":[]' in written) == (content == "hash")
    code, out = log(capsys, "validate", str(folder), "--tokenizer", "tiny-random")
    assert code == 3, out
    assert " 0 defects" in out
    code, out = log(capsys, "replay", str(folder), replica.url, "--out", str(tmp_path / "run"))
    assert code == (3 if content == "hash" else 0), out
    assert ("only digests" in out) == (content == "hash")
    code, _ = log(capsys, "show", str(folder))
    assert code == 0


def test_a_log_of_small_files_is_collected_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--log-max-bytes", str(1 << 16), "--log-max-row-bytes", str(1 << 14)]
    with Replica([*TINY, *flags], log_dir=tmp_path) as server:
        for index in range(25):
            ask(server.url, {"prompt": f"{index} " + "word " * 100, "max_tokens": 40, "ignore_eos": True})
        # What is too large is cut: this row alone would have 70 KiB.
        ask(server.url, {"prompt": "word", "ignore_eos": True, "max_tokens": 500, "logprobs": 5})
    assert len(log_files(tmp_path, TOKENS_FILE)) > 2
    assert all(path.stat().st_size <= 1 << 16 for path in log_files(tmp_path, TOKENS_FILE))
    rows = read_log(tmp_path).rows
    assert len(rows) == 26
    assert rows[-1].num_output_tokens == 500 > len(rows[-1].token_ids)
    assert {cut.field for cut in rows[-1].truncated} >= {"top_logprobs", "token_ids"}
    code, out = log(capsys, "validate", str(tmp_path), "--tokenizer", "tiny-random")
    assert code == 3, out
    assert "was cut to" in out


def test_a_killed_server_leaves_whole_rows(tmp_path: Path) -> None:
    server = Replica(TINY, log_dir=tmp_path)
    with server:
        for index in range(20):
            ask(server.url, {"prompt": f"number {index}", "max_tokens": 4})
        os.kill(server.pid, signal.SIGKILL)
    found = read_log(tmp_path)
    # Of the last ones some may have been waiting for the disk.
    assert 15 <= len(found.rows) <= 20
    assert found.damaged == found.losses == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--log-content", "all"], "expected --log-content out of full, ids, hash, got 'all'"),
        (["--log-max-bytes", "1000"], "expected --log-max-bytes 0, or in 65536.."),
        (["--log-max-row-bytes", "100"], "expected --log-max-row-bytes in 16384.."),
        (["--log-content", "ids", "--log-dir", ""], "expected --log-dir beside what is said of the log"),
    ],
)
def test_a_mistake_in_the_log_flags_is_one_line(
    flags: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [flag for flag in flags if flag not in ("--log-dir", "")]
    folder = [] if "--log-dir" in flags else ["--log-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(["serve", *TINY, *given, *folder])
    assert end.value.code == 2
    assert message in capfd.readouterr().err
