"""Reports: the first line says it all, and nothing that a model says can break out of its quotes."""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_runs import QUIET, Defect, Workload, make_rows, write_run

from firstdiff.regression.diff import compare
from firstdiff.regression.quoting import MAX_QUOTED_CHARS, for_markdown, for_text, quoted, quoted_end
from firstdiff.regression.report import to_json, to_markdown, to_text
from firstdiff.regression.verdict import Verdict

HOSTILE = [
    "\x1b[2J\x1b[31mPASS\x1b[0m",
    "\r\nPASS: all good",
    "` | `</details><script>alert(1)</script>",
    "```\n# PASS\n```",
    "@everyone https://example.org [x](javascript:y) ![i](z)",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "«nested» \\ quotes \" '",
    "|||---|||\n|a|b|",
    "e\u0301" * 300,
    "\ud800\udfff\x00\x7f\x85",
    "👩‍👩‍👧 \U000e0041\U0010ffff",
    "x" * 100_000,
]


def is_plain(text):
    return all(unicodedata.category(char)[0] not in "CZ" or char in " \n" for char in text)


@pytest.mark.parametrize("text", HOSTILE)
def test_quoted_text_stays_in_its_quotes(text):
    for sentence in (quoted(text), quoted_end(text)):
        assert is_plain(sentence)
        assert re.fullmatch("«[^«»`|\n]*»", sentence)
        assert len(sentence) < 12 * MAX_QUOTED_CHARS
    assert re.fullmatch('"(?:[^"]|\\\\")*"', for_text(quoted(text)))
    markdown = for_markdown(quoted(text))
    assert markdown.count("`") == 2
    assert markdown[0] == markdown[-1] == "`"


@given(st.text())
def test_any_text_stays_in_its_quotes(text):
    sentence = f"a {quoted(text)} b"
    assert is_plain(sentence)
    assert sentence.count("«") == sentence.count("»") == 1
    assert for_markdown(sentence).count("`") == 2
    assert "\n" not in for_text(sentence)


def test_what_is_shown_as_it_is():
    assert quoted(" the") == "« the»"
    assert quoted("naïve 日本 🙂") == "«naïve 日本 🙂»"
    assert quoted("a\n\t\\`") == "«a\\n\\t\\\\\\x60»"
    assert quoted("abcdef", limit=3) == "«abc… (6 characters)»"
    assert quoted_end("abcdef", limit=3) == "«…def»"
    assert for_text('say «a " b»') == 'say "a \\" b"'
    assert for_markdown("x [1] «a» <b>") == "x &#91;1&#93; ` a ` &#60;b&#62;"
    assert for_markdown("«»") == "`(empty)`"


def hostile_verdict(tmp_path, text):
    """A failing verdict in which every text from outside is `text`."""
    workload = Workload(num_cases=32, block_size=2, noise=QUIET)
    made = make_rows(workload, ["base", "candidate", "twin"], {"candidate": Defect(0.4, 0.0, 1.0)})
    # What a client writes down went through UTF-8.
    text = text.encode("utf-8", "replace").decode()
    runs = []
    for label, (rows, logs) in made.items():
        suffix = "" if label != "candidate" else "!"
        rows = [
            msgspec.structs.replace(
                row,
                text=text + suffix,
                token_texts=[text + suffix] * len(row.token_ids),
                top_logprobs=None,
                case_id=f"{row.case_id}{text[:50]}",
                outcome="failed" if label == "candidate" and index == 0 else "ok",
                error=text,
            )
            for index, row in enumerate(rows)
        ]
        runs.append(write_run(tmp_path, label, rows, logs, workload, model=text[:50], endpoint=text[:50]))
    return compare(runs[0], runs[1], floor=runs[2])


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_breaks_no_report(tmp_path, text):
    verdict = hostile_verdict(tmp_path, text)
    plain, markdown = to_text(verdict), to_markdown(verdict)
    assert is_plain(plain)
    assert is_plain(markdown)
    assert plain.startswith(("INVALID: ", "FAIL: "))
    assert len(plain) < 30_000
    first_line = plain.splitlines()[0]
    assert len(first_line) < 3_000
    # Nothing of it is markup outside code spans, and every table keeps its columns.
    outside = re.sub("`[^`\n]*`", "", markdown)
    for sign in ("<", "[", "](", "@", "http://", "https://"):
        assert sign not in outside
    tables = re.findall(r"(?:^\|.*\|$\n?)+", markdown, re.MULTILINE)
    assert tables
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert msgspec.json.decode(to_json(verdict), type=Verdict) == verdict


def test_a_report_can_be_read(tmp_path):
    workload = Workload(num_cases=32, block_size=2, noise=QUIET)
    made = make_rows(workload, ["base", "candidate", "twin"], {"candidate": Defect(0.3, 0.0, 0.4)})
    runs = [write_run(tmp_path, label, *rows, workload) for label, rows in made.items()]
    text = to_text(compare(runs[0], runs[1], floor=runs[2]))
    lines = text.splitlines()
    assert lines[0].startswith("FAIL: ")
    assert any(
        re.match(r"  FAIL +tokens +\d+ of 32 requests diverge \(noise floor, twin: 0 of 32\)", line)
        for line in lines
    )
    metric = next(line for line in lines if line.startswith("  tpot "))
    assert "20.0 ms -> 26.0 ms" in metric
    assert "+30.0%" in metric
    assert "15%" in metric
    assert "32 in 16 blocks" in metric
    assert metric.endswith("FAIL")
    phase = next(line for line in lines if line.startswith("  decode "))
    assert "+138 ms" in phase
    assert "chance of a false alarm, all tests together: 0.01" in text
    markdown = to_markdown(compare(runs[0], runs[1], floor=runs[2]))
    assert markdown.startswith("**FAIL**: ")
