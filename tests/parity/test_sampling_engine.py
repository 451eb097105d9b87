"""Every sampling field has its effect on what a whole engine emits."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest, ids_of

from firstdiff.engine.tiny_model import VOCAB_SIZE
from firstdiff.tracing.records import Sampling, TokenRow

PROMPT = [40, 41, 42, 40, 43]
EOS = (0, 2)
NUM_TOKENS = 24


def sampling(**changes) -> Sampling:
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 3, "max_tokens": NUM_TOKENS}
    return Sampling(**(defaults | changes))


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    return EngineUnderTest(model="tiny-random", block_size=4, max_model_len=128)


def generate(engine: EngineUnderTest, **changes) -> list[TokenRow]:
    return engine.generate([PROMPT], sampling(**changes))[0]


def tokens(engine: EngineUnderTest, **changes) -> list[int]:
    return [row.token_id for row in generate(engine, **changes)]


def reference(raw: np.ndarray, output: list[int], fields: dict) -> np.ndarray:
    """Processed log-probabilities [V] from the model's own: the definitions, one after the other."""
    logits = raw.copy()
    if len(output) < fields.get("min_tokens", 0):
        logits[[*EOS, *fields.get("stop_token_ids", [])]] = -np.inf
    for token_id, bias in fields.get("logit_bias", {}).items():
        logits[token_id] += bias
    for token_id in {*PROMPT, *output}:
        penalty = fields.get("repetition_penalty", 1.0)
        logits[token_id] *= 1 / penalty if logits[token_id] > 0 else penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= fields.get("frequency_penalty", 0.0) * count
        logits[token_id] -= fields.get("presence_penalty", 0.0)
    logits /= fields.get("temperature", 0.0) or 1.0
    probs = np.exp(logits - logits.max())
    probs[probs < fields.get("min_p", 0.0)] = 0.0
    order = np.argsort(-probs, kind="stable")
    probs[order[fields.get("top_k") or VOCAB_SIZE :]] = 0.0
    mass_before = np.cumsum(probs[order]) / probs.sum() - probs[order] / probs.sum()
    if fields.get("top_p", 1.0) < 1.0:
        probs[order[mass_before >= fields["top_p"]]] = 0.0
    with np.errstate(divide="ignore"):
        return np.log(probs / probs.sum())


FIELDS = [
    {"temperature": 1.5},
    {"temperature": 0.4},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.05},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"logit_bias": {77: 6.0, 78: 6.5, 1000: -100.0}},
    {"min_tokens": 10, "stop_token_ids": [77], "logit_bias": {0: 30.0, 77: 30.0}, "ignore_eos": True},
    {
        "temperature": 1.3,
        "top_k": 60,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {90: 3.0},
        "min_tokens": 4,
    },
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(fields))
def test_the_processed_distribution_is_the_definition_of_its_fields(engine, fields):
    """The raw one comes from replaying the same tokens; all 2048 values of both are compared.

    A constant separates log-probabilities from logits, which no field but the repetition penalty sees.
    """
    everything = {"logprobs": VOCAB_SIZE}
    rows = generate(engine, **everything, logprobs_mode="processed_logprobs", **fields)
    output = [row.token_id for row in rows]
    replayed = generate(engine, **everything, forced_token_ids=output, max_tokens=len(output))
    assert [row.token_id for row in replayed] == output
    for i, (row, raw_row) in enumerate(zip(rows, replayed, strict=True)):
        raw = np.full(VOCAB_SIZE, np.nan)
        for token_id, value in raw_row.top_logprobs:
            raw[token_id] = value
        expected = reference(raw, output[:i], fields)
        got = np.full(VOCAB_SIZE, -np.inf)
        for token_id, value in row.top_logprobs:
            got[token_id] = value
        disagree = np.isfinite(got) != np.isfinite(expected)
        # fp32 logits and log-probabilities round differently: a token may sit on a bound.
        assert disagree.sum() <= 2
        np.testing.assert_allclose(got[~disagree], expected[~disagree], atol=2e-4)
        assert row.logprob == dict(row.top_logprobs)[row.token_id]


def test_the_repetition_penalty_divides_and_multiplies_logits(engine):
    plain = tokens(engine)
    assert len(set(tokens(engine, repetition_penalty=1.9))) > len(set(plain))
    assert len({*PROMPT} & {*tokens(engine, repetition_penalty=0.3)}) > 0


def test_penalties_change_counts(engine):
    free = Counter(tokens(engine, temperature=0.3))
    for field, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0)):
        assert len(Counter(tokens(engine, temperature=0.3, **{field: value}))) > len(free)
    assert max(Counter(tokens(engine, frequency_penalty=-2.0)).values()) > NUM_TOKENS / 2


def test_truncation_to_one_token_is_greedy(engine):
    greedy = tokens(engine)
    for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert tokens(engine, temperature=1.5, **fields) == greedy
    assert tokens(engine, temperature=1.5) != greedy


def test_the_seed_decides_and_nothing_else(engine):
    first = tokens(engine, temperature=1.0)
    assert tokens(engine, temperature=1.0) == first
    assert tokens(engine, temperature=1.0, seed=4) != first
    together = engine.generate([PROMPT] * 3, sampling(temperature=1.0))
    assert ids_of(together) == [first] * 3


def test_bias_forces_and_bans(engine):
    assert tokens(engine, logit_bias={99: 100.0}) == [99] * NUM_TOKENS
    greedy = tokens(engine)
    banned = dict.fromkeys(greedy, -100.0)
    assert not {*greedy} & {*tokens(engine, logit_bias=banned)}


def test_eos_and_stop_tokens_end_after_min_tokens(engine):
    wants_eos = {"logit_bias": {2: 50.0, 77: 40.0}}
    assert tokens(engine, **wants_eos) == [2]
    assert tokens(engine, **wants_eos, ignore_eos=True) == [2] * NUM_TOKENS
    assert tokens(engine, **wants_eos, min_tokens=5) == [77] * 5 + [2]
    assert tokens(engine, logit_bias={77: 50.0}, stop_token_ids=[77]) == [77]
    late = tokens(engine, logit_bias={77: 50.0, 78: 40.0}, stop_token_ids=[77], min_tokens=3)
    assert late == [78, 78, 78, 77]


def test_max_tokens_bounds_the_answer(engine):
    assert len(tokens(engine, max_tokens=1)) == 1
    assert tokens(engine, max_tokens=0) == []
    assert engine.finished[0].finish_reason == "length"


def test_forced_tokens_are_emitted_whatever_they_are(engine):
    forced = [77, 2, 0, 5]
    rows = generate(engine, forced_token_ids=forced, max_tokens=4, logprobs=1)
    assert [row.token_id for row in rows] == forced
    free = generate(engine, logprobs=VOCAB_SIZE)
    assert rows[0].logprob == dict(free[0].top_logprobs)[77]
    own = [row.token_id for row in free]
    replayed = generate(engine, forced_token_ids=own, max_tokens=len(own), logprobs=0)
    assert [row.logprob for row in replayed] == [row.logprob for row in free]


def test_logprobs_are_counted_and_raw_by_default(engine):
    fields = {"temperature": 1.0, "top_k": 2, "frequency_penalty": 0.5}
    for count in (0, 1, 5):
        for row in generate(engine, logprobs=count, **fields):
            is_top = row.token_id in [token_id for token_id, _ in row.top_logprobs[:count]]
            assert len(row.top_logprobs) == count + (not is_top)
    assert all(row.logprob is None for row in generate(engine, **fields))
    processed = generate(engine, logprobs=9, logprobs_mode="processed_logprobs", **fields)
    assert {len(row.top_logprobs) for row in processed} == {2}
    raw = generate(engine, logprobs=9, **fields)
    assert {len(row.top_logprobs) for row in raw} <= {9, 10}
    assert [row.token_id for row in raw] == [row.token_id for row in processed]
