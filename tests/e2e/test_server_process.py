"""The server as users start it: two processes, real weights, signals and kills."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from server_process import Served, beside_progress, serving, start

from firstdiff.tracing.token_log import read_token_log


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


def wait_until(true: Callable[[], bool], *, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_greedy_answers_repeat_and_seeds_decide_samples(server: Served) -> None:
    body = {"prompt": "The quick", "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}

    def ids(**more: Any) -> list[int]:
        status, answer = server.ask(body | more)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    assert ids(temperature=0) == ids(temperature=0)
    assert ids(seed=1) == ids(seed=1)
    assert ids(seed=1) != ids(seed=2)
    assert ids() != ids()


@settings(max_examples=60, deadline=None)
@given(
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2) | st.sampled_from([5e-324, 1e-300, 1e-5, 1.1e-5, 2]),
            "top_p": st.floats(0, 1, exclude_min=True) | st.sampled_from([5e-324, 1e-300]),
            "top_k": st.sampled_from([-1, 0, 1, 2, 2047, 2048, 2049, 2**31]),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "logprobs": st.integers(0, 20),
            "ignore_eos": st.booleans(),
        },
    ),
    ids=st.lists(st.integers(0, 2047), min_size=1, max_size=40),
)
def test_any_sampling_on_the_real_model_is_answered(
    server: Served, sampling: dict[str, Any], ids: list[int]
) -> None:
    status, answer = server.ask({"prompt": ids, "max_tokens": 3} | sampling)
    assert status == 200, answer


def test_the_context_is_usable_to_its_last_token(server: Served) -> None:
    card = server.ask(path="/v1/models")[1]["data"][0]
    room = card["max_model_len"]
    assert server.ask({"prompt": [5] * (room - 1), "max_tokens": 1})[0] == 200
    status, answer = server.ask({"prompt": [5] * (room - 1), "max_tokens": 2})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_killed_core_fails_its_requests_and_health_and_loses_no_row(tmp_path: Path) -> None:
    with serving(log_dir=tmp_path) as served:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "return_token_ids": True}
        streaming = served.send(body | {"stream": True})
        stream = streaming.getresponse()
        received = stream.readline()
        assert received.startswith(b"data: {")
        whole = served.send(body)
        time.sleep(0.1)
        os.kill(served.core_pid, signal.SIGKILL)
        response = whole.getresponse()
        assert response.status == 503
        error = json.loads(response.read())["error"]
        whole.close()
        assert error["code"] == "engine_unavailable"
        assert "SIGKILL" in error["message"]
        events = [event for event in (received + stream.read()).split(b"\n\n") if event]
        streaming.close()
        assert events[-1] == b"data: [DONE]"
        assert "error" in json.loads(events[-2].removeprefix(b"data: "))
        assert served.ask({"prompt": "a"})[0] == 503
        status, health = served.ask(path="/health")
        assert (status, health["error"]["code"]) == (503, "engine_unavailable")
        assert served.ask(path="/v1/models")[0] == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
    streamed = [json.loads(event.removeprefix(b"data: "))["choices"][0]["token_ids"] for event in events[:-2]]
    rows = read_token_log(tmp_path)[1]
    assert [row.finish_reason for row in rows] == ["error", "error"]
    assert all("SIGKILL" in (row.error or "") for row in rows)
    assert list(itertools.chain(*streamed)) in [row.token_ids for row in rows]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_processes_with_code_0_and_a_whole_log(tmp_path: Path, number: int) -> None:
    with serving(log_dir=tmp_path, drain_timeout_s=0.0) as served:
        core_pid = served.core_pid
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
        connection = served.send(body)
        stream = connection.getresponse()
        assert stream.readline()
        served.process.send_signal(number)
        assert served.process.wait(20) == 0
        assert not is_alive(core_pid)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        _, stderr = served.process.communicate()
        assert beside_progress(stderr) == ""
        said = [line.split()[2] for line in stderr.splitlines()]
        assert [word for word in said if word != "compiling"] == ["loading", "reading"]
    (row,) = read_token_log(tmp_path)[1]
    assert row.finish_reason == "abort"
    assert row.token_ids


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with serving(log_dir=tmp_path) as served:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        connection = served.send(body)
        stream = connection.getresponse()
        assert stream.readline()
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: served.ask(path="/ready")[0] == 503)
        assert served.ask(path="/health") == (200, {"status": "ok"})
        late = served.send({"prompt": "a"})
        refused = late.getresponse()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert "shutting down" in json.loads(refused.read())["error"]["message"]
        late.close()
        *_, last, done, rest = stream.read().split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert served.process.wait(20) == 0
        _, stderr = served.process.communicate()
        assert "finishing 1 requests within 30 s" in stderr
    (row,) = read_token_log(tmp_path)[1]
    assert (row.finish_reason, len(row.token_ids)) == ("length", 400)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_what_runs_at_once(tmp_path: Path, second: int) -> None:
    with serving(log_dir=tmp_path, drain_timeout_s=300.0) as served:
        core_pid = served.core_pid
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 24}
        connection = served.send(body)
        time.sleep(0.3)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: served.ask(path="/ready")[0] == 503)
        served.process.send_signal(second)
        response = connection.getresponse()
        assert response.status == 503
        assert "shutting down" in json.loads(response.read())["error"]["message"]
        connection.close()
        assert served.process.wait(10) == 0
        assert not is_alive(core_pid)
    assert {row.finish_reason for row in read_token_log(tmp_path)[1]} == {"abort"}


def test_a_server_that_others_can_reach_says_so_without_a_key() -> None:
    # A spelling of 127.0.0.1 that is not taken for it: nobody else can reach this test.
    for keys, says in (((), "anybody who can reach 127.1 "), (("secret",), "")):
        process = start(host="127.1", api_keys=keys)
        assert process.stdout is not None
        assert "listening on" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
        assert says in stderr
        assert bool(beside_progress(stderr)) == bool(says)
        assert "secret" not in stderr


def test_where_numba_may_not_compile_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with serving() as served:
        assert served.ask({"prompt": "a", "max_tokens": 4})[0] == 200
        config = served.ask(path="/v1/firstdiff/identity")[1]["engine_config"]
        assert (config["attention_backend"], config["deterministic"]) == ("CpuAttention", False)
        served.process.send_signal(signal.SIGTERM)
        _, stderr = served.process.communicate(timeout=20)
        assert stderr.count("unset NUMBA_DISABLE_JIT") == 1
        assert "Traceback" not in stderr


def test_a_log_that_finds_no_room_loses_rows_and_no_answer(tmp_path: Path) -> None:
    with serving(log_dir=tmp_path) as served:
        body = {"prompt": "a", "max_tokens": 4}
        assert served.ask(body)[0] == 200
        num_rows = 1
        wait_until(lambda: len(read_token_log(tmp_path)[1]) == num_rows)
        # Its files may not grow: as where a disk is full.
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        assert [served.ask(body)[0] for _ in range(5)] == [200] * 5
        served.process.send_signal(signal.SIGTERM)
        _, stderr = served.process.communicate(timeout=20)
        assert served.process.returncode == 0
        first, last = beside_progress(stderr).splitlines()
        assert "rows are lost, and counted in the metrics" in first
        assert last.endswith("rows of the log were lost")
    assert len(read_token_log(tmp_path)[1]) == num_rows


def test_the_core_dies_with_a_killed_server() -> None:
    with serving() as served:
        core_pid = served.core_pid
        served.process.kill()
        served.process.wait(20)
        wait_until(lambda: not is_alive(core_pid))


def test_a_signal_while_starting_leaves_nothing() -> None:
    process = start()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: bool(children.read_text().split()))
    core_pid = int(children.read_text().split()[0])
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=20)
    assert stdout == ""
    assert process.returncode == 0
    assert not is_alive(core_pid)


def test_in_process_serves_the_same_answers(server: Served) -> None:
    body = {"prompt": "The quick", "max_tokens": 12, "temperature": 0}
    with serving(in_process=True) as served:
        mine, theirs = served.ask(body)[1], server.ask(body)[1]
        assert mine["choices"] == theirs["choices"]
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
