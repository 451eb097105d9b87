"""Where the answers of two logs part, and a logged answer from the one that came again."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ledger_rows import SAMPLING, log_row

from firstdiff.harness.dialect import DIALECTS
from firstdiff.harness.replay import has_same_logprobs, is_plainly_greedy, replay_of
from firstdiff.regression.log_diff import answer_of, asked_alike, coarser, diff_answers, pair_rows
from firstdiff.regression.log_replays import judge_forced, judge_free
from firstdiff.tracing.log_content import redacted, with_digests
from firstdiff.tracing.records import Asked, Cut, Request, RequestRow, Structure, Told

FIRSTDIFF, VLLM, OPENAI = DIALECTS["firstdiff"], DIALECTS["vllm"], DIALECTS["openai"]


def row(**changes):
    fields = {
        "text": "the cat",
        "text_offsets": [0, 3, 4],
        "logprobs": [-0.1, -0.2, -0.3],
        "sampling": sampling(),
        "asked": Asked(),
        "told": Told(num_tokens=3, finish_reason="length"),
    }
    return with_digests(log_row(**(fields | changes)))


def sampling(**changes):
    return msgspec.structs.replace(SAMPLING, **({"max_tokens": 3, "logprobs": 1} | changes))


def reply(**changes):
    fields = {
        "request_id": "x",
        "case_id": "r1",
        "intended_ns": 0,
        "sent_ns": 0,
        "headers_received_ns": 1,
        "chunk_received_ns": [1],
        "chunk_num_tokens": [3],
        "finished_ns": 2,
        "sent_unix_ns": 0,
        "outcome": "ok",
        "status": 200,
        "error": None,
        "prompt_token_ids": None,
        "text": "the cat",
        "token_ids": [100, 101, 102],
        "token_texts": ["the", " ", "cat"],
        "logprobs": [-0.1, -0.2, -0.3],
        "top_logprobs": [[("the", -0.1)], [(" ", -0.2)], [("cat", -0.3)]],
        "finish_reason": "length",
        "usage": None,
    }
    return RequestRow(**(fields | changes))


def diff_of(one, other):
    content = coarser(one.content, other.content)
    return diff_answers(answer_of(one, content), answer_of(other, content))


def test_equal_answers_are_equal():
    found = diff_of(row(), row(emitted_ns=[1, 2, 3], flushed_ns=10**9))
    assert (found.outcome, found.num_compared, found.shift) == ("equal", 3, 0.0)


def test_the_first_divergence_is_shown_with_the_text_around_it():
    found = diff_of(row(), row(token_ids=[100, 101, 7], text="the dog", logprobs=[-0.1, -0.25, -0.9]))
    assert (found.outcome, found.position) == ("different", 2)
    assert found.text == "they part at token 2: 102 «cat» (-0.300) and 7 «dog» (-0.900), after «the »"
    assert found.shift == pytest.approx(0.05)
    assert found.shift_position == 1
    shorter = row(
        token_ids=[100, 101], text="the ", text_offsets=[0, 3], told=Told(num_tokens=2, finish_reason="stop")
    )
    assert "102 «cat» (-0.300) and the end (stop)" in diff_of(row(), shorter).text


def test_tokens_behind_a_stop_string_are_no_part_of_an_answer():
    one = row(told=Told(num_tokens=2, finish_reason="stop", stop_match="c"))
    other = row(token_ids=[100, 101, 7], told=Told(num_tokens=2, finish_reason="stop", stop_match="c"))
    assert diff_of(one, other).outcome == "equal"


def test_other_ends_and_texts_of_the_same_tokens_are_different():
    assert (
        "end for other reasons: length and abort"
        in diff_of(row(), row(told=Told(num_tokens=3, finish_reason="abort"))).text
    )
    found = diff_of(row(), row(text="the bat"))
    assert (found.outcome, found.position) == ("different", None)
    assert "the same tokens have other texts from character 4" in found.text


@pytest.mark.parametrize("contents", [("ids", "full"), ("full", "hash"), ("ids", "hash"), ("hash", "hash")])
def test_logs_that_keep_unlike_much_are_compared_by_what_both_have(contents):
    one, other = (redacted(row(), content) for content in contents)
    assert asked_alike(one, other)
    assert diff_of(one, other).outcome == "equal"
    changed = redacted(row(token_ids=[100, 101, 7]), contents[1])
    found = diff_of(one, changed)
    assert found.outcome == "different"
    assert ("does not say" in found.text) == ("hash" in contents)
    assert not asked_alike(one, redacted(row(prompt_token_ids=[1, 2, 4]), contents[1]))


def test_what_was_cut_is_unknown_when_the_rest_is_equal():
    cut = row(token_ids=[100, 101], truncated=[Cut(field="token_ids", num_kept=2, num_all=3)])
    assert diff_of(row(), cut).outcome == "unknown"
    assert diff_of(row(token_ids=[100, 7, 102]), cut).position == 1


def test_rows_are_paired_by_id_else_by_what_was_asked():
    ours = [row(request_id="a"), row(request_id="b", prompt_token_ids=[9])]
    theirs = [row(request_id="b", prompt_token_ids=[9]), row(request_id="c")]
    pairs, by = pair_rows(ours, theirs)
    assert ([(one.request_id, other.request_id) for one, other in pairs], by) == ([("b", "b")], "request id")
    others = [row(request_id=f"x{i}", sampling=sampling(seed=i)) for i in range(2)]
    pairs, by = pair_rows(ours, others)
    assert by == "prompt and sampling", "greedy answers do not depend on the seed"
    assert [(one.request_id, other.request_id) for one, other in pairs] == [("a", "x0")]
    warm = [row(request_id=f"w{i}", sampling=sampling(temperature=1.0, seed=5)) for i in range(2)]
    assert pair_rows(warm, others)[0] == []
    again = [row(request_id=f"v{i}", sampling=sampling(temperature=1.0, seed=5)) for i in range(3)]
    assert [other.request_id for _, other in pair_rows(warm, again)[0]] == ["v0", "v1"]


@pytest.mark.parametrize("content", ["full", "ids", "hash"])
def test_what_does_not_decide_tokens_does_not_make_requests_unlike(content):
    base = redacted(row(sampling=sampling(stop=["x"])), content)
    alike = redacted(row(sampling=sampling(stop=["x"], seed=99, logprobs=None)), content)
    assert asked_alike(base, alike)
    for changes in ({"stop": ["y"]}, {"stop": ["x"], "temperature": 1.0}, {"stop": ["x"], "top_k": 3}):
        assert not asked_alike(base, redacted(row(sampling=sampling(**changes)), content))


def forced(one=None, again=None, **changes):
    options = {"tolerance": 0.05, "is_greedy": True, "has_logprobs": True} | changes
    return judge_forced(one or row(), again or reply(), **options)


def test_a_forced_answer_of_the_same_logprobs_is_equal():
    found = forced(again=reply(logprobs=[-0.12, -0.2, -0.3]))
    assert found.outcome == "equal"
    assert found.shift == pytest.approx(0.02)


def test_a_forced_answer_shows_where_the_endpoint_thinks_otherwise():
    moved = forced(again=reply(logprobs=[-0.1, -0.3, -0.3]))
    assert (moved.outcome, moved.position) == ("different", 1)
    assert "at token 1 (101 « ») its log-probability is -0.3000, in the log -0.2000" in moved.text
    tops = [[("the", -0.1)], [("!", -0.05), (" ", -0.2)], [("cat", -0.3)]]
    preferring = forced(again=reply(top_logprobs=tops))
    assert (preferring.outcome, preferring.position) == ("different", 1)
    assert "would have said «!», by 0.1500 nats, after «the»" in preferring.text
    assert forced(again=reply(top_logprobs=tops), is_greedy=False).outcome == "equal"
    assert forced(again=reply(top_logprobs=tops), tolerance=0.2).outcome == "equal"


def test_a_forced_answer_that_says_other_tokens_or_nothing_of_them():
    unheard = forced(again=reply(token_ids=[100, 7, 102]))
    assert unheard.outcome == "different"
    assert "did not say the tokens it was given" in unheard.text
    assert forced(again=reply(logprobs=None)).outcome == "unknown"
    assert forced(has_logprobs=False, is_greedy=False).outcome == "unknown"
    assert "another text" in forced(again=reply(text="the c\N{REPLACEMENT CHARACTER}t")).text


def test_a_free_answer_may_part_only_at_a_tie():
    other = reply(token_ids=[100, 101, 7], token_texts=["the", " ", "dog"], text="the dog")
    assert judge_free(row(), other, tolerance=0.05).outcome == "different"
    tie = row(top_logprobs=[[], [], [(102, -0.3), (7, -0.32)]])
    found = judge_free(tie, other, tolerance=0.05)
    assert (found.outcome, found.position) == ("unknown", 2)
    assert "a tie, 0.0200 nats apart" in found.text
    assert judge_free(tie, other, tolerance=0.01).outcome == "different"
    shifted = judge_free(row(), reply(logprobs=[-0.1, -0.2, -0.9]), tolerance=0.05)
    assert (shifted.outcome, shifted.position) == ("different", 2)
    assert judge_free(row(), reply(), tolerance=0.0).outcome == "equal"


def test_a_row_is_replayed_forced_where_that_tells_something():
    one = replay_of(row(), dialect=FIRSTDIFF, forced=None)
    assert one.is_forced
    assert one.request.extra == {"forced_token_ids": [100, 101, 102]}
    assert (one.request.prompt, one.request.max_tokens, one.request.seed) == ([1, 2, 3], 3, 7)
    warm = row(sampling=sampling(temperature=1.0, logprobs=None), logprobs=[None] * 3)
    free = replay_of(warm, dialect=FIRSTDIFF, forced=None)
    assert not free.is_forced
    assert free.request.temperature == 1.0
    assert replay_of(warm, dialect=FIRSTDIFF, forced=True).is_forced
    assert "noise is its own" in replay_of(warm, dialect=VLLM, forced=None).why_not
    assert not replay_of(row(), dialect=OPENAI, forced=None).is_forced
    assert "cannot be made to answer" in replay_of(row(), dialect=OPENAI, forced=True).why_not


def test_vllm_is_forced_by_its_own_route():
    request = replay_of(row(), dialect=VLLM, forced=None).request
    path, body = VLLM.body(request, model="m")
    assert path == "/inference/v1/generate"
    assert (body["token_ids"], body["output_mode"], body["stream"]) == ([1, 2, 3], "text", False)
    assert body["sampling_params"]["trace_decode_token_ids"] == [100, 101, 102]
    assert "forced_token_ids" not in body["sampling_params"]
    assert FIRSTDIFF.body(request, model="m")[1]["forced_token_ids"] == [100, 101, 102]
    with pytest.raises(ValueError, match="can be made to answer given tokens"):
        OPENAI.body(request, model="m")
    text = Request(case_id="c", prompt="text", extra={"forced_token_ids": [1]})
    with pytest.raises(ValueError, match="of a prompt of ids"):
        VLLM.body(text, model="m")


def test_a_free_replay_asks_for_all_that_could_change_a_token():
    everything = sampling(
        top_k=5,
        min_p=0.1,
        stop=["x"],
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={7: -1.0},
        structure=Structure(kind="regex", spec="a+"),
        logprobs_mode="processed_logprobs",
    )
    one = row(sampling=everything, asked=Asked(skip_special_tokens=False, include_stop=True))
    request = replay_of(one, dialect=FIRSTDIFF, forced=False).request
    assert request.extra == {
        "top_k": 5,
        "min_p": 0.1,
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -1.0},
        "guided_regex": "a+",
        "logprobs_mode": "processed_logprobs",
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    assert msgspec.json.decode(msgspec.json.encode(request), type=Request) == request


CANNOT = {
    "digests": ({"content": "hash"}, "only digests"),
    "cut prompt": (
        {"truncated": [Cut(field="prompt_token_ids", num_kept=3, num_all=9)]},
        "its prompt was cut",
    ),
    "a score": ({"sampling": sampling(max_tokens=0)}, "no tokens"),
    "nothing told": ({"told": Told(num_tokens=0, finish_reason="abort")}, "no tokens to compare"),
    "hidden stop": ({"sampling": sampling(stop=["sha256:00"])}, "left out of the log"),
    "cut structure": (
        {
            "sampling": sampling(structure=Structure(kind="regex", spec="")),
            "truncated": [Cut(field="structure", num_kept=0, num_all=9)],
        },
        "its structure was cut",
    ),
    "tools": ({"sampling": sampling(structure=Structure(kind="tool_calls", spec="{}"))}, "tool_calls"),
    "forced": ({"sampling": sampling(forced_token_ids=[1, 2, 3])}, "were forced"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_replayed_says_why(name):
    changes, why = CANNOT[name]
    found = replay_of(row(**changes), dialect=FIRSTDIFF, forced=False)
    assert found.request is None
    assert why in found.why_not
    assert "top_k" in replay_of(row(sampling=sampling(top_k=2)), dialect=OPENAI, forced=None).why_not


def test_which_logprobs_and_choices_can_be_judged():
    assert is_plainly_greedy(sampling())
    for changes in (
        {"temperature": 0.1},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
        {"presence_penalty": 1.0},
    ):
        assert not is_plainly_greedy(sampling(**changes))
    processed = sampling(logprobs_mode="processed_logprobs")
    assert has_same_logprobs(row(), VLLM)
    assert has_same_logprobs(row(sampling=processed), FIRSTDIFF)
    assert not has_same_logprobs(row(sampling=processed), VLLM)
    penalised = sampling(logprobs_mode="processed_logprobs", repetition_penalty=1.1)
    assert not has_same_logprobs(row(sampling=penalised), FIRSTDIFF)
    assert not has_same_logprobs(row(logprobs=[None] * 3), FIRSTDIFF)
