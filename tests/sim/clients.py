"""The clients of a simulated engine: what they ask, what they must get, what they have got."""

from __future__ import annotations

from random import Random

from books import Rank
from swarm import Swarm
from symbolic_runner import NUM_BEYOND, chain, expected_answer, prompt_logprob

from firstdiff.engine.engine import EngineRequest
from firstdiff.tracing.records import FinishReason, PromptLogprobsRow, Sampling, StepRow, TokenRow


class Client:
    """A request in flight and what is known of it outside the engine."""

    __slots__ = (
        "_hashes",
        "abort_reason",
        "expected_reason",
        "known_ids",
        "num_cached_tokens",
        "num_expected",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_tokens",
        "prompt",
        "rank",
        "request",
    )

    def __init__(self, request: EngineRequest, rank: Rank, swarm: Swarm) -> None:
        self.request = request
        self.rank = rank
        self.prompt = request.prompt_token_ids
        self._hashes = chain(self.prompt, [])
        self.known_ids, self.num_expected, self.expected_reason = expected_answer(
            self._hashes,
            request.sampling,
            vocab_size=swarm.vocab_size,
            eos_token_ids=swarm.eos_token_ids,
            num_beyond=NUM_BEYOND if swarm.draft_fraction else 0,
        )
        self.num_tokens = 0
        self.num_prompt_logprobs = request.sampling.prompt_logprobs_start
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.abort_reason: FinishReason | None = None

    @property
    def expected_ids(self) -> list[int]:
        return self.known_ids[: self.num_expected]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    def take_token(self, row: TokenRow, step: StepRow) -> None:
        """The next token: the right one, with the right stamps, and not one too many."""
        index = self.num_tokens
        assert index < self.num_expected, "a token after the end"
        assert row.token_index == index
        assert row.token_id == self.known_ids[index], "another token than alone"
        assert row.step_index == step.step_index
        assert row.batch_size == step.batch_size
        assert step.started_ns < row.emitted_ns <= step.ended_ns
        if not index:
            self.check_prompt_logprobs_complete()
        self.num_tokens = index + 1

    def take_prompt_logprobs(self, row: PromptLogprobsRow) -> None:
        """The next entries without gap or repetition, each the one of its token."""
        assert self.wants_prompt_logprobs
        assert row.start == self.num_prompt_logprobs
        assert row.logprobs
        assert len(row.logprobs) == len(row.top_logprobs)
        end = row.start + len(row.logprobs)
        assert row.logprobs == [prompt_logprob(self._hashes[p - 1]) for p in range(row.start, end)]
        self.num_prompt_logprobs = end

    def check_prompt_logprobs_complete(self) -> None:
        assert not self.wants_prompt_logprobs or self.num_prompt_logprobs >= len(self.prompt)

    def proposal(self, rng: Random, swarm: Swarm) -> list[int]:
        """Drafts: right ones, also beyond the end, then some wrong ones; none, or more than can be used."""
        index = self.num_tokens
        num_right = int(rng.random() * (swarm.draft_max + 1))
        drafts = self.known_ids[index : index + num_right]
        while len(drafts) < swarm.draft_max and rng.random() < 0.5:
            drafts.append(int(rng.random() * swarm.vocab_size))
        return drafts


def draw_request(rng: Random, swarm: Swarm, histories: list[list[int]], request_id: str) -> EngineRequest:
    """Often a known beginning, cut at a multiple of the block size -1, 0 or +1, and a fresh end."""
    draw = rng.random
    prompt: list[int] = []
    if histories and draw() < swarm.shared_fraction:
        # Mostly a recent one: it may still be cached, or be computed at this moment.
        is_recent = draw() < 0.8 and len(histories) > 5
        history = histories[-1 - int(draw() * (5 if is_recent else len(histories)))]
        cut = swarm.block_size * int(draw() * (len(history) // swarm.block_size + 2))
        cut += (-1, 0, 0, 1)[int(draw() * 4)]
        prompt = history[:cut] if cut > 0 else []
    is_short = prompt and draw() < 0.5
    num_fresh = int(draw() * 2) if is_short else 1 + int(draw() * swarm.fresh_max)
    prompt = prompt + list(rng.randbytes(num_fresh).translate(swarm.token_by_byte))
    prompt = prompt[: swarm.max_model_len + (1, 0, -1, -8, -8)[int(draw() * 5)]] or [0]
    is_salted, is_uncached = draw() < swarm.salt_fraction, draw() < swarm.uncached_fraction
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=draw_sampling(rng, swarm, len(prompt)),
        priority=int(draw() * swarm.num_priorities) - swarm.num_priorities // 2,
        cache_salt="ab"[int(draw() * 2)] if is_salted else None,
        use_prefix_cache=not is_uncached,
    )


def draw_sampling(rng: Random, swarm: Swarm, num_prompt: int) -> Sampling:
    draw = rng.random
    room = swarm.max_model_len - num_prompt
    if room > swarm.output_max:
        room = swarm.output_max
    if room < 1:
        room = 1
    max_tokens = (1, room, 1 + int(draw() * room))[int(draw() * 3)]
    if draw() < swarm.sampleless_fraction:
        max_tokens = 0
    stops = draw() < swarm.stop_fraction
    forced: list[int] | None = None
    if max_tokens and draw() < swarm.forced_fraction:
        forced = list(rng.randbytes(max_tokens).translate(swarm.token_by_byte))
    return Sampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=int(draw() * 2),
        max_tokens=max_tokens,
        min_tokens=int(draw() * (max_tokens + 1)) if draw() < 0.1 else 0,
        stop_token_ids=[int(draw() * swarm.vocab_size)] if stops else [],
        ignore_eos=draw() < swarm.ignore_eos_fraction,
        forced_token_ids=forced,
        prompt_logprobs=0 if draw() < swarm.prompt_logprobs_fraction else None,
        prompt_logprobs_start=1 + int(draw() * num_prompt * 1.1) if draw() < 0.5 else 1,
    )


def reuse_probes(size: int) -> list[tuple[EngineRequest, bool]]:
    """Prompts of two blocks and a token, and whether the blocks must be known by then.

    Some have an equal second block after another first one, or an equal beginning under a salt.
    """
    sampling = Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=0)
    first, other = [0] * size + [2] * size + [0], [1] * size + [2] * size + [0]
    probes: list[tuple[list[int], str | None, bool]] = [
        (first, None, False),
        (other, None, False),
        (first, "c", False),
        (first, None, True),
        (first, "c", True),
    ]
    return [
        (
            EngineRequest(
                request_id=f"probe{index}", prompt_token_ids=prompt, sampling=sampling, cache_salt=salt
            ),
            is_known,
        )
        for index, (prompt, salt, is_known) in enumerate(probes)
    ]
