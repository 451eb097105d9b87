"""Two Runs side by side: are they comparable, and do they answer, read and count the same?

Owns: the comparability gate and the comparisons that need no noise floor, because what they compare is a
function of the request or of the tokens. Refuses to know: divergence statistics, latencies.
Invariants: whatever makes a comparison meaningless gives "unknown" with the reason, never pass or fail.

Usage: `blockers = check_comparable(base, candidate)`.
"""

from __future__ import annotations

from collections.abc import Callable

from firstdiff.regression.pairing import both_ok
from firstdiff.regression.quoting import quoted
from firstdiff.regression.stats import discordant_p
from firstdiff.regression.summary import RunView
from firstdiff.regression.tokens import diff_replies
from firstdiff.regression.verdict import CompareConfig, Example, Finding, Part
from firstdiff.tracing.records import RequestRow, Sampling

_SAME = ("weights_sha256", "config_sha256", "tokenizer_sha256", "chat_template_sha256")
_SAMPLING = ("temperature", "top_k", "top_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos")
_MAX_DIFFERENCES = 12
_MAX_ERROR_CHARS = 500


def check_comparable(base: RunView, candidate: RunView) -> list[Finding]:
    """Reasons why nothing can be said about these two; empty when they may be compared."""
    one, other = base.manifest, candidate.manifest
    reasons = []
    if one.workload_sha256 != other.workload_sha256:
        reasons.append("they were asked different requests (workload_sha256 differs)")
    if one.identity is not None and other.identity is not None:
        different = [name for name in _SAME if getattr(one.identity, name) != getattr(other.identity, name)]
        if different:
            reasons.append(f"they serve different models ({', '.join(different)} differ)")
    elif one.model != other.model:
        reasons.append(f"they serve different models ({quoted(one.model)} and {quoted(other.model)})")
    reasons += _different_sampling(base, candidate)
    if not reasons and not base.rows.keys() & candidate.rows.keys():
        reasons.append("they have no request in common")
    return [
        Finding(status="unknown", part="comparability", title=f"the Runs cannot be compared: {reason}")
        for reason in reasons
    ]


def check_distinct(base: RunView, candidate: RunView) -> list[Finding]:
    """Unknown when both are one Run: that it equals itself says nothing about a server."""
    if base.manifest.run_id != candidate.manifest.run_id:
        return []
    title = f"the Runs cannot be compared: they are one Run, {quoted(base.manifest.run_id)}, given twice"
    return [Finding(status="unknown", part="comparability", title=title)]


def load_difference(base: RunView, candidate: RunView) -> str | None:
    """In which loads the sides were asked, as their manifests say, in words; None when in the same.

    Under different loads equal servers answer differently fast, so nothing can be said about latency. In an
    open loop the rate is the load, in a closed one the number of requests in flight.
    """
    one, other = base.manifest.workload, candidate.manifest.workload
    names = ["rate_per_s"]
    if one.get("rate_per_s") is None or other.get("rate_per_s") is None:
        names.append("concurrency")
    found = []
    for name in names:
        mine, theirs = one.get(name), other.get(name)
        if mine != theirs:
            words = [
                str(value) if isinstance(value, int | float) else quoted(str(value))
                for value in (mine, theirs)
            ]
            words = [
                "none" if value is None else text for value, text in zip((mine, theirs), words, strict=True)
            ]
            found.append(f"{name} {words[0]} and {words[1]}")
    return f"they were asked at different loads: {', '.join(found)}" if found else None


def _different_sampling(base: RunView, candidate: RunView) -> list[str]:
    """Sampling as the servers resolved it, where both logged it."""
    for key, one, other in both_ok(base, candidate):
        mine, theirs = base.logs.get(one.request_id), candidate.logs.get(other.request_id)
        if mine is None or theirs is None:
            continue
        names = [name for name in _SAMPLING if _field(mine.sampling, name) != _field(theirs.sampling, name)]
        if names:
            return [f"they sampled differently in case {quoted(key[0])} ({', '.join(names)} differ)"]
        if mine.sampling.temperature > 0 and mine.sampling.seed != theirs.sampling.seed:
            return [f"they sampled with different seeds in case {quoted(key[0])}: set one, or temperature 0"]
    return []


def _field(sampling: Sampling, name: str) -> object:
    return getattr(sampling, name)


def differences_of(base: RunView, candidate: RunView) -> list[str]:
    """Settings in which the two servers differ by their own account, as sentences."""
    one, other = base.manifest.identity, candidate.manifest.identity
    if one is None or other is None:
        return []
    found: list[str] = []
    for name in ("engine", "engine_version", "dtype", "device", "max_model_len"):
        _note(found, name, getattr(one, name), getattr(other, name))
    for title, mine, theirs in (
        ("engine_config", one.engine_config, other.engine_config),
        ("versions", one.versions, other.versions),
    ):
        for name in sorted(mine.keys() | theirs.keys()):
            _note(found, f"{title}.{name}", mine.get(name), theirs.get(name))
    _note(found, "faults", ", ".join(one.faults) or "none", ", ".join(other.faults) or "none")
    more = len(found) - _MAX_DIFFERENCES
    return found[:_MAX_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])


def _note(found: list[str], name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        found.append(f"{quoted(name)}: base {quoted(str(mine))}, candidate {quoted(str(theirs))}")


def compare_coverage(base: RunView, candidate: RunView) -> list[Finding]:
    """Unknown when one side has rows that the other lacks."""
    findings = []
    for one, other, sides in (
        (base, candidate, "base only"),
        (candidate, base, "candidate only"),
    ):
        missing = [key for key in one.rows if key not in other.rows]
        if missing:
            findings.append(
                Finding(
                    status="unknown",
                    part="rows",
                    title=f"{len(missing)} requests have a row of {sides}, the first in case "
                    f"{quoted(missing[0][0])} repeat {missing[0][1]}",
                    n=len(missing),
                )
            )
    return findings


def outcomes_p(base: RunView, candidate: RunView) -> float | None:
    """Exact test: does the candidate fail cases that base answers more often than the other way round?

    None when neither has a case that only it failed: there is nothing to test.
    """
    bad = [{key[0] for key, row in view.rows.items() if row.outcome != "ok"} for view in (base, candidate)]
    return discordant_p(len(bad[1] - bad[0]), len(bad[0] - bad[1]))


def judge_outcomes(
    base: RunView, candidate: RunView, p_value: float | None, config: CompareConfig
) -> list[Finding]:
    """Fail when the candidate fails more cases than base, invalid when an endpoint cannot be judged.

    fail: the candidate alone failed significantly more cases than base alone did; `p_value`, adjusted, is
    below alpha: with the defaults 8 cases, when base alone failed none.
    invalid: otherwise, when either side failed more than `max_failed_fraction` of its requests: too many to
    judge the rest, too few or too evenly spread to blame the candidate.
    pass: fewer failures than that. What the other parts find may still fail (verdict.status_of).
    """
    findings = []
    for side, view in (("base", base), ("candidate", candidate)):
        bad = [row for row in view.rows.values() if row.outcome != "ok"]
        share = len(bad) / max(1, len(view.rows))
        is_worse = side == "candidate" and p_value is not None and p_value < config.alpha
        if not bad:
            continue
        row = bad[0]
        title = f"{len(bad)} of {len(view.rows)} requests to {side} were not answered"
        words = quoted(row.error or "no error", 160)
        findings.append(
            Finding(
                status="fail" if is_worse else "invalid" if share > config.max_failed_fraction else "pass",
                part="outcomes",
                title=title,
                detail=f"The first is case {quoted(row.case_id)}: {row.outcome}, {words}.",
                evidence=[
                    Example(
                        case_id=row.case_id,
                        repeat_index=row.repeat_index,
                        side=side,
                        text=(row.error or "")[:_MAX_ERROR_CHARS],
                    )
                ],
                p_value=p_value if side == "candidate" else None,
                n=len(view.rows),
            )
        )
    if not findings:
        findings.append(
            Finding(
                status="pass",
                part="outcomes",
                title=f"all {len(candidate.rows)} requests were answered",
                p_value=p_value,
                n=len(candidate.rows),
            )
        )
    return findings


Difference = Callable[[RequestRow, RequestRow], str | None]
"""What differs between two answers that must be equal whatever the noise, in words; None when nothing."""


def prompt_difference(one: RequestRow, other: RequestRow) -> str | None:
    """Where one request became two prompts."""
    if one.prompt_token_ids is not None and other.prompt_token_ids is not None:
        mine, theirs = one.prompt_token_ids, other.prompt_token_ids
        if mine == theirs:
            return None
        short = min(len(mine), len(theirs))
        at = next((i for i in range(short) if mine[i] != theirs[i]), short)
        pair = [str(ids[at]) if at < len(ids) else "its end" for ids in (mine, theirs)]
        return f"at prompt token {at} base has {pair[0]}, candidate {pair[1]}"
    if one.usage is not None and other.usage is not None:
        counts = one.usage.prompt_tokens, other.usage.prompt_tokens
        if counts[0] != counts[1]:
            return f"base counts {counts[0]} prompt tokens, candidate {counts[1]}"
    return None


def is_miscounted(row: RequestRow) -> bool:
    """Whether usage and token ids of one answer contradict each other."""
    return (
        row.usage is not None
        and row.token_ids is not None
        and row.usage.completion_tokens != len(row.token_ids)
    )


def miscount_difference(one: RequestRow, other: RequestRow) -> str | None:
    """Where only the candidate reports another number of tokens than it sends."""
    if not is_miscounted(other) or is_miscounted(one) or other.usage is None or other.token_ids is None:
        return None
    return f"the candidate reports {other.usage.completion_tokens} tokens and sends {len(other.token_ids)}"


def reply_difference(one: RequestRow, other: RequestRow) -> str | None:
    """Where equal tokens became another text, or ended for another reason."""
    kind = diff_replies(one, other).other
    if kind == "text":
        return f"base's text is {quoted(one.text)}, the candidate's {quoted(other.text)}"
    if kind == "finish reason":
        return (
            f"base's finish reason is {quoted(str(one.finish_reason))}, "
            f"the candidate's {quoted(str(other.finish_reason))}"
        )
    return None


_EXACT: tuple[tuple[Part, str, Difference], ...] = (
    ("prompts", "requests became other prompt tokens", prompt_difference),
    ("tokens", "answers count their tokens wrongly", miscount_difference),
    ("tokens", "answers have equal tokens, but another text or finish reason", reply_difference),
)


def compare_exact(base: RunView, candidate: RunView, floor: RunView | None) -> list[Finding]:
    """Comparisons in which equal engines never differ: one difference fails, unless the twin has some too."""
    findings = []
    pairs = both_ok(base, candidate)
    twins = [] if floor is None else both_ok(base, floor)
    for part, title, difference in _EXACT:
        found = [(one, what) for _, one, other in pairs if (what := difference(one, other)) is not None]
        if not found:
            continue
        row, what = found[0]
        twin_too = any(difference(one, other) is not None for _, one, other in twins)
        findings.append(
            Finding(
                status="unknown" if twin_too else "fail",
                part=part,
                title=f"{len(found)} of {len(pairs)} {title}, first in case {quoted(row.case_id)}: {what}",
                detail="Base's twin differs from base in the same way." if twin_too else "",
                n=len(pairs),
            )
        )
    return findings


def check_logs(base: RunView, candidate: RunView) -> list[Finding]:
    """Fail when the candidate's own log names other tokens than the client got from it."""
    findings = []
    for side, view in (("base", base), ("candidate", candidate)):
        wrong = []
        for row in view.ok.values():
            log = view.logs.get(row.request_id)
            if log is None or row.token_ids is None or log.content == "hash":
                continue
            # A stop string ends the answer before the engine has heard of it, so the log may go on; or it may
            # have been cut, and says so.
            told = row.token_ids[: len(log.token_ids)] if log.truncated else row.token_ids
            if log.token_ids[: len(told)] != told:
                wrong.append(row)
        if wrong:
            findings.append(
                Finding(
                    status="fail" if side == "candidate" else "unknown",
                    part="tokens",
                    title=f"{len(wrong)} answers of {side} hold other tokens than its token log, the first "
                    f"in case {quoted(wrong[0].case_id)}",
                    n=len(wrong),
                )
            )
    return findings
