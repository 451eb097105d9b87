"""Which traces are kept: decided when a request comes, and once more when it has ended.

Owns: the two decisions and the standard variables that set them. Refuses to know: spans, HTTP. Invariants:
the decision at the head depends on the trace id alone, as OpenTelemetry's ratio sampler has it, so that all
processes of a trace decide alike; a caller's decision is obeyed unless the sampler ignores parents; a request
that failed or was slow is kept in any case when the trace began here, since then no parent is missing.
Source: https://opentelemetry.io/docs/specs/otel/trace/sdk/#traceidratiobased

Usage: `sampler = Sampler.from_environment(os.environ, fraction=None)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SAMPLER_VARIABLE = "OTEL_TRACES_SAMPLER"
FRACTION_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_PARENT_BASED = "parentbased_"


@dataclass(frozen=True, slots=True)
class Sampler:
    """`fraction` of the traces that begin here; of callers' those that they chose, or the same share."""

    fraction: float = 1.0
    obeys_parent: bool = True
    slow_ns: int | None = None
    """Requests that took this long are kept, None: being slow is no reason."""

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], *, fraction: float | None = None, slow_ns: int | None = None
    ) -> Sampler:
        """By OpenTelemetry's variables, `fraction` before them; ValueError when they cannot be read."""
        name = environ.get(SAMPLER_VARIABLE, "").strip() or f"{_PARENT_BASED}always_on"
        kind = name.removeprefix(_PARENT_BASED)
        if kind not in _SAMPLERS:
            known = ", ".join([*_SAMPLERS, *(_PARENT_BASED + one for one in _SAMPLERS)])
            raise ValueError(f"expected {SAMPLER_VARIABLE} as one of {known}, got {name!r}")
        if fraction is None:
            fraction = {"always_on": 1.0, "always_off": 0.0}.get(kind)
        if fraction is None:
            fraction = _fraction_of(environ.get(FRACTION_VARIABLE, "").strip() or "1")
        return cls(fraction, name.startswith(_PARENT_BASED), slow_ns)

    def head(self, trace_id: str, parent_is_sampled: bool | None) -> bool:
        """Whether to keep a trace, decided at its first request here; the parent's choice None: no parent."""
        if parent_is_sampled is not None and self.obeys_parent:
            return parent_is_sampled
        # The low 64 bits, which are random also in ids made of a time and a random part.
        return int(trace_id[16:], 16) < self.fraction * (1 << 64)

    def tail(self, *, sampled: bool, is_root: bool, has_failed: bool, duration_ns: int) -> bool:
        """Whether to keep it, now that it has ended."""
        is_slow = self.slow_ns is not None and duration_ns >= self.slow_ns
        return sampled or (is_root and (has_failed or is_slow))


def _fraction_of(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ValueError(f"expected {FRACTION_VARIABLE} as a fraction in 0..1, got {text!r}")
    return fraction
