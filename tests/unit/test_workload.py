"""Workloads: the same spec asks the same everywhere, and a file's mistakes are named by line."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from statistics import mean

import msgspec
import pytest

from firstdiff.harness.workload import (
    KINDS,
    WorkloadSpec,
    make_cases,
    poisson_arrivals_s,
    warmup_cases,
    workload_sha256,
)


def spec_of(kind: str, **changes: object) -> WorkloadSpec:
    spec = WorkloadSpec(kind="chat", vocab_size=1000)
    return msgspec.structs.replace(spec, kind=kind, **changes)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "file"])
def test_cases_follow_from_the_spec_alone(kind: str) -> None:
    cases = make_cases(spec_of(kind, num_cases=64))
    assert cases == make_cases(spec_of(kind, num_cases=64))
    assert make_cases(spec_of(kind, num_cases=8)) == cases[:8]
    assert make_cases(spec_of(kind, num_cases=8, seed=1)) != cases[:8]
    assert len({case.case_id for case in cases}) == 64
    assert len({str(case.prompt or case.messages) for case in cases}) == 64
    assert all((case.prompt is None) != (case.messages is None) for case in cases)


def test_the_hash_is_the_same_on_every_machine() -> None:
    cases = make_cases(WorkloadSpec(num_cases=4))
    assert workload_sha256(cases) == "364f1e341be1b3ad5f591672280f1bd6f379ef91152a55f774fd4a5d4210c45c"
    assert workload_sha256(cases) != workload_sha256(cases[:3])
    assert workload_sha256(cases) != workload_sha256(cases[::-1])


def test_chat_prompts_vary_in_length_and_shape() -> None:
    cases = make_cases(WorkloadSpec(num_cases=300))
    lengths = sorted(sum(len(message["content"]) for message in case.messages or []) for case in cases)
    assert lengths[0] < 80
    assert lengths[-1] > 700
    roles = {tuple(message["role"] for message in case.messages or []) for case in cases}
    assert roles == {("user",), ("system", "user"), ("user", "assistant", "user")}


def test_sampling_fields_reach_every_case() -> None:
    spec = spec_of("tokens", sampling_seed=2**31 - 1, temperature=0.7, ignore_eos=True, prompt_tokens=5)
    cases = make_cases(spec)
    assert [case.seed for case in cases[:2]] == [2**31 - 1, 0]
    assert {(case.temperature, case.max_tokens, case.logprobs) for case in cases} == {(0.7, 48, 5)}
    assert all(case.extra == {"ignore_eos": True} and len(case.prompt or []) == 5 for case in cases)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_cases": 0}, "expected num_cases in 1"),
        ({"max_tokens": 0}, "expected max_tokens"),
        ({"temperature": -0.1}, "expected temperature"),
        ({"temperature": float("nan")}, "expected temperature"),
        ({"top_p": 0}, "expected top_p"),
        ({"repeats": 0}, "expected repeats"),
        ({"concurrency": 0}, "expected concurrency"),
        ({"concurrency": 4097}, "expected concurrency in 1..4096, got 4097"),
        ({"rate_per_s": 0}, "expected a rate above 0"),
        ({"rate_per_s": float("nan")}, "expected a rate above 0"),
        ({"logprobs": 21}, "expected logprobs in 0..20, got 21"),
        ({"kind": "prose"}, "expected a workload kind out of"),
        ({"kind": "file"}, "expected a path"),
        ({"kind": "tokens", "vocab_size": 0}, "expected a vocabulary size"),
    ],
)
def test_a_spec_out_of_bounds_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_cases(msgspec.structs.replace(WorkloadSpec(), **changes))


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(
        b'{"prompt": "Hello"}\n\n{"case_id": "two", "messages": [{"role": "user", "content": "Hi"}], '
        b'"max_tokens": 3, "unknown": 1}\n{"prompt": [1, 2]}\n'
    )
    spec = WorkloadSpec(kind="file", path=str(path), num_cases=10, max_tokens=9)
    cases = make_cases(spec)
    assert [(case.case_id, case.max_tokens) for case in cases] == [
        ("line-00001", 9),
        ("two", 3),
        ("line-00004", 9),
    ]
    assert make_cases(msgspec.structs.replace(spec, num_cases=2)) == cases[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "line 2, got: JSON is malformed"),
        (b"[]", "line 2, got: Expected `object`"),
        (b"{}", "expected one of prompt and messages in .* line 2"),
        (b'{"prompt": "a", "messages": []}', "expected one of prompt and messages"),
        (b'{"prompt": 7}', "line 2, got: Expected"),
        (b'{"prompt": "a", "case_id": "line-00001"}', "expected a unique case_id"),
        (b'{"prompt": "a", "case_id": "a b"}', "expected a unique case_id"),
        (b'{"prompt": "a", "case_id": ""}', "expected a unique case_id"),
        (b'{"prompt": "a", "case_id": "' + b"x" * 65 + b'"}', "expected a unique case_id of 1..64"),
        (b'{"x":' * 5000, "line 2, got"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b'{"prompt": "Hello"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        make_cases(WorkloadSpec(kind="file", path=str(path)))


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a JSONL file"):
        make_cases(WorkloadSpec(kind="file", path=str(tmp_path / "none")))
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="expected at least one request"):
        make_cases(WorkloadSpec(kind="file", path=str(tmp_path / "empty")))


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    times = list(islice(poisson_arrivals_s(50.0, seed=1), 20_000))
    assert times == list(islice(poisson_arrivals_s(50.0, seed=1), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    # The mean gap is 20 ms with a relative standard error of 1/sqrt(20000) = 0.7 %; so is the spread.
    assert mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert mean((gap - 0.02) ** 2 for gap in gaps) == pytest.approx(0.02**2, rel=0.1)


def test_warming_up_asks_other_prompts_of_the_same_shape() -> None:
    for kind in ("chat", "text", "copy", "tokens"):
        cases = make_cases(spec_of(kind))
        warm = warmup_cases(cases, 3)
        assert len(warm) == 3
        assert not {str(case.prompt or case.messages) for case in cases} & {
            str(case.prompt or case.messages) for case in warm
        }
