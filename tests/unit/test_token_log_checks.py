"""Each check of a token-ID log finds the defect that is planted for it, and nothing in a sound log."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, identity, log_row

from firstdiff.harness.token_texts import FileTokenizer
from firstdiff.regression.log_checks import check_log
from firstdiff.regression.log_text_checks import check_texts
from firstdiff.tracing.log_content import redacted, with_digests
from firstdiff.tracing.records import Asked, Cut, LossRow, Structure, TokenLogRow, Told, Usage
from firstdiff.tracing.token_log import TokenLog, hash_identity

BOS, EOS = 1, 2
BROKEN = "\N{REPLACEMENT CHARACTER}"
SERVER = msgspec.structs.replace(
    identity(vocab_size=1000), special_tokens={"bos_token": BOS}, eos_token_ids=[EOS], rng_scheme="r"
)


def usage_of(num_prompt, num_completion):
    return Usage(prompt_tokens=num_prompt, completion_tokens=num_completion)


def sound(**changes):
    """A row that no check has anything to say about: three tokens, ended by their number."""
    fields = {
        "identity_sha256": hash_identity(SERVER),
        "prompt_token_ids": [BOS, 5, 6],
        "sampling": msgspec.structs.replace(SAMPLING, max_tokens=3),
        "text_offsets": [0, 1, 2],
        "asked": Asked(body="{}"),
        "told": Told(num_tokens=3, finish_reason="length", usage=usage_of(3, 3)),
    }
    return with_digests(log_row(**(fields | changes)))


def told(**changes):
    return msgspec.structs.replace(sound().told, **changes)


def sampling(**changes):
    return msgspec.structs.replace(sound().sampling, **changes)


def log_of(*rows, **fields):
    return TokenLog(identities=[SERVER], rows=list(rows), **fields)


def remarks_of(*rows, severity="defect", **fields):
    return {(one.check, one.text) for one in check_log(log_of(*rows, **fields)) if one.severity == severity}


def test_a_sound_log_has_nothing():
    assert check_log(log_of(sound())) == []
    stopped = sound(
        token_ids=[100, 101, EOS], finish_reason="stop", told=told(finish_reason="stop"), text="ab"
    )
    assert check_log(log_of(stopped)) == []


STOP = {"finish_reason": "stop"}
DEFECTS = {
    "more tokens told than usage says": (
        "usage",
        {"told": told(usage=usage_of(3, 2))},
    ),
    "prompt of another length": ("usage", {"told": told(usage=usage_of(4, 3))}),
    "a list too short": ("lists", {"emitted_ns": [5_000, 6_000]}),
    "a list too long": ("lists", {"logprobs": [0.0, None, None, None]}),
    "ids too few": ("lists", {"token_ids": [100, 101]}),
    "alternatives too few": ("lists", {"top_logprobs": [[(1, -1.0)]]}),
    "offsets too few": ("lists", {"text_offsets": [0, 1]}),
    "offsets backwards": ("lists", {"text_offsets": [0, 2, 1]}),
    "more told than made": ("lists", {"told": told(num_tokens=4, usage=usage_of(3, 4))}),
    "tokenized before received": ("stamps", {"tokenized_ns": 900}),
    "scheduled before arrived": ("stamps", {"first_scheduled_ns": 2_400}),
    "finished before its last token": ("stamps", {"finished_ns": 6_500}),
    "flushed before received": ("stamps", {"flushed_ns": 999}),
    "tokens' stamps backwards": ("stamps", {"emitted_ns": [5_000, 7_000, 6_000]}),
    "another first stamp": ("stamps", {"first_token_ns": 4_000}),
    "a negative id": ("ids", {"token_ids": [100, -1, 102]}),
    "an id beyond the vocabulary": ("ids", {"token_ids": [100, 101, 1000]}),
    "a prompt id beyond it": ("ids", {"prompt_token_ids": [BOS, 5, 1 << 40]}),
    "doubled BOS": ("bos", {"prompt_token_ids": [BOS, BOS, 5]}),
    "lost EOS": ("end", STOP),
    "stopped without a token": (
        "end",
        STOP
        | {name: [] for name in ("token_ids", "emitted_ns", "step_index", "batch_size", "logprobs")}
        | {"text_offsets": [], "first_token_ns": None, "told": told(num_tokens=0, usage=None)},
    ),
    "EOS that was to be ignored": (
        "end",
        STOP | {"token_ids": [100, 101, EOS], "sampling": sampling(ignore_eos=True)},
    ),
    "a stop string of nobody": ("end", {"told": told(stop_match="x")}),
    "on after EOS": ("end", {"token_ids": [100, EOS, 102]}),
    "on after a stop token": ("end", {"sampling": sampling(stop_token_ids=[101])}),
    "ended by its length too soon": ("end", {"sampling": sampling(max_tokens=4)}),
    "another text": ("digest", {"text": "abd", "text_sha256": sound().text_sha256}),
    "another body": ("digest", {"asked": Asked(body="[]", body_sha256=sound().asked.body_sha256)}),
    "a tail that is none": ("utf8", {"told": told(utf8_incomplete_tail=True)}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_planted_defect_is_found(name):
    check, changes = DEFECTS[name]
    found = remarks_of(sound(**changes))
    assert check in {one for one, _ in found}
    assert len(found) == 1 or name == "ids too few", found


SOUND = {
    "EOS before min_tokens": {"token_ids": [100, EOS, 102], "sampling": sampling(max_tokens=3, min_tokens=2)},
    "EOS ignored": {"token_ids": [100, EOS, 102], "sampling": sampling(ignore_eos=True)},
    "EOS forced": {"token_ids": [100, EOS, 102], "sampling": sampling(forced_token_ids=[100, EOS, 102])},
    "a stop token": STOP | {"sampling": sampling(stop_token_ids=[102])},
    "a stop string, and tokens behind it": STOP
    | {
        "sampling": sampling(stop=["c"]),
        "told": told(
            num_tokens=2,
            finish_reason="stop",
            stop_match="c",
            usage=usage_of(3, 2),
        ),
        "text_offsets": [0, 1],
    },
    "the end of the context": {
        "sampling": sampling(max_tokens=100),
        "prompt_token_ids": [BOS] + [5] * 60,
        "told": told(usage=usage_of(61, 3)),
    },
    "aborted": {"finish_reason": "abort", "told": told(finish_reason="abort")},
}


@pytest.mark.parametrize("name", SOUND)
def test_what_may_be_is_no_defect(name):
    assert remarks_of(sound(**SOUND[name])) == set()


def test_usage_counts_all_answers_to_a_request_and_each_prompt_once():
    usage = usage_of(6, 12)
    rows = [
        sound(
            request_id=f"r-{index}",
            choice_index=index,
            num_choices=4,
            prompt_index=index // 2,
            told=told(usage=usage),
        )
        for index in range(4)
    ]
    assert remarks_of(*rows) == set()
    wrong = [msgspec.structs.replace(row, told=told(usage=usage_of(12, 11))) for row in rows]
    assert {text for _, text in remarks_of(*wrong)} == {
        "usage tells 11 completion tokens, the answer has 12",
        "usage tells 12 prompt tokens, the log has 6",
    }
    assert remarks_of(*wrong[:3]) == set()
    assert ("usage", "4 answers belong together, the log has 3 of them") in remarks_of(
        *wrong[:3], severity="unknown"
    )


def test_losses_damage_and_repeats_are_told():
    loss = LossRow(file="http.jsonl", num_rows=4, reason="disk", first_ns=0, last_ns=1)
    found = remarks_of(sound(), losses=[loss], damaged=["expected a row in line 3, got: x"])
    assert found == {
        ("lost", "the server could not keep 4 rows of its «http.jsonl» (disk)"),
        ("damaged", "expected a row in line 3, got: x"),
    }
    assert ("repeated", "another row has this request id") in remarks_of(
        sound(span_id="3"), sound(span_id="4"), severity="note"
    )
    assert remarks_of(severity="unknown") == {("rows", "the log holds no request")}


@pytest.mark.parametrize("content", ["ids", "hash"])
def test_what_a_log_leaves_out_is_unknown_and_no_defect(content):
    row = redacted(sound(sampling=sampling(stop=["q"])), content)
    assert remarks_of(row) == set()
    (text,) = [text for check, text in remarks_of(row, severity="unknown") if check == "content"]
    assert f"--log-content {content}" in text


def test_a_cut_row_is_unknown_and_no_defect():
    cut = [Cut(field="token_ids", num_kept=2, num_all=3)]
    lists = {name: getattr(sound(), name)[:2] for name in ("token_ids", "emitted_ns", "step_index")}
    lists |= {name: getattr(sound(), name)[:2] for name in ("batch_size", "logprobs", "text_offsets")}
    row = sound(truncated=cut, **lists)
    assert remarks_of(row) == set()
    assert remarks_of(row, severity="unknown") == {("content", "«token_ids» was cut to 2 of 3")}


def test_an_older_log_says_less_and_has_no_defect():
    old = identity(vocab_size=1000)
    row = sound(asked=None, told=None, text_offsets=[], identity_sha256=hash_identity(old))
    remarks = check_log(TokenLog(identities=[old], rows=[row]))
    assert {one.severity for one in remarks} == {"unknown", "note"}
    assert [one.check for one in check_log(TokenLog(rows=[row]))].count("identity") == 1


LISTS = ("token_ids", "emitted_ns", "step_index", "batch_size", "text_offsets")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_that_a_row_holds_raises(data):
    ints = st.integers(-(1 << 63), (1 << 63) - 1)
    lists = {
        name: data.draw(st.lists(ints, max_size=5))
        for name in (
            "prompt_token_ids",
            "token_ids",
            "emitted_ns",
            "step_index",
            "batch_size",
            "text_offsets",
        )
    }
    row = sound(
        **lists,
        logprobs=data.draw(st.lists(st.none() | st.floats(), max_size=5)),
        text=data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
        finished_ns=data.draw(ints),
        finish_reason=data.draw(st.sampled_from(["stop", "length", "abort", "error"])),
        told=data.draw(st.sampled_from([None, told(), told(num_tokens=-5), told(num_tokens=1 << 62)])),
        content=data.draw(st.sampled_from(["full", "ids", "hash"])),
        truncated=data.draw(st.sampled_from([[], [Cut(field="token_ids", num_kept=-1, num_all=0)]])),
    )
    check_log(log_of(row))
    check_texts(log_of(row), Spelled())


class Spelled:
    """A tokenizer of single letters: id 97 is "a"; 2 is special, 3 is half a character."""

    sha256 = "c"

    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, ids, *, skip_special_tokens):
        known = [token_id for token_id in ids if self.knows(token_id)]
        shown = [token_id for token_id in known if not (skip_special_tokens and token_id == EOS)]
        return "".join(BROKEN if i == 3 else "</s>" if i == EOS else chr(i) for i in shown)

    def knows(self, token_id):
        return 0 <= token_id < 123


ABC = {"token_ids": [97, 98, 99], "text": "abc"}


def text_remarks(tokenizer=None, **changes):
    row = sound(**(ABC | changes))
    return [(one.severity, one.check) for one in check_texts(log_of(row), tokenizer or Spelled())]


TEXTS = {
    "right": ([], {}),
    "another letter": ([("defect", "text"), ("note", "retokenise")], {"text": "abd"}),
    "a letter lost": ([("defect", "text"), ("note", "retokenise")], {"text": "ab"}),
    "a letter twice": ([("defect", "text"), ("note", "retokenise")], {"text": "abcc"}),
    "broken UTF-8": ([("defect", "utf8"), ("note", "retokenise")], {"text": "ab" + BROKEN}),
    "broken tokens": (
        [("note", "retokenise")],
        {"token_ids": [97, 98, 3], "text": "ab" + BROKEN},
    ),
    "broken otherwise": (
        [("note", "utf8"), ("note", "retokenise")],
        {"token_ids": [97, 3, 3], "text": "a" + BROKEN},
    ),
    "an unknown id": ([("defect", "ids")], {"token_ids": [97, 98, 99, 500]}),
    "EOS at its end": (
        [],
        STOP | {"token_ids": [97, 98, EOS], "text": "ab", "told": told(finish_reason="stop")},
    ),
    "EOS to be shown": (
        [("note", "retokenise")],
        STOP
        | {"token_ids": [97, 98, EOS], "text": "ab</s>", "told": told(finish_reason="stop")}
        | {"asked": Asked(include_stop=True, skip_special_tokens=False)},
    ),
    "ended by a string": (
        [("note", "retokenise")],
        {"sampling": sampling(stop=["bc"]), "text": "a", "told": told(stop_match="bc", finish_reason="stop")},
    ),
    "ended by a string that is not there": (
        [("defect", "text"), ("note", "retokenise")],
        {"sampling": sampling(stop=["x"]), "text": "a", "told": told(stop_match="x", finish_reason="stop")},
    ),
    "a string to be shown": (
        [],
        {"sampling": sampling(stop=["bc"]), "told": told(stop_match="bc", finish_reason="stop")}
        | {"asked": Asked(include_stop=True)},
    ),
    "its client left": (
        [("note", "retokenise")],
        {"text": "a", "finish_reason": "abort", "told": told(finish_reason=None)},
    ),
    "its first blank dropped": ([("note", "retokenise")], {"token_ids": [32, 97, 98], "text": "ab"}),
    "texts left out": ([], {"content": "ids", "text": ""}),
    "text cut": ([], {"text": "a", "truncated": [Cut(field="text", num_kept=1, num_all=3)]}),
    "an old log with a stop string": (
        [("unknown", "text"), ("note", "retokenise")],
        {"told": None, "sampling": sampling(stop=["c"]), "text": "ab"},
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_of_their_tokens(name):
    expected, changes = TEXTS[name]
    assert text_remarks(**changes) == expected


def test_another_tokenizer_judges_nothing():
    other = Spelled()
    other.sha256 = "another"
    assert text_remarks(other, text="wrong") == [("unknown", "tokenizer")]


def test_a_tokenizer_is_read_from_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"expected tokenizer\.json in"):
        FileTokenizer(tmp_path)
    source = Path(__file__).parents[2] / "engine" / "data" / "tiny_tokenizer.json"
    shutil.copy(source, tmp_path / "tokenizer.json")
    tokenizer = FileTokenizer(tmp_path)
    ids = tokenizer.encode("def café\n")
    assert tokenizer.decode([*ids, -1, 1 << 33], skip_special_tokens=True) == "def café\n"
    assert not tokenizer.knows(1 << 40)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a readable tokenizer"):
        FileTokenizer(tmp_path)


def test_a_structure_does_not_change_what_ends_an_answer():
    structured = sampling(structure=Structure(kind="regex", spec="a"))
    assert remarks_of(sound(sampling=structured)) == set()
    assert isinstance(sound(sampling=structured), TokenLogRow)
