"""The engine: requests in, rows out, one step at a time.

Owns: the order of a step (schedule, execute, commit, emit) and the rows that it emits. Refuses to know:
HTTP, text, torch, who reads the rows. Invariants: every request that `add` took ends with exactly one
EngineRequestRow, after all its TokenRows; a StepRow closes each step that had work; all tokens of a step
carry the stamp of the moment the runner gave them back; a runner that raises fails the sequences of that
batch only, and one that says which items failed fails those only.

Usage: `engine.add(request)`, then `while engine.has_work: engine.step()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.scheduler import Finished, Scheduler
from firstdiff.engine.sequence import RunnerOutput, ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import (
    EngineRequestRow,
    FinishReason,
    LoadRow,
    PromptLogprobsRow,
    Row,
    Sampling,
    StepRow,
    TokenRow,
)

Emit = Callable[[Row], None]

TOKEN_ID_MAX = (1 << 31) - 1


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked: token ids in, sampling as resolved; the rest as in Sequence.

    `follower_ids` are requests that will be added later: this one is taken only where there is room for
    all, and they have their places from then on, until each is added or aborted.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    follower_ids: tuple[str, ...] = ()


class QueueFullError(ValueError):
    """As many requests are in flight as the config allows; a later try may succeed."""


class Runner(Protocol):
    """The model, one step at a time."""

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        """The tokens of each item, in order: none where it does not sample."""
        ...


class LLMEngine:
    """A scheduler and a runner, stepped by its owner; not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        emit: Emit,
        clock: Clock,
    ) -> None:
        self.scheduler = Scheduler(
            config, num_blocks=num_blocks, max_model_len=max_model_len, eos_token_ids=eos_token_ids
        )
        self._runner = runner
        self._emit = emit
        self._clock = clock
        self._num_requests_max = config.max_num_seqs + config.max_num_waiting
        self._awaited: set[str] = set()
        """Followers that have a place and were not added yet."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self.scheduler.has_work

    @property
    def num_requests(self) -> int:
        """Requests in flight: queued or running."""
        return self.scheduler.num_sequences

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is in flight."""
        return request_id in self.scheduler

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, between two steps; how many blocks could be found until now.

        Running requests go on with what they hold, but none of it is found by others any more.
        """
        return self.scheduler.reset_prefix_cache()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; ValueError when it can never run, QueueFullError when it cannot run now.

        At most `max_num_seqs + max_num_waiting` requests are in flight or have a place kept for them.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise ValueError("expected a prompt of at least 1 token, got none")
        if not 0 <= min(prompt) <= max(prompt) <= TOKEN_ID_MAX:
            raise ValueError(
                f"expected prompt token ids in 0..{TOKEN_ID_MAX}, got {min(prompt)}..{max(prompt)}"
            )
        num_wanted = 1 + len(request.follower_ids)
        if num_wanted > self._num_requests_max:
            raise ValueError(
                f"expected at most {self._num_requests_max} answers to a request, as may be in flight, got "
                f"{num_wanted}: ask for fewer or raise --max-num-waiting"
            )
        num_free = self._num_requests_max - self.scheduler.num_sequences - len(self._awaited)
        # Refusing a follower would end an answer that has begun.
        if num_free < num_wanted and request.request_id not in self._awaited:
            raise QueueFullError(
                f"expected room for {num_wanted} more of {self._num_requests_max} requests in "
                f"flight, got {num_free}: try again later or raise --max-num-waiting"
            )
        self.scheduler.add(
            Sequence(
                request_id=request.request_id,
                prompt_token_ids=prompt,
                sampling=request.sampling,
                arrived_ns=self._clock.now_ns(),
                priority=request.priority,
                cache_salt=request.cache_salt,
                use_prefix_cache=request.use_prefix_cache,
            )
        )
        self._awaited.discard(request.request_id)
        self._awaited.update(request.follower_ids)

    def abort(self, request_id: str, *, reason: FinishReason = "abort") -> bool:
        """End a request now, blocks freed; False when it is not in flight.

        Emits its EngineRequestRow, then a LoadRow. `reason` "stop" is a stop string that the caller saw,
        "abort" a caller that lost interest. The place of a follower that will not be added is given up,
        which emits nothing.
        """
        self._awaited.discard(request_id)
        sequence = self.scheduler.abort(request_id)
        if sequence is None:
            return False
        self._emit(_request_row(sequence, reason, self._clock.now_ns(), error=None))
        # No step may follow that would say what is left.
        self._emit(
            LoadRow(
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_used_blocks=self.scheduler.pool.num_used_blocks,
                num_blocks=self.scheduler.pool.num_blocks,
            )
        )
        return True

    def step(self) -> list[TokenRow]:
        """Compute one batch; the rows of its tokens, in batch order. No work: nothing happens, none.

        Emits PromptLogprobsRows, TokenRows, an EngineRequestRow for each request that ended, a StepRow.
        """
        scheduler, now_ns, emit = self.scheduler, self._clock.now_ns, self._emit
        started_ns = now_ns()
        num_queried, num_hit = scheduler.num_prefix_queried_tokens, scheduler.num_prefix_hit_tokens
        batch = scheduler.schedule(started_ns)
        if batch is None:
            return []
        scheduled_ns = now_ns()
        output, error = self._execute(batch)
        executed_ns = now_ns()
        prompt_rows: list[PromptLogprobsRow] = []
        if output is None:
            rows: list[TokenRow] = []
            ended = [
                _request_row(sequence, "error", executed_ns, error=error)
                for sequence in scheduler.fail(batch)
            ]
        else:
            if output.prompt_logprobs:
                prompt_rows = _prompt_rows(batch, output)
            finished = scheduler.commit(batch, output, executed_ns)
            rows = _token_rows(batch, output, executed_ns)
            ended = _end_rows(batch, output, finished, executed_ns) if finished else []
        for group in (prompt_rows, rows, ended):
            for row in group:
                emit(row)
        emit(
            StepRow(
                step_index=batch.step_index,
                started_ns=started_ns,
                ended_ns=now_ns(),
                schedule_ns=scheduled_ns - started_ns,
                execute_ns=executed_ns - scheduled_ns,
                batch_size=len(batch.items),
                num_prefill_tokens=batch.num_prefill_tokens,
                num_decode_tokens=batch.num_decode_tokens,
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
                num_preemptions=batch.num_preemptions,
                num_used_blocks=scheduler.pool.num_used_blocks,
                num_blocks=scheduler.pool.num_blocks,
                num_prefix_queried_tokens=scheduler.num_prefix_queried_tokens - num_queried,
                num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens - num_hit,
            )
        )
        return rows

    def _execute(self, batch: ScheduledBatch) -> tuple[RunnerOutput | None, str | None]:
        """The runner's results, or None and what went wrong."""
        try:
            output = self._runner.execute(batch)
            _check_output(batch, output)
        except Exception as error:
            logging.getLogger(__name__).exception("step %d failed", batch.step_index)
            return None, f"{type(error).__name__}: {error}"
        return output, None


def _check_output(batch: ScheduledBatch, output: RunnerOutput) -> None:
    """ValueError unless `output` has what each item asked for and no more."""
    items, tokens, failures = batch.items, output.tokens, output.failures
    if failures and not 0 <= min(failures) <= max(failures) < len(items):
        raise ValueError(f"expected failures of {len(items)} items, got them at {sorted(failures)}")
    if len(items) != len(tokens):
        raise ValueError(f"expected answers to {len(items)} items, got {len(tokens)}")
    for index, item in enumerate(items):
        answer = tokens[index]
        if bool(answer) != (item.samples and index not in failures):
            raise ValueError(
                f"expected {'no' if answer else 'a'} token at item {index} of {len(items)}, "
                f"got {len(answer)}: the runner answers item by item"
            )
        if len(answer) > 1:
            accepted = [token.token_id for token in answer[:-1]]
            drafts = item.sequence.draft_token_ids
            if len(accepted) > item.num_draft_tokens or accepted != drafts[: len(accepted)]:
                raise ValueError(f"expected accepted drafts of {drafts} at item {index}, got {accepted}")
        if item.sequence.sampling.prompt_logprobs is not None and index not in failures:
            num_prompt_logprobs = _num_prompt_logprobs(item)
            entries = output.prompt_logprobs.get(index, [])
            if len(entries) != num_prompt_logprobs or any(entry.logprob is None for entry in entries):
                raise ValueError(
                    f"expected {num_prompt_logprobs} prompt log-probabilities at item {index}, "
                    f"got {len(entries)} or empty ones"
                )
        elif index in output.prompt_logprobs:
            raise ValueError(f"expected no prompt log-probabilities at item {index}, got some")


def _num_prompt_logprobs(item: ScheduledSequence) -> int:
    """How many prompt tokens, of those still wanted, come after a token that the item computes."""
    sequence = item.sequence
    end = item.start + item.num_scheduled_tokens + 1
    return max(0, min(end, sequence.num_prompt_tokens) - sequence.num_prompt_logprobs)


def _prompt_rows(batch: ScheduledBatch, output: RunnerOutput) -> list[PromptLogprobsRow]:
    """A row for each item that brought log-probabilities of its prompt; counts them as given out."""
    rows: list[PromptLogprobsRow] = []
    for index, entries in output.prompt_logprobs.items():
        if not entries:
            continue
        sequence = batch.items[index].sequence
        row = PromptLogprobsRow(
            request_id=sequence.request_id,
            start=sequence.num_prompt_logprobs,
            logprobs=[entry.logprob for entry in entries if entry.logprob is not None],
            top_logprobs=[entry.top_logprobs for entry in entries],
        )
        assert len(row.logprobs) == len(entries)
        sequence.num_prompt_logprobs += len(entries)
        rows.append(row)
    return rows


def _token_rows(batch: ScheduledBatch, output: RunnerOutput, emitted_ns: int) -> list[TokenRow]:
    """A row for each token that `commit` has appended to its sequence, which may be fewer than came."""
    batch_size, step_index = len(batch.items), batch.step_index
    rows: list[TokenRow] = []
    for index, item in enumerate(batch.items):
        tokens = output.tokens[index]
        if not tokens:
            continue
        sequence = item.sequence
        num_known = item.start + item.num_scheduled_tokens - item.num_draft_tokens
        first_index = num_known - len(sequence.prompt_token_ids)
        for token_index, token in enumerate(tokens[: len(sequence.token_ids) - num_known], first_index):
            rows.append(
                TokenRow(
                    request_id=sequence.request_id,
                    token_index=token_index,
                    token_id=token.token_id,
                    emitted_ns=emitted_ns,
                    step_index=step_index,
                    batch_size=batch_size,
                    logprob=token.logprob,
                    top_logprobs=token.top_logprobs,
                    num_cached_tokens=None if token_index else sequence.num_cached_tokens,
                )
            )
    return rows


def _end_rows(
    batch: ScheduledBatch, output: RunnerOutput, finished: Finished, finished_ns: int
) -> list[EngineRequestRow]:
    errors = {batch.items[index].sequence: why for index, why in output.failures.items()}
    return [
        _request_row(sequence, reason, finished_ns, error=errors.get(sequence))
        for sequence, reason in finished
    ]


def _request_row(
    sequence: Sequence, reason: FinishReason, finished_ns: int, *, error: str | None
) -> EngineRequestRow:
    return EngineRequestRow(
        request_id=sequence.request_id,
        prompt_token_ids=sequence.prompt_token_ids,
        sampling=sequence.sampling,
        arrived_ns=sequence.arrived_ns,
        first_scheduled_ns=sequence.first_scheduled_ns,
        first_token_ns=sequence.first_token_ns,
        finished_ns=finished_ns,
        finish_reason=reason,
        error=error,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
        prefill_chunks=sequence.prefill_chunks,
        num_preemptions=sequence.num_preemptions,
        preemptions=sequence.preemptions,
        priority=sequence.priority,
    )
