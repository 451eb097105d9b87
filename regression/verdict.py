"""What a comparison is asked and what it answers: settings, evidence, Findings, the Verdict.

Owns: the shapes that verdict.json is made of, the order of statuses, the exit codes. Refuses to know: how
a Finding is reached, how it is printed. Invariants: frozen; statuses merge pass < unknown < fail < invalid,
but what makes only times worthless hides no failure of anything else (`status_of`);
a Finding that does not gate never moves the Verdict; text from outside stands between « and » (quoting.py).

Usage: `verdict.status`, `EXIT_CODES[verdict.status]`, `msgspec.json.decode(data, type=Verdict)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Status = Literal["pass", "unknown", "fail", "invalid"]
Part = Literal["comparability", "rows", "client", "outcomes", "prompts", "tokens", "logprobs", "latency"]

EXIT_CODES: dict[Status, int] = {"pass": 0, "fail": 1, "unknown": 3, "invalid": 4}
SEVERITY: dict[Status, int] = {"pass": 0, "unknown": 1, "fail": 2, "invalid": 3}

MAX_TESTS = 6
"""Tests that share `alpha`: outcomes, tokens, logprobs, and the three latency metrics."""

DTYPE_NOISE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 0.1}
"""Nats by which rounding alone moves a token's log-probability between correct engines of one dtype."""


class CompareConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How strict to be. The defaults are those whose error rates tests/quality measures.

    `alpha`: the chance that a healthy candidate fails, over all tests together (Holm). `latency_margin`
    (fraction) is for tpot and e2e, `ttft_margin` for ttft, which is noisier: a metric fails when the
    estimate is beyond its margin and more than half the margin is certain; a slow-down of exactly the
    margin passes with chance `miss_rate`. `session_sd`: spread, as a fraction, of speed from session to
    session, and `session_factor` the slow-down that only a defect can cause from session to session: both
    enter where the sides did not take turns, where a smaller one is at most unknown. `logprob_tolerance`:
    nats that never matter.
    `max_failed_fraction`: failed requests that an endpoint may have. One in a hundred of the client's
    wake-ups may be late by `max_client_lag_fraction` of the median TTFT, or `min_client_lag_ns` if that is
    more; half of them by a tenth of it.
    """

    alpha: float = 0.01
    miss_rate: float = 0.05
    latency_margin: float = 0.15
    ttft_margin: float = 0.25
    logprob_tolerance: float = 0.05
    min_pairs: int = 16
    min_blocks: int = 4
    session_sd: float = 0.03
    session_factor: float = 2.0
    max_failed_fraction: float = 0.02
    max_client_lag_fraction: float = 0.5
    min_client_lag_ns: int = 50_000_000
    num_resamples: int = 1000
    seed: int = 0

    def validate(self) -> None:
        """Raise ValueError (expected, got) on the first setting out of bounds."""
        bounds: dict[str, tuple[float, float, float]] = {
            "alpha": (self.alpha, 1e-9, 0.5),
            "miss_rate": (self.miss_rate, 1e-9, 0.5),
            "latency_margin": (self.latency_margin, 0.0, 10.0),
            "ttft_margin": (self.ttft_margin, 0.0, 10.0),
            "logprob_tolerance": (self.logprob_tolerance, 0.0, 100.0),
            "min_pairs": (self.min_pairs, 2, 1_000_000),
            "min_blocks": (self.min_blocks, 2, 1_000_000),
            "session_sd": (self.session_sd, 0.0, 1.0),
            "session_factor": (self.session_factor, 1.0, 1000.0),
            "max_failed_fraction": (self.max_failed_fraction, 0.0, 1.0),
            "max_client_lag_fraction": (self.max_client_lag_fraction, 0.0, 1000.0),
            "min_client_lag_ns": (self.min_client_lag_ns, 0, 1 << 60),
            "num_resamples": (self.num_resamples, 100, 1_000_000),
            "seed": (self.seed, 0, 1 << 63),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ValueError(f"expected {name} in {low:g}..{high:g}, got {value}")


class Interval(msgspec.Struct, frozen=True):
    """Both ends of a confidence interval, each one-sided at the level its owner states."""

    low: float
    high: float


class Divergence(msgspec.Struct, frozen=True, kw_only=True, tag="divergence"):
    """Where two replies to one request part: the first `position` (0-based) at which they differ.

    `unit` is what was compared: token ids, token texts where ids are missing, characters where both are.
    The side that had ended there has id and text None. Gaps are log-probabilities (nats) in front of the
    same tokens: `base_gap` is how much likelier base thought its own token than the candidate's,
    `candidate_gap` the same the other way round; `_at_least` when the other token was not among the top
    ones that the endpoint listed, so that only a lower bound is known; None when nothing is known.
    """

    case_id: str
    repeat_index: int
    position: int
    unit: Literal["token", "token text", "character"]
    base_token_id: int | None
    candidate_token_id: int | None
    base_text: str | None
    candidate_text: str | None
    base_gap: float | None
    candidate_gap: float | None
    base_gap_at_least: bool = False
    candidate_gap_at_least: bool = False
    before: str = ""
    shift: float | None = None


class TokenEvidence(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Counts of the token comparison, over requests and over cases (a case may be asked repeatedly).

    `upper_fraction` bounds from above (95 %) the share of cases that diverge. `num_only_candidate` and
    `num_only_floor`: cases in which just that one parted from base. `floor` says where the floor is from.
    """

    num_requests: int
    num_diverging_requests: int
    num_cases: int
    num_diverging_cases: int
    floor: Literal["twin", "repeats", "none"]
    num_floor_cases: int
    num_diverging_floor_cases: int
    num_floor_requests: int
    num_diverging_floor_requests: int
    num_only_candidate: int | None
    num_only_floor: int | None
    upper_fraction: float | None
    median_position: int | None
    first: Divergence | None
    examples: list[Divergence]


class ShiftEvidence(msgspec.Struct, frozen=True, kw_only=True, tag="shift"):
    """How far log-probabilities of equal tokens after equal tokens lie apart (nats, a case's largest)."""

    num_cases: int
    num_tokens: int
    largest: float | None
    median: float | None
    floor_largest: float | None
    num_floor_cases: int
    noise: float
    num_beyond_noise: int


class MetricEvidence(msgspec.Struct, frozen=True, kw_only=True, tag="metric"):
    """One latency metric on both sides; times in nanoseconds, changes as fractions (0.1 is 10 % slower).

    `change` is the robust paired estimate, `interval` its two-sided 90 % range. `detectable` is the
    slow-down that this comparison would have failed nine times in ten, were nothing else wrong.
    `num_blocks` groups of pairs are the independent units. Outliers are requests half as long again as on
    the other side, beyond the overall change. `floor_change` is the twin's.
    """

    name: str
    base_p50: float | None
    candidate_p50: float | None
    change: float | None
    interval: Interval | None
    margin: float | None
    detectable: float | None
    num_pairs: int
    num_blocks: int
    num_base_outliers: int = 0
    num_candidate_outliers: int = 0
    floor_change: float | None = None
    floor_interval: Interval | None = None


class QuantileEvidence(msgspec.Struct, frozen=True, kw_only=True, tag="quantile"):
    """One exact quantile on both sides (nanoseconds), None where there are too few values for it.

    `itl` is the gap between two chunks, all requests together. `change` is a fraction; `interval` its 90 %
    range by a paired bootstrap over blocks.
    """

    metric: str
    fraction: float
    base_ns: float | None
    candidate_ns: float | None
    change: float | None
    interval: Interval | None


class PhaseEvidence(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """One phase of a request as the server logged it: medians in nanoseconds a request.

    `change` and `interval` are paired fractions as in MetricEvidence, decode per output token.
    `added_ns` is the median of candidate minus base.
    """

    name: str
    base_ns: float
    candidate_ns: float
    added_ns: float
    change: float | None
    interval: Interval | None
    num_pairs: int


class Example(msgspec.Struct, frozen=True, kw_only=True, tag="example"):
    """One row that a finding rests on."""

    case_id: str
    repeat_index: int
    side: str
    text: str


Evidence = (
    Divergence | TokenEvidence | ShiftEvidence | MetricEvidence | QuantileEvidence | PhaseEvidence | Example
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found out. `title` is a clause, `detail` whole sentences.

    `p_value` is adjusted for all tests of the Verdict; `n` is the number of units behind it.
    """

    status: Status
    part: Part
    title: str
    detail: str = ""
    gates: bool = True
    evidence: list[Evidence] = []
    p_value: float | None = None
    interval: Interval | None = None
    n: int | None = None


class SideSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Which Run stood on one side."""

    label: str
    run_id: str
    endpoint: str
    dialect: str
    model: str
    dtype: str | None
    faults: list[str]
    num_requests: int
    num_ok: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: a status, the sentence that gives the reason, and every Finding behind it.

    `false_alarm_rate` is the stated chance of "fail" when candidate and base are equal. `differences`
    are settings in which the two servers differ by their own account. `took_turns`: whether the sides ran at
    the same time or by turns; None when they could not be compared.
    """

    schema: int = 1
    status: Status
    reason: str
    findings: list[Finding]
    base: SideSummary
    candidate: SideSummary
    floor: SideSummary | None
    differences: list[str]
    took_turns: bool | None = None
    false_alarm_rate: float
    config: CompareConfig


def merge(statuses: Iterable[Status]) -> Status:
    """The most severe of them, "pass" without any."""
    return max(statuses, key=lambda status: SEVERITY[status], default="pass")


def status_of(findings: Iterable[Finding]) -> Status:
    """What the findings that gate add up to.

    The most severe, except that something invalid (a late client, an endpoint that fails) hides neither
    that something other than a latency fails, nor that the Runs cannot be compared.
    """
    gating = [finding for finding in findings if finding.gates]
    status = merge(finding.status for finding in gating)
    if status == "invalid":
        if any(finding.status == "fail" and finding.part != "latency" for finding in gating):
            return "fail"
        if any(finding.status == "unknown" and finding.part == "comparability" for finding in gating):
            return "unknown"
    return status


def noise_of(dtypes: Iterable[str | None], noise: Mapping[str, float] = DTYPE_NOISE) -> float:
    """Nats of rounding noise to expect between sides of these dtypes; the largest known for one unknown."""
    return max((noise.get(dtype or "", max(noise.values())) for dtype in dtypes), default=max(noise.values()))
