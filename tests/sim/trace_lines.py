"""What a replay prints: a line for each request, batch and step."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import msgspec

from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.sequence import ScheduledBatch, Sequence
from firstdiff.tracing.records import EngineRequestRow, PromptLogprobsRow, Row, Sampling, TokenRow

_ALWAYS_SET = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=-1, max_tokens=-1)


def describe_request(request: EngineRequest) -> str:
    """Its prompt and all that is not as usual."""
    plain = EngineRequest(request_id="", prompt_token_ids=[], sampling=_ALWAYS_SET)
    set_fields = _changed(request, plain, but=("request_id", "prompt_token_ids", "sampling"))
    set_fields |= _changed(request.sampling, _ALWAYS_SET)
    wishes = ", ".join(f"{name} {value}" for name, value in set_fields.items())
    return f"{request.request_id}: prompt {request.prompt_token_ids}, {wishes}"


def describe_batch(batch: ScheduledBatch, pushed_out: list[Sequence]) -> str:
    """Who computes which tokens in which blocks, and who had to go for it."""
    items = []
    for item in batch.items:
        num_drafts, end = item.num_draft_tokens, item.start + item.num_scheduled_tokens
        drafts = f" + drafts {item.sequence.draft_token_ids}" if num_drafts else ""
        samples = " samples" if item.samples else ""
        table = item.sequence.block_table
        name = item.sequence.request_id
        items.append(f"{name} {item.start}..{end - num_drafts}{drafts}{samples} in {table}")
    out = f" (pushed out: {' '.join(s.request_id for s in pushed_out)})" if pushed_out else ""
    return f"step {batch.step_index}{out}: {'; '.join(items)}"


def describe_rows(rows: list[Row]) -> str:
    """What the step gave out."""
    prompts = [
        f"{row.request_id} prompt {row.start}..{row.start + len(row.logprobs)}"
        for row in rows
        if isinstance(row, PromptLogprobsRow)
    ]
    tokens = [
        f"{row.request_id}#{row.token_index}={row.token_id}" for row in rows if isinstance(row, TokenRow)
    ]
    ends = [
        f"{row.request_id} ends: {row.finish_reason}" for row in rows if isinstance(row, EngineRequestRow)
    ]
    return f"  -> {', '.join([*prompts, *tokens, *ends]) or 'nothing yet'}"


def _changed(value: msgspec.Struct, plain: msgspec.Struct, but: Listed[str] = ()) -> dict[str, Any]:
    pairs = zip(value.__struct_fields__, msgspec.structs.astuple(value), strict=True)
    return {name: got for name, got in pairs if name not in but and got != getattr(plain, name)}
