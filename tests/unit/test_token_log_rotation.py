"""Log files that grow into numbered ones are one log, also while they are written and after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import http_row, identity, log_row, step_row
from synthetic_runs import Workload, make_rows, write_run

from firstdiff.harness.replica import collect_rows
from firstdiff.tracing.lines import LineFile
from firstdiff.tracing.log_content import with_digests
from firstdiff.tracing.log_files import HTTP_FILE, STEPS_FILE, TOKENS_FILE, LogFile, log_files, read_log_lines
from firstdiff.tracing.records import encode_row
from firstdiff.tracing.store import Run
from firstdiff.tracing.token_log import LogLimits, TokenLogWriter, read_log, read_token_log

MAX_BYTES = 4000


def ids_of(path):
    return [row.request_id for row in read_log(path).rows]


def test_numbered_files_are_read_in_order_each_with_its_identity(tmp_path):
    writer = TokenLogWriter(tmp_path, identity(), LogLimits(max_file_bytes=MAX_BYTES))
    for index in range(40):
        writer.write(log_row(request_id=f"r{index}"))
        writer.write_step(step_row(index))
        writer.write_http(http_row(request_id=f"r{index}"))
    writer.close()
    files = log_files(tmp_path, TOKENS_FILE)
    assert [file.name for file in files[:3]] == ["tokens.jsonl", "tokens.1.jsonl", "tokens.2.jsonl"]
    # By number, not by name: the eleventh comes after the second.
    assert len(files) > 11
    assert all(file.stat().st_size <= MAX_BYTES for file in files)
    assert {file.read_bytes().splitlines()[0] for file in files} == {encode_row(identity())}
    assert read_token_log(tmp_path) == (
        [identity()],
        [with_digests(log_row(request_id=f"r{index}")) for index in range(40)],
    )
    assert list(read_log_lines(tmp_path, STEPS_FILE)) == [encode_row(step_row(i)) for i in range(40)]
    assert len(list(read_log_lines(tmp_path, HTTP_FILE))) == 40
    # One file alone is read alone, and older ones may be deleted.
    assert 0 < len(ids_of(files[1])) < 40
    files[0].unlink()
    assert ids_of(tmp_path)[-1] == "r39"


def test_a_later_server_goes_on_in_the_newest_file(tmp_path):
    for name in ("i1", "i2", "i3"):
        writer = TokenLogWriter(tmp_path, identity(instance_id=name), LogLimits(max_file_bytes=MAX_BYTES))
        for index in range(5):
            writer.write(log_row(request_id=f"{name}-{index}"))
        writer.close()
    log = read_log(tmp_path)
    assert [row.request_id for row in log.rows] == [f"i{n}-{i}" for n in (1, 2, 3) for i in range(5)]
    assert [one.instance_id for one in log.identities] == ["i1", "i2", "i3"]


def test_other_names_are_no_part_of_the_log(tmp_path):
    LogFile(tmp_path, TOKENS_FILE, head=b"{}").close()
    for name in (
        "tokens.old.jsonl",
        "tokens.01.jsonl",
        "tokens.-1.jsonl",
        "tokens.1.jsonl.gz",
        "tokens.².jsonl",
    ):
        (tmp_path / name).write_bytes(b"garbage\n")
    assert [file.name for file in log_files(tmp_path, TOKENS_FILE)] == [TOKENS_FILE]


def test_a_line_longer_than_a_file_is_alone_in_one(tmp_path):
    file = LogFile(tmp_path, TOKENS_FILE, max_bytes=100, head=b"head")
    for line in (b"a" * 10, b"b" * 500, b"c" * 10):
        file.append_all([line])
    file.close()
    lines = [path.read_bytes().splitlines() for path in log_files(tmp_path, TOKENS_FILE)]
    assert lines == [[b"head", b"a" * 10], [b"head", b"b" * 500], [b"head", b"c" * 10]]


def test_a_reader_beside_the_writer_sees_a_beginning_without_a_hole(tmp_path):
    num_rows = 1500
    writer = TokenLogWriter(tmp_path, identity(), LogLimits(max_file_bytes=MAX_BYTES))
    expected = [f"r{index}" for index in range(num_rows)]

    def write():
        for request_id in expected:
            writer.write(log_row(request_id=request_id))
            if int(request_id[1:]) % 100 == 0:
                writer.flush()

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    while thread.is_alive():
        found = ids_of(tmp_path)
        assert found == expected[: len(found)]
        assert len(found) >= seen[-1]
        seen.append(len(found))
    thread.join()
    writer.close()
    assert len(set(seen)) > 3, "expected to read several times while it was written"
    assert ids_of(tmp_path) == expected


def test_a_rotated_log_is_collected_into_a_run(tmp_path):
    rows, logs = make_rows(Workload(num_cases=20), ["base"])["base"]
    write_run(tmp_path, "base", rows)
    writer = TokenLogWriter(tmp_path / "log", identity(), LogLimits(max_file_bytes=1 << 14))
    for row in logs:
        writer.write(row)
    for index in range(24):
        writer.write_step(step_row(index))
    writer.close()
    assert len(log_files(tmp_path / "log", TOKENS_FILE)) > 2
    with Run.resume(tmp_path / "base") as run:
        assert collect_rows(tmp_path / "log", run) == len(rows)
        assert collect_rows(tmp_path / "log", run) == len(rows)
    assert ids_of(tmp_path / "base") == [row.request_id for row in rows]


KILLED = """
import sys
from pathlib import Path
import msgspec
from firstdiff.tracing.records import Identity, TokenLogRow
from firstdiff.tracing.token_log import LogLimits, TokenLogWriter

identity, row = sys.stdin.buffer.readline(), sys.stdin.buffer.readline()
row = msgspec.json.decode(row, type=TokenLogRow)
limits = LogLimits(max_file_bytes=int(sys.argv[2]))
writer = TokenLogWriter(Path(sys.argv[1]), msgspec.json.decode(identity, type=Identity), limits)
print("ready", flush=True)
number = 0
while True:
    writer.write(msgspec.structs.replace(row, request_id=f"r{number}"))
    number += 1
"""


@pytest.mark.parametrize("delay_s", [0.05, 0.11, 0.2])
def test_a_killed_writer_leaves_whole_rows(tmp_path, delay_s):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), "20000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(encode_row(identity()) + b"\n" + encode_row(log_row()) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        threading.Event().wait(delay_s)
        process.send_signal(signal.SIGKILL)
    found = ids_of(tmp_path)
    numbers = [int(request_id[1:]) for request_id in found]
    # Rows that the full queue dropped are missing in between, none is cut or twice.
    assert numbers == sorted(set(numbers))
    # The next server goes on behind the last whole line.
    writer = TokenLogWriter(tmp_path, identity(instance_id="i2"))
    writer.write(log_row(request_id="after"))
    writer.close()
    assert ids_of(tmp_path) == [*found, "after"]


def test_several_lines_are_appended_whole_or_not_at_all(tmp_path):
    file = LineFile(tmp_path / "lines")
    file.append_all([b"a", b"b"])
    file.append_all([])
    file.append(b"c")
    assert file.num_bytes == 6
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"a\nb\nc\n"
