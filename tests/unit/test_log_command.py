"""`firstdiff log` on saved logs: what is printed is harmless, and the exit code says what was found."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, identity, log_row

from firstdiff.harness.cli import main
from firstdiff.tracing.records import Asked, Told, Usage, encode_row
from firstdiff.tracing.token_log import LogLimits, TokenLogWriter, hash_identity

HOSTILE = "\x1b[2J\x9b1m\u202evil «x» `rm`\n| a"
SERVER = msgspec.structs.replace(identity(vocab_size=1000), special_tokens={}, eos_token_ids=[2])
TINY = Path(__file__).parents[2] / "engine" / "data" / "tiny_tokenizer.json"


def row(**changes):
    fields = {
        "identity_sha256": hash_identity(SERVER),
        "sampling": msgspec.structs.replace(SAMPLING, max_tokens=3),
        "text_offsets": [0, 1, 2],
        "asked": Asked(body="{}"),
        "told": Told(num_tokens=3, finish_reason="length", usage=Usage(prompt_tokens=3, completion_tokens=3)),
    }
    fields |= {"span_id": changes.get("request_id", "r1")}
    return log_row(**(fields | changes))


def write_log(folder, *rows, content="full"):
    writer = TokenLogWriter(folder, SERVER, LogLimits(content=content))
    for one in rows:
        writer.write(one)
    writer.close()
    return str(folder)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["log", *arguments])
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


def check_harmless(out):
    for char in out:
        assert char == "\n" or (char.isprintable() and char != "\u202e"), repr(char)


def test_show_lists_and_details(tmp_path, capsys):
    log = write_log(tmp_path, row(request_id="r1"), row(request_id="q-0"), row(request_id="q-1"))
    code, out, err = run(capsys, "show", log)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[0] == "request"
    assert [line.split()[0] for line in lines[1:4]] == ["r1", "q-0", "q-1"]
    assert lines[4] == "3 of 3 requests, of 1 servers"
    code, out, _ = run(capsys, "show", log, "r1")
    assert "abc" in out
    assert "first token +0.004 ms" in out
    assert out.count("\n") == 20
    assert run(capsys, "show", log, "q")[1].count("request ") == 2, "all answers to one HTTP request"
    assert len(run(capsys, "show", log, "--limit", "1")[1].splitlines()) == 3
    code, _, err = run(capsys, "show", log, "nobody")
    assert code == 2
    assert "expected a request of" in err
    assert run(capsys, "show", str(tmp_path / "nowhere"))[0] == 2


@pytest.mark.parametrize("content", ["full", "ids", "hash"])
def test_nothing_that_a_log_holds_steers_a_terminal(tmp_path, capsys, content):
    hostile = row(
        request_id=HOSTILE,
        text=HOSTILE,
        text_offsets=[0, 4, 2],
        user=HOSTILE,
        metadata={HOSTILE: HOSTILE},
        error=HOSTILE,
        endpoint=HOSTILE,
        sampling=msgspec.structs.replace(SAMPLING, stop=[HOSTILE]),
        asked=Asked(body=HOSTILE),
        told=Told(num_tokens=3, finish_reason=HOSTILE, stop_match=HOSTILE + "?"),
    )
    log = write_log(tmp_path, hostile, content=content)
    for command in (["show", log], ["show", log, HOSTILE], ["validate", log], ["diff", log, log]):
        code, out, err = run(capsys, *command)
        assert code in (0, 1, 3)
        assert out
        check_harmless(out + err)
    other = write_log(
        tmp_path / "other", msgspec.structs.replace(hostile, text=HOSTILE * 2, token_ids=[1, 2, 3])
    )
    check_harmless(run(capsys, "diff", log, other)[1])


def test_a_damaged_row_is_shown_as_far_as_it_goes(tmp_path, capsys):
    log = write_log(tmp_path, row(emitted_ns=[1], logprobs=[], first_token_ns=None, batch_size=[1] * 9))
    code, out, _ = run(capsys, "show", log, "r1")
    assert code == 0
    assert out.splitlines()[-1].split()[0] == "8"


def test_validate_has_an_exit_code_for_each_outcome(tmp_path, capsys):
    shutil.copy(TINY, tmp_path / "tokenizer.json")
    sound = write_log(tmp_path / "sound", row())
    code, out, _ = run(capsys, "validate", sound)
    assert code == 3
    assert "unknown (tokenizer): texts were not checked against their tokens: give --tokenizer" in out
    assert out.splitlines()[-1] == "1 requests: 0 defects, 1 unknown, 0 notes"
    broken = write_log(tmp_path / "broken", *(row(request_id=f"r{i}", finished_ns=1) for i in range(9)))
    code, out, _ = run(capsys, "validate", broken)
    assert code == 1
    assert out.count("\ndefect (stamps): r") == 4
    assert "defect (stamps): 13 more" in out or "defect (stamps): 4 more" in out, out
    code, out, _ = run(capsys, "validate", sound, "--tokenizer", str(tmp_path))
    assert code == 3
    assert "another tokenizer" in out
    code, _, err = run(capsys, "validate", sound, "--tokenizer", str(tmp_path / "none"))
    assert code == 2
    assert err.startswith("firstdiff: expected")
    for content in ("ids", "hash"):
        log = write_log(tmp_path / content, row(), content=content)
        code, out, _ = run(capsys, "validate", log)
        assert code == 3
        assert f"(--log-content {content})" in out


@pytest.mark.parametrize("garbage", [b'{"kind":"token_log","text":"\xff\xfe"}', b"[" * 50_000, b"{}"])
def test_validate_names_damaged_lines(tmp_path, capsys, garbage):
    log = write_log(tmp_path, row())
    with (tmp_path / "tokens.jsonl").open("ab") as file:
        file.write(garbage + b"\n" + encode_row(row(request_id="behind")) + b"\n")
    code, out, _ = run(capsys, "validate", log)
    assert code == 1
    assert "defect (damaged):" in out
    assert "line 3" in out
    assert "2 requests: 1 defects" in out
    assert run(capsys, "show", log)[0] == 2


def test_diff_has_an_exit_code_for_each_outcome(tmp_path, capsys):
    base = write_log(tmp_path / "base", row(request_id="a"), row(request_id="b"))
    same = write_log(tmp_path / "same", row(request_id="a", emitted_ns=[1, 2, 3]), row(request_id="b"))
    code, out, _ = run(capsys, "diff", base, same)
    assert code == 0
    assert out.startswith("2 pairs by request id: 2 equal, 0 different, 0 unknown; 0 requests on one side")
    other = write_log(
        tmp_path / "other", row(request_id="a"), row(request_id="b", token_ids=[100, 7, 102], text="axc")
    )
    code, out, _ = run(capsys, "diff", base, other)
    assert code == 1
    assert 'different: b: they part at token 1: 101 "b" and 7 "x", after "a"' in out
    elsewhere = write_log(tmp_path / "elsewhere", row(request_id="c", prompt_token_ids=[9]))
    code, out, _ = run(capsys, "diff", base, elsewhere)
    assert code == 3
    assert out.startswith("0 pairs by prompt and sampling")
    unlike = write_log(tmp_path / "unlike", row(request_id="a", prompt_token_ids=[9]))
    code, out, _ = run(capsys, "diff", base, unlike)
    assert code == 3
    assert "unknown: a: the two were asked with another prompt, sampling or seed" in out
