"""The log files of a server never fail a request and read back up to their last whole row."""

from __future__ import annotations

import hashlib
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import identity, step_row
from ledger_rows import log_row as made_row

from firstdiff.tracing.log_content import with_digests
from firstdiff.tracing.records import StepRow, encode_row
from firstdiff.tracing.token_log import (
    STEPS_FILE,
    TOKENS_FILE,
    TokenLogWriter,
    hash_identity,
    read_token_log,
)


def log_row(**changes):
    """A row as it is once it was written."""
    return with_digests(made_row(**changes))


def test_a_log_is_read_as_written(tmp_path):
    writer = TokenLogWriter(tmp_path / "new" / "log", identity())
    rows = [log_row(request_id=f"r{i}", text="é\n\u2028" * i) for i in range(5)]
    for index, row in enumerate(rows):
        writer.write(row)
        writer.write_step(step_row(index))
    writer.close()
    writer.close()
    assert writer.num_lost_rows == 0
    for path in (tmp_path / "new" / "log", tmp_path / "new" / "log" / TOKENS_FILE):
        assert read_token_log(path) == ([identity()], rows)
    steps = (tmp_path / "new" / "log" / STEPS_FILE).read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=StepRow) for line in steps] == [step_row(i) for i in range(5)]
    first_line = (tmp_path / "new" / "log" / TOKENS_FILE).read_bytes().splitlines()[0]
    assert writer.identity_sha256 == hash_identity(identity()) == hashlib.sha256(first_line).hexdigest()


def test_a_later_server_goes_on_behind_a_killed_one(tmp_path):
    first = TokenLogWriter(tmp_path, identity())
    first.write(log_row())
    first.close()
    with (tmp_path / TOKENS_FILE).open("ab") as file:
        file.write(encode_row(log_row())[:50])
    assert read_token_log(tmp_path) == ([identity()], [log_row()])
    second = TokenLogWriter(tmp_path, identity(instance_id="i2"))
    second.write(log_row(request_id="r2"))
    second.close()
    assert read_token_log(tmp_path) == (
        [identity(), identity(instance_id="i2")],
        [log_row(), log_row(request_id="r2")],
    )


def test_two_servers_in_one_directory_are_refused(tmp_path):
    writer = TokenLogWriter(tmp_path, identity())
    with pytest.raises(ValueError, match="being written: choose another directory"):
        TokenLogWriter(tmp_path, identity(instance_id="i2"))
    writer.close()
    TokenLogWriter(tmp_path, identity(instance_id="i2")).close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cut_at_any_byte_the_log_reads_up_to_its_last_row(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log")
    writer = TokenLogWriter(path, identity())
    rows = [log_row(request_id=f"r{i}") for i in range(3)]
    for row in rows:
        writer.write(row)
    writer.close()
    content = (path / TOKENS_FILE).read_bytes()
    num_bytes = data.draw(st.integers(0, len(content)))
    (path / TOKENS_FILE).write_bytes(content[:num_bytes])
    num_lines = content[:num_bytes].count(b"\n")
    assert read_token_log(path) == ([identity()][:num_lines], rows[: max(0, num_lines - 1)])


@pytest.mark.parametrize(
    "garbage", [b"", b"{}", b"\xff\x00", b'{"kind":"step"}', b'{"kind":"token_log"}', b"[" * 60_000]
)
def test_a_damaged_whole_line_is_named(tmp_path, garbage):
    (tmp_path / TOKENS_FILE).write_bytes(encode_row(identity()) + b"\n" + garbage + b"\n")
    with pytest.raises(
        ValueError, match=r"expected an identity or token_log row in .*tokens\.jsonl line 2, got:"
    ):
        read_token_log(tmp_path)


def test_no_log_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"expected a token log, got .* does not exist"):
        read_token_log(tmp_path)
    with pytest.raises(ValueError, match="expected a token log"):
        read_token_log(tmp_path / "nowhere.jsonl")


def test_rows_after_close_are_counted_as_lost(tmp_path, caplog):
    writer = TokenLogWriter(tmp_path, identity())
    writer.close()
    writer.write(log_row())
    writer.write_step(step_row(0))
    assert writer.num_lost_rows == 2
    assert len(caplog.records) == 1
    assert read_token_log(tmp_path) == ([identity()], [])


def test_text_that_has_no_utf8_is_lost_and_counted(tmp_path):
    writer = TokenLogWriter(tmp_path, identity())
    writer.write(log_row(text="\ud800"))
    writer.write(log_row())
    writer.close()
    assert writer.num_lost_rows == 1
    assert read_token_log(tmp_path) == ([identity()], [log_row()])


FULL_DISK = """
import resource, sys
from pathlib import Path
import msgspec
from firstdiff.tracing.records import Identity, TokenLogRow
from firstdiff.tracing.token_log import TokenLogWriter

identity, row = sys.stdin.buffer.read().splitlines()
row = msgspec.json.decode(row, type=TokenLogRow)
writer = TokenLogWriter(Path(sys.argv[1]), msgspec.json.decode(identity, type=Identity))
writer.write(row)
assert writer.flush(timeout_s=20)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for _ in range(10):
    writer.write(row)
assert writer.flush(timeout_s=20)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write(row)
writer.close()
print(writer.num_lost_rows)
"""


@pytest.mark.parametrize("num_fitting", [1, 4])
@pytest.mark.parametrize("excess_bytes", [0, 1, 100])
def test_a_full_disk_loses_rows_counts_them_and_damages_none(tmp_path, num_fitting, excess_bytes):
    # Python ignores SIGXFSZ, so that write() does a part, then fails with EFBIG, as it would with ENOSPC.
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    lines = encode_row(identity()) + b"\n" + encode_row(log_row()) + b"\n"
    limit_bytes = len(lines) + (num_fitting - 1) * (len(encode_row(log_row())) + 1) + excess_bytes
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit_bytes)],
        input=lines,
        check=True,
        capture_output=True,
        timeout=60,
    )
    num_lost_rows = 10 - (num_fitting - 1)
    assert int(result.stdout) == num_lost_rows
    (said,) = result.stderr.decode().splitlines()
    assert TOKENS_FILE in said
    assert "rows are lost" in said
    assert read_token_log(tmp_path) == ([identity()], [log_row()] * (num_fitting + 1))
