"""A Run survives its writer: killed at any moment, cut at any byte, on a full disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstdiff.tracing.records import SCHEMA_VERSION, TokenRow, encode_row
from firstdiff.tracing.store import Manifest, Run, write_atomically

NUM_KILLS = 60
PADDING = 1_000
"""Bytes of a row's request id in the kill test."""

KILLER = """
import os, random, resource, signal, sys, time
from pathlib import Path
from firstdiff.tracing.records import TokenRow
from firstdiff.tracing.store import Manifest, Run

root, num_kills, padding = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(7)

def write_until_killed(path):
    manifest = Manifest(run_id="k", label="", created_unix_ns=0, endpoint="", dialect="", model="m",
                        workload={}, workload_sha256="", identity=None, client={})
    run = Run.create(path, manifest)
    index = 0
    while True:
        for name in ("tokens", "steps"):
            run.append(name, TokenRow(request_id="x" * padding, token_index=index, token_id=index,
                                      emitted_ns=index, step_index=index, batch_size=1))
        if index % 8 == 0:
            run.write_manifest(manifest)
        index += 1

def die_inside_a_write(num_bytes):
    # At the limit write() does a part, and the next one is answered by a deadly signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

for kill in range(num_kills):
    limit_bytes, delay_s = rng.randrange(1_000, 60_000), rng.uniform(0, 0.03)
    child = os.fork()
    if child == 0:
        if kill % 2:
            die_inside_a_write(limit_bytes)
        write_until_killed(root / str(kill))
    if kill % 2 == 0:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == (signal.SIGXFSZ if kill % 2 else signal.SIGKILL), status
"""

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from firstdiff.tracing.records import TokenRow
from firstdiff.tracing.store import Run

# A file-size limit makes write() write a part and then fail, as a full disk does.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = Run.resume(Path(sys.argv[1]))
row = TokenRow(request_id="r", token_index=0, token_id=1, emitted_ns=2, step_index=3, batch_size=4)
run.append("tokens", row)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
for _ in range(5):
    try:
        run.append("tokens", row)
    except OSError as error:
        print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
run.append("tokens", row)
run.close()
"""


def manifest(**changes):
    fields = {
        "run_id": "r1",
        "label": "base",
        "created_unix_ns": 1,
        "endpoint": "http://127.0.0.1:1",
        "dialect": "firstdiff",
        "model": "m",
        "workload": {"kind": "chat", "n": 3},
        "workload_sha256": "0" * 64,
        "identity": None,
        "client": {},
    }
    return Manifest(**(fields | changes))


def token(index, request_id="r"):
    return TokenRow(
        request_id=request_id,
        token_index=index,
        token_id=index,
        emitted_ns=index,
        step_index=index,
        batch_size=1,
    )


def test_rows_come_back_in_order(tmp_path):
    with Run.create(tmp_path / "run", manifest()) as run:
        for index in range(100):
            run.append("tokens", token(index))
        assert list(run.rows("tokens", TokenRow)) == [token(index) for index in range(100)]
    opened = Run.open(tmp_path / "run")
    assert opened.manifest == manifest()
    assert list(opened.rows("tokens", TokenRow)) == [token(index) for index in range(100)]
    assert list(opened.rows("nothing", TokenRow)) == []
    assert opened.truncated == {}


def test_opening_and_reading_write_nothing(tmp_path):
    with Run.create(tmp_path, manifest()) as run:
        run.append("tokens", token(0))
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.iterdir()}
    opened = Run.open(tmp_path)
    list(opened.rows("tokens", TokenRow))
    with pytest.raises(ValueError, match="opened for reading"):
        opened.append("tokens", token(1))
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.iterdir()} == before


def test_no_run_is_overwritten(tmp_path):
    Run.create(tmp_path, manifest()).close()
    with pytest.raises(ValueError, match="holds a Run: choose another"):
        Run.create(tmp_path, manifest(label="other"))
    assert Run.open(tmp_path).manifest.label == "base"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a Run directory"),
        (b"", "expected a Firstdiff manifest"),
        (b"{", "expected a Firstdiff manifest"),
        (b"[" * 100_000, "expected a Firstdiff manifest"),
        (b'{"workload":' + b"[" * 100_000, "expected a Firstdiff manifest"),
        (b'{"run_id":"\xff"}', "expected a Firstdiff manifest"),
        (msgspec.json.encode({"schema": 1}), "expected a Firstdiff manifest"),
        (msgspec.json.encode(manifest(schema=SCHEMA_VERSION + 1)), "newer Firstdiff"),
    ],
)
def test_what_is_not_a_run_says_so(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Run.open(tmp_path)


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\x00\xff", b"null", b'{"kind":"step"}', b"[" * 50_000])
def test_a_damaged_whole_line_is_named(tmp_path, garbage):
    with Run.create(tmp_path, manifest()) as run:
        run.append("tokens", token(0))
        run.append_line("tokens", garbage)
        run.append("tokens", token(1))
        rows = run.rows("tokens", TokenRow)
        assert next(rows) == token(0)
        with pytest.raises(ValueError, match=r"expected a TokenRow in .*tokens\.jsonl line 2, got:"):
            next(rows)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.text(max_size=20), min_size=1, max_size=8), data=st.data())
def test_cut_at_any_byte_the_whole_lines_remain(tmp_path_factory, ids, data):
    path = tmp_path_factory.mktemp("cut")
    rows = [token(index, request_id) for index, request_id in enumerate(ids)]
    with Run.create(path, manifest()) as run:
        for row in rows:
            run.append("tokens", row)
    file = path / "tokens.jsonl"
    content = file.read_bytes()
    num_bytes = data.draw(st.integers(0, len(content)))
    file.write_bytes(content[:num_bytes])
    num_whole = content[:num_bytes].count(b"\n")
    unfinished = num_bytes - (content[:num_bytes].rfind(b"\n") + 1)

    run = Run.open(path)
    assert list(run.rows("tokens", TokenRow)) == rows[:num_whole]
    assert run.truncated == ({"tokens": unfinished} if unfinished else {})

    with Run.resume(path) as resumed:
        resumed.append("tokens", token(99))
    assert list(Run.open(path).rows("tokens", TokenRow)) == [*rows[:num_whole], token(99)]


def test_a_writer_killed_at_any_moment_leaves_a_readable_run(tmp_path):
    arguments = [str(tmp_path), str(NUM_KILLS), str(PADDING)]
    subprocess.run([sys.executable, "-c", KILLER, *arguments], check=True, timeout=120)
    num_opened = num_rows = num_cut = 0
    for kill in range(NUM_KILLS):
        path = tmp_path / str(kill)
        if not (path / "manifest.json").exists():
            continue
        run = Run.open(path)
        tokens = list(run.rows("tokens", TokenRow))
        steps = list(run.rows("steps", TokenRow))
        assert [row.token_index for row in tokens] == list(range(len(tokens)))
        assert [row.token_index for row in steps] == list(range(len(steps)))
        assert 0 <= len(tokens) - len(steps) <= 1
        assert all(len(row.request_id) == PADDING for row in tokens)
        with Run.resume(path) as resumed:
            resumed.append("tokens", token(len(tokens)))
        after = [row.token_index for row in Run.open(path).rows("tokens", TokenRow)]
        assert after == list(range(len(tokens) + 1))
        num_opened += 1
        num_rows += len(tokens)
        num_cut += bool(run.truncated)
        shutil.rmtree(path)
    # Kills must have hit Runs at work, and the ones by size a write, else this shows nothing.
    assert num_opened > NUM_KILLS // 2
    assert num_rows >= NUM_KILLS
    assert num_cut > NUM_KILLS // 4


def test_a_full_disk_loses_rows_and_damages_none(tmp_path):
    Run.create(tmp_path, manifest()).close()
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    line_bytes = (
        len(
            encode_row(
                TokenRow(request_id="r", token_index=0, token_id=1, emitted_ns=2, step_index=3, batch_size=4)
            )
        )
        + 1
    )
    num_fitting = 250 // line_bytes
    assert result.stdout.split() == ["OSError"] * (6 - num_fitting)
    run = Run.open(tmp_path)
    assert len(list(run.rows("tokens", TokenRow))) == num_fitting + 1
    assert run.truncated == {}


def test_two_writers_of_one_file_are_refused(tmp_path):
    with Run.create(tmp_path, manifest()) as run:
        run.append("tokens", token(0))
        with Run.resume(tmp_path) as other:
            other.append("steps", token(0))
            with pytest.raises(ValueError, match="being written"):
                other.append("tokens", token(1))
    with Run.resume(tmp_path) as after:
        after.append("tokens", token(1))
    assert list(Run.open(tmp_path).rows("tokens", TokenRow)) == [token(0), token(1)]


def test_the_manifest_is_replaced_whole(tmp_path):
    with Run.create(tmp_path, manifest()) as run:
        for index in range(20):
            run.write_manifest(manifest(client={"round": index}, complete=index == 19))
            assert Run.open(tmp_path).manifest.client == {"round": index}
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


def test_a_failed_replacement_keeps_the_old_file(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
