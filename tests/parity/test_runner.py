"""Drafts never change an answer; prompts are scored as transformers scores them; a bad item fails alone."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import STEPS_MAX, EngineUnderTest

from firstdiff.engine.batch import build_batch
from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.model_store import resolve
from firstdiff.engine.runner import PROMPT_ROWS, ModelRunner
from firstdiff.engine.sequence import ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.tracing.records import PromptLogprobsRow, Sampling, Structure, TokenRow

VOCAB_SIZE = 2048
PROMPTS = [[40 + i, 41, 42 + i, 40, 43] for i in range(4)]


def sampling(**changes) -> Sampling:
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 3, "max_tokens": 24}
    return Sampling(**(defaults | changes))


def new_engine(**settings) -> EngineUnderTest:
    defaults = {"model": "tiny-random", "block_size": 4, "max_model_len": 256}
    return EngineUnderTest(**(defaults | settings))


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    return new_engine()


def answers(engine: EngineUnderTest, sampling: Sampling) -> list[list[int]]:
    return [[row.token_id for row in rows] for rows in engine.generate(PROMPTS, sampling)]


def answers_with_drafts(
    engine: EngineUnderTest, sampling: Sampling, truth: list[list[int]], num_drafts: int, wrong_every: int
) -> tuple[list[list[int]], int]:
    """The answers, and in how many steps, when the truth is proposed with each n-th token wrong."""
    engine.rows.clear()
    for index, prompt in enumerate(PROMPTS):
        engine.engine.add(EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    num_steps = 0
    while engine.engine.has_work and num_steps < STEPS_MAX:
        for sequence in engine.engine.scheduler.running:
            known = truth[int(sequence.request_id[1:])]
            first = sequence.num_output_tokens
            drafts = known[first : first + num_drafts]
            sequence.draft_token_ids = [
                token_id if (first + i) % wrong_every else (token_id + 1) % VOCAB_SIZE
                for i, token_id in enumerate(drafts)
            ]
        engine.engine.step()
        num_steps += 1
    assert not engine.engine.has_work
    found: dict[str, list[int]] = {f"r{index}": [] for index in range(len(PROMPTS))}
    for row in engine.rows:
        if isinstance(row, TokenRow):
            assert row.token_index == len(found[row.request_id])
            found[row.request_id].append(row.token_id)
    return list(found.values()), num_steps


DRAFTED = [
    sampling(),
    sampling(temperature=1.0),
    sampling(temperature=1.2, top_p=0.8, frequency_penalty=0.9, presence_penalty=0.3, logit_bias={50: 4.0}),
    sampling(repetition_penalty=1.4, min_tokens=6, logit_bias={2: 20.0}),
    sampling(temperature=1.5, structure=Structure(kind="regex", spec=r"(\d{2}[a-f]|xyz){3,5}")),
    sampling(forced_token_ids=list(range(60, 84))),
    sampling(temperature=1.0, logprobs=3, logprobs_mode="processed_logprobs", stop_token_ids=[77]),
]


@pytest.mark.parametrize("each", DRAFTED, ids=range(len(DRAFTED)))
@pytest.mark.parametrize(("num_drafts", "wrong_every"), [(1, 10**9), (4, 10**9), (4, 3), (5, 1)])
def test_drafts_do_not_change_the_answer(engine, each, num_drafts, wrong_every):
    truth = answers(engine, each)
    found, num_steps = answers_with_drafts(engine, each, truth, num_drafts, wrong_every)
    assert found == truth
    longest = max(map(len, truth))
    if wrong_every > longest:
        assert num_steps <= 2 + longest / (num_drafts + 1) + longest % (num_drafts + 1)
    assert engine.engine.scheduler.pool.num_used_blocks == 0


def test_logprobs_of_drafted_tokens_are_those_of_the_same_tokens(engine):
    each = sampling(temperature=1.0, logprobs=5)
    plain = engine.generate(PROMPTS, each)
    answers_with_drafts(engine, each, [[row.token_id for row in rows] for rows in plain], 3, 4)
    by_place = {(row.request_id, row.token_index): row for row in engine.rows if isinstance(row, TokenRow)}
    for index, rows in enumerate(plain):
        for row in rows:
            drafted = by_place[f"r{index}", row.token_index]
            assert drafted.logprob == pytest.approx(row.logprob, abs=1e-4)
            assert len(drafted.top_logprobs) == len(row.top_logprobs)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(resolve("tiny-random").path, dtype=torch.float32).eval()


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist()


def score(engine: EngineUnderTest, prompts: list[list[int]], **changes) -> list[list[PromptLogprobsRow]]:
    fields = {"prompt_logprobs": 3, "max_tokens": 0} | changes
    engine.generate(prompts, sampling(**fields))
    rows = [row for row in engine.rows if isinstance(row, PromptLogprobsRow)]
    return [[row for row in rows if row.request_id == f"r{i}"] for i in range(len(prompts))]


def joined(rows: list[PromptLogprobsRow], start: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Values and tops of one request, after a check that its rows follow without gap."""
    values: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    for row in rows:
        assert row.start == start + len(values)
        assert len(row.logprobs) == len(row.top_logprobs) > 0
        values += row.logprobs
        tops += row.top_logprobs
    return values, tops


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"num_blocks": 44, "max_model_len": 160, "max_num_batched_tokens": 64},
    ],
    ids=["whole", "chunked", "tight"],
)
@pytest.mark.parametrize("max_tokens", [0, 9])
def test_prompts_are_scored_as_transformers_scores_them(reference, settings, max_tokens):
    engine = new_engine(**settings)
    prompts = [prompt_of(n) for n in (2, 5, PROMPT_ROWS + 1, PROMPT_ROWS + 2, 130)]
    for _ in range(2):  # the second time the blocks are cached
        scored = score(engine, prompts, max_tokens=max_tokens)
        for prompt, rows in zip(prompts, scored, strict=True):
            values, tops = joined(rows, 1)
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt])).logits[0]
            expected = torch.log_softmax(logits, -1)[torch.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(values, expected.numpy(), atol=2e-4)
            for token_id, value, top in zip(prompt[1:], values, tops, strict=True):
                assert dict(top)[token_id] == value
                assert 3 <= len(top) <= 4
    assert engine.engine.scheduler.pool.num_used_blocks == 0


def test_only_what_is_wanted_of_a_prompt_is_scored(engine):
    prompt = prompt_of(90)
    [rows] = score(engine, [prompt])
    everything, _ = joined(rows, 1)
    [rows] = score(engine, [prompt], prompt_logprobs_start=70)
    values, _ = joined(rows, 70)
    assert values == pytest.approx(everything[69:], abs=1e-4)
    assert engine.finished[0].num_cached_tokens > 0
    [rows] = score(engine, [prompt], prompt_logprobs=0)
    assert {len(top) for row in rows for top in row.top_logprobs} == {1}
    assert score(engine, [[5]]) == [[]]
    assert score(engine, [prompt], prompt_logprobs=None) == [[]]


def test_scores_are_the_models_own_whatever_the_mode(engine):
    prompt = prompt_of(20)
    fields = {"temperature": 3.0, "top_k": 1, "logprobs_mode": "processed_logprobs", "max_tokens": 1}
    assert score(engine, [prompt], **fields) == score(engine, [prompt], max_tokens=1)


class FakeDecoder:
    """Logits are a row of a table by token id; row 9 is NaN. It remembers how many rows it made at once."""

    def __init__(self) -> None:
        self.table = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
        self.table[9] = float("nan")
        self.rows_made: list[int] = []

    def forward(self, batch, attention):
        return batch.input_ids[batch.sampled_rows][:, None].float()

    def logits(self, hidden):
        self.rows_made.append(len(hidden))
        return self.table[hidden[:, 0].long()]


def item(prompt: list[int], **changes) -> ScheduledSequence:
    fields = sampling(**changes)
    sequence = Sequence(request_id="r", prompt_token_ids=prompt, sampling=fields, arrived_ns=0)
    sequence.block_table = list(range(200))
    sequence.num_prompt_logprobs = fields.prompt_logprobs_start
    return ScheduledSequence(sequence, 0, len(prompt), fields.max_tokens > 0)


def run(items: list[ScheduledSequence]):
    decoder = FakeDecoder()
    runner = ModelRunner(
        decoder,
        None,
        lambda batch: build_batch(batch, block_size=4),
        eos_token_ids=frozenset({2}),
        structures=None,
    )
    return runner.execute(ScheduledBatch(0, items, 0, 0, 0)), decoder


def test_what_is_wrong_with_one_item_fails_that_item():
    good, other = item([1, 2, 3], temperature=1.0, logprobs=2), item([4, 5])
    items = [
        good,
        item([1, 9]),
        item([9, 1], prompt_logprobs=0),
        item([1, 2], logit_bias={16: 1.0}),
        item([1, 2], forced_token_ids=[16]),
        other,
    ]
    output, _ = run(items)
    assert {index: reason.split(":")[0] for index, reason in output.failures.items()} == {
        1: "FloatingPointError",
        2: "FloatingPointError",
        3: "ValueError",
        4: "ValueError",
    }
    assert [len(tokens) for tokens in output.tokens] == [1, 0, 0, 0, 0, 1]
    assert output.prompt_logprobs == {}
    alone = [run([each])[0].tokens[0] for each in (good, other)]
    assert [output.tokens[0], output.tokens[5]] == alone


def test_prompts_are_scored_in_bounded_slices():
    prompt = [1 + i % 8 for i in range(3 * PROMPT_ROWS + 5)]
    output, decoder = run([item(prompt, prompt_logprobs=1), item(prompt, prompt_logprobs=1, max_tokens=0)])
    assert max(decoder.rows_made) == PROMPT_ROWS
    assert sum(decoder.rows_made) == 1 + 2 * (len(prompt) - 1)
    assert [len(tokens) for tokens in output.tokens] == [1, 0]
    for entries in output.prompt_logprobs.values():
        expected = torch.log_softmax(decoder.table, -1)
        assert [entry.token_id for entry in entries] == prompt[1:]
        assert [entry.logprob for entry in entries] == [
            float(expected[before, token_id]) for before, token_id in pairwise(prompt)
        ]
