"""What is asked and when: cases from a resolved spec, arrival times from a rate.

Owns: WorkloadSpec, its cases, the hash that says two Runs asked the same, arrival processes.
Refuses to know: endpoints, sockets, how requests are sent.
Invariants: equal specs give equal requests, byte for byte, on every machine; `case_id`s are unique;
arrival times are absolute offsets from the start, so a late request never moves the ones after it.

Usage: `cases = make_cases(WorkloadSpec(kind="chat", num_cases=32, seed=0))`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from firstdiff.harness.prompts import chat_messages, copy_messages, text_prompt, token_prompt
from firstdiff.tracing.records import Request

Kind = Literal["chat", "text", "copy", "tokens", "file"]
KINDS: tuple[Kind, ...] = ("chat", "text", "copy", "tokens", "file")

MAX_CASE_ID_CHARS = 64
MAX_CASES = 1_000_000
MAX_FILE_BYTES = 256 << 20


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the requests depend on.

    `prompt_tokens` and `vocab_size` are for kind "tokens" (random ids), `path` for kind "file". Pacing:
    closed loop with `concurrency` requests in flight, or, when `rate_per_s` is set, Poisson arrivals.
    """

    kind: Kind = "chat"
    num_cases: int = 32
    seed: int = 0
    max_tokens: int = 48
    temperature: float = 0.0
    top_p: float = 1.0
    sampling_seed: int | None = None
    logprobs: int | None = 5
    ignore_eos: bool = False
    stream: bool = True
    prompt_tokens: int = 128
    vocab_size: int = 0
    path: str | None = None
    repeats: int = 1
    concurrency: int = 4
    rate_per_s: float | None = None

    def validate(self) -> None:
        """ValueError (expected, got, what to do) on the first setting out of bounds."""
        bounds: dict[str, tuple[float, float, float]] = {
            "num_cases": (self.num_cases, 1, MAX_CASES),
            "max_tokens": (self.max_tokens, 1, 1_000_000),
            "temperature": (self.temperature, 0, 100),
            "top_p": (self.top_p, 1e-9, 1),
            "prompt_tokens": (self.prompt_tokens, 1, 1_000_000),
            "repeats": (self.repeats, 1, 1000),
            "concurrency": (self.concurrency, 1, 4096),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ValueError(f"expected {name} in {low:g}..{high:g}, got {value}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= 1e5:
            raise ValueError(f"expected a rate above 0 and up to 100000 requests/s, got {self.rate_per_s}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"expected logprobs in 0..20, got {self.logprobs}")
        if self.kind not in KINDS:
            raise ValueError(f"expected a workload kind out of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind == "file" and self.path is None:
            raise ValueError("expected a path for a workload of kind file, got none")


def make_cases(spec: WorkloadSpec) -> list[Request]:
    """The requests of `spec` in order; ValueError when the spec or its file is wrong."""
    spec.validate()
    if spec.kind == "file":
        assert spec.path is not None
        return cases_of_file(Path(spec.path), spec)
    if spec.kind == "tokens" and spec.vocab_size < 2:
        raise ValueError(
            f"expected a vocabulary size of 2 or more for random tokens, got {spec.vocab_size}: "
            "name it where the endpoint does not tell"
        )
    cases = []
    for index in range(spec.num_cases):
        prompt: str | list[int] | None = None
        messages: list[dict[str, str]] | None = None
        if spec.kind == "chat":
            messages = chat_messages(seed=spec.seed, index=index)
        elif spec.kind == "copy":
            messages = copy_messages(seed=spec.seed, index=index)
        elif spec.kind == "text":
            prompt = text_prompt(seed=spec.seed, index=index)
        else:
            prompt = token_prompt(
                seed=spec.seed, index=index, num_tokens=spec.prompt_tokens, vocab_size=spec.vocab_size
            )
        case_id = f"{spec.kind}-{index:05d}"
        cases.append(
            Request(case_id=case_id, prompt=prompt, messages=messages, **_shared_fields(spec, index))
        )
    return cases


def cases_of_file(path: Path, spec: WorkloadSpec) -> list[Request]:
    """The first `num_cases` requests of a JSONL file.

    Each line is an object with `prompt` or `messages`, and may set any other field of a Request; what it
    does not set comes from `spec`. ValueError names the line that is wrong.
    """
    if not path.is_file():
        raise ValueError(f"expected a JSONL file of requests, got {path}, which is none")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"expected a file of at most {MAX_FILE_BYTES} bytes, got {path}: split it")
    cases: list[Request] = []
    seen: set[str] = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if len(cases) == spec.num_cases:
                break
            defaults = {"case_id": f"line-{number:05d}", **_shared_fields(spec, number - 1)}
            try:
                case = msgspec.convert(defaults | _object_of(line), Request)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"expected a request in {path} line {number}, got: {error}") from error
            if (case.prompt is None) == (case.messages is None):
                raise ValueError(f"expected one of prompt and messages in {path} line {number}")
            if case.case_id in seen or not is_case_id(case.case_id):
                raise ValueError(
                    f"expected a unique case_id of 1..{MAX_CASE_ID_CHARS} letters, digits, . _ - in {path} "
                    f"line {number}, got {case.case_id[:80]!r}"
                )
            seen.add(case.case_id)
            cases.append(case)
    if not cases:
        raise ValueError(f"expected at least one request in {path}, got an empty file")
    return cases


def is_case_id(text: str) -> bool:
    """Whether `text` may name a case: it becomes part of a request id, which travels in a header."""
    allowed = text.isascii() and text.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return allowed and len(text) <= MAX_CASE_ID_CHARS


def _object_of(line: bytes) -> dict[str, Any]:
    return msgspec.json.decode(line, type=dict[str, Any])


def _shared_fields(spec: WorkloadSpec, index: int) -> dict[str, Any]:
    return {
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        # Each case has its own noise, the same on every side.
        "seed": None if spec.sampling_seed is None else (spec.sampling_seed + index) % (1 << 31),
        "logprobs": spec.logprobs,
        "stream": spec.stream,
        "extra": {"ignore_eos": True} if spec.ignore_eos else {},
    }


def workload_sha256(cases: Iterable[Request]) -> str:
    """SHA-256 of the requests in order: equal exactly when the same was asked."""
    digest = hashlib.sha256()
    for case in cases:
        digest.update(msgspec.json.encode(case) + b"\n")
    return digest.hexdigest()


def poisson_arrivals_s(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Endless arrival times in seconds from the start, of a Poisson process."""
    rng = random.Random(f"firstdiff poisson {seed}")
    arrival_s = 0.0
    while True:
        arrival_s += rng.expovariate(rate_per_s)
        yield arrival_s


def warmup_cases(cases: Sequence[Request], num_cases: int) -> list[Request]:
    """Requests shaped like `cases` with other prompts, so that warming up leaves none of theirs cached."""
    warm = []
    for index, case in enumerate(cases[:num_cases]):
        messages, prompt = None, case.prompt
        if case.messages is not None:
            messages = copy_messages(seed=-1, index=index)
        elif isinstance(prompt, str):
            prompt = text_prompt(seed=-1, index=index)
        elif prompt is not None:
            prompt = prompt[::-1]
        warm.append(
            msgspec.structs.replace(case, case_id=f"warmup-{index:05d}", prompt=prompt, messages=messages)
        )
    return warm
