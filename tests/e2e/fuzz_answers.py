"""What must hold of any answer of a generation, read whole or joined from a stream.

Usage: `answer = read_answer(path, raw); check_answer_to(path, body, answer, tokenizer)`.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from fuzz_bodies import CHAT, VOCAB_SIZE, is_many
from test_structured_answers import check_beginning, check_whole

from firstdiff.engine.openai_fields import Fields
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_structure import parse_structure
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.records import Structure

MAX_MODEL_LEN = 320
EOS_IDS = {0, 2}
LIMITS = Limits(models=(), vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
COMPLETION_MAX_TOKENS = 16
Entry = tuple[str, float | None, list[tuple[str, float]]]
"""A token, its log-probability, the likeliest ones as shown."""


@dataclass
class Said:
    """One choice. `logprobs` None where the answer has none; `offsets` only of completions."""

    index: int
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    logprobs: list[Entry] | None = None
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    choices: list[Said]
    usage: dict[str, Any] | None = None
    prompt_logprobs: Any = None


def read_answer(path: str, raw: bytes) -> Answer:
    """The answer in `raw`, a JSON body or a whole stream of events; of a stream without usage it has none."""
    if not raw.startswith(b"data: "):
        events = [json.loads(raw)]
    else:
        *chunks, done, rest = raw.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        events = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]
    choices: dict[int, Said] = {}
    answer = Answer([])
    for event in events:
        assert "error" not in event, event
        answer.usage = event.get("usage") or answer.usage
        answer.prompt_logprobs = event.get("prompt_logprobs", answer.prompt_logprobs)
        for part in event["choices"]:
            said = choices.setdefault(part["index"], Said(part["index"]))
            assert said.finish_reason is None, "more came after the finish"
            _add(said, part, event, is_chat=path == CHAT)
            answer.prompt_logprobs = part.get("prompt_logprobs", answer.prompt_logprobs)
    answer.choices = [choices[index] for index in sorted(choices)]
    assert [said.index for said in answer.choices] == list(range(len(answer.choices)))
    return answer


def _add(said: Said, part: dict[str, Any], event: dict[str, Any], *, is_chat: bool) -> None:
    message = part.get("message") or part.get("delta") or {}
    said.text += (message.get("content") or "") if is_chat else part["text"]
    for call in message.get("tool_calls", []):
        function = call["function"]
        if call.get("index", len(said.calls)) == len(said.calls):
            said.calls.append([function["name"], ""])
        said.calls[-1][1] += function["arguments"]
    for name, value in (("ids", part.get("token_ids")), ("logprobs", _entries(part["logprobs"]))):
        if value is not None:
            setattr(said, name, [*(getattr(said, name) or []), *value])
    if not is_chat and part["logprobs"]:
        said.offsets += part["logprobs"]["text_offset"]
    said.prompt_ids = part.get("prompt_token_ids", said.prompt_ids)
    if is_chat and part.get("token_ids") is not None:
        said.prompt_ids = event.get("prompt_token_ids", said.prompt_ids)
    said.finish_reason, said.stop_reason = part["finish_reason"], part["stop_reason"]


def _entries(shown: dict[str, Any] | None) -> list[Entry] | None:
    if shown is None:
        return None
    if "content" in shown:
        return [
            (one["token"], one["logprob"], [(top["token"], top["logprob"]) for top in one["top_logprobs"]])
            for one in shown["content"]
        ]
    columns = (shown[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [(token, own, list((top or {}).items())) for token, own, top in zip(*columns, strict=True)]


def check_answer_to(
    path: str, body: dict[str, Any], answer: Answer, tokenizer: Tokenizer, *, may_abort: bool = False
) -> None:
    """AssertionError unless the answer is a possible one to `body`."""
    n = body.get("n", 1)
    num_prompts = len(body["prompt"]) if path != CHAT and is_many(body["prompt"]) else 1
    assert len(answer.choices) == n * num_prompts
    for said in answer.choices:
        assert said.finish_reason in ("stop", "length", "tool_calls", *(["abort"] if may_abort else []))
        assert (said.ids is not None) == body.get("return_token_ids", False)
        check_logprobs(path, body, said)
        if said.ids is not None:
            check_tokens(body, said, default=COMPLETION_MAX_TOKENS if path != CHAT else None)
            check_text(path, body, said, tokenizer)
            check_structure(path, body, said, tokenizer)
    usage = answer.usage
    if usage is None:
        assert body.get("stream")
        return
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body.get("return_token_ids"):
        prompts = [len(said.prompt_ids or []) for said in answer.choices[::n]]
        assert usage["completion_tokens"] == sum(len(said.ids or []) for said in answer.choices)
        assert usage["prompt_tokens"] == sum(prompts)
        # The last token of a prompt is always computed.
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        assert 0 <= cached <= sum(prompts) - len(prompts)
        assert body.get("use_prefix_cache", True) or cached == 0


def check_tokens(body: dict[str, Any], said: Said, *, default: int | None) -> None:
    """Lengths and ends."""
    assert said.ids is not None
    assert said.prompt_ids is not None
    forced = body.get("forced_token_ids")
    wanted = body.get("max_tokens", body.get("max_completion_tokens", default))
    limit = MAX_MODEL_LEN - len(said.prompt_ids) if wanted is None else wanted
    if forced is not None:
        limit = len(forced)
        assert said.ids == forced[: len(said.ids)]
    assert len(said.ids) <= limit
    least = body.get("min_tokens", 0)
    ends = set(body.get("stop_token_ids", [])) | (set() if body.get("ignore_eos") else EOS_IDS)
    if forced is None:
        assert not ends & set(said.ids[least:-1])
    if said.finish_reason == "length":
        assert len(said.ids) == limit
    elif said.finish_reason in ("stop", "tool_calls"):
        assert len(said.ids) >= max(1, least)
        if said.stop_reason is None:
            assert said.ids[-1] in EOS_IDS
            assert not body.get("ignore_eos")
        elif isinstance(said.stop_reason, int):
            assert said.ids[-1] == said.stop_reason
            assert said.stop_reason in body["stop_token_ids"]
        else:
            assert said.stop_reason in body["stop"]
    assert (said.finish_reason == "tool_calls") <= bool(said.calls)


def check_text(path: str, body: dict[str, Any], said: Said, tokenizer: Tokenizer) -> None:
    """The text is that of the ids, cut before the stop."""
    assert said.ids is not None
    text = said.text
    if body.get("echo"):
        prompt = body["prompt"]
        sent = prompt[said.index // body.get("n", 1)] if is_many(prompt) else prompt
        if not isinstance(sent, str) or "truncate_prompt_tokens" in body:
            sent = tokenizer.decode(said.prompt_ids or [])
        assert text.startswith(sent)
        text = text.removeprefix(sent)
    is_stop = said.finish_reason in ("stop", "tool_calls")
    includes = body.get("include_stop_str_in_output", False)
    skips = body.get("skip_special_tokens", True)
    shown = said.ids
    if is_stop and not isinstance(said.stop_reason, str) and not includes:
        shown = said.ids[:-1]
    full = tokenizer.decode(shown, skip_special_tokens=skips)
    if body.get("tools"):
        # Calls are taken out of the text, blanks beside them too.
        return
    stop = said.stop_reason
    if not isinstance(stop, str):
        assert text == full
    elif includes:
        assert text.endswith(stop)
        assert full.startswith(text)
    else:
        assert full.startswith(text + stop)
    if not body.get("min_tokens", 0):
        stops = body.get("stop", [])
        rest = text[:-1] if includes else text
        assert not [one for one in ([stops] if isinstance(stops, str) else stops) if one in rest] or (
            includes and isinstance(stop, int)
        )


def check_logprobs(path: str, body: dict[str, Any], said: Said) -> None:
    """At most 0, likeliest first, together at most 1, a token's own among the alternatives."""
    wanted = body.get("logprobs")
    wants = wanted if path == CHAT else wanted is not None
    assert (said.logprobs is not None) == bool(wants) or (not wants and not said.logprobs)
    if said.logprobs is None:
        return
    count = body.get("top_logprobs", 0) if path == CHAT else wanted
    if said.ids is not None:
        num_echoed = len(said.prompt_ids or []) if body.get("echo") else 0
        assert len(said.logprobs) == num_echoed + len(said.ids)
    assert said.offsets == sorted(said.offsets)
    for place, (token, own, top) in enumerate(said.logprobs):
        if own is None:
            assert place == 0 or said.finish_reason == "abort"
            assert body.get("echo")
            assert not top
            continue
        values = [logprob for _, logprob in top]
        assert max([own, *values]) <= 0
        assert values == sorted(values, reverse=True)
        assert len({name for name, _ in top}) == len(top) or path == CHAT
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        assert len(top) <= count + (path != CHAT)
        if path != CHAT:
            assert dict(top)[token] >= own
        elif any(name == token for name, _ in top):
            assert max(logprob for name, logprob in top if name == token) >= own


def structure_of(path: str, body: dict[str, Any]) -> Structure | None:
    structure = parse_structure(Fields(body), LIMITS)
    choice = body.get("tool_choice")
    if path == CHAT and isinstance(choice, dict):
        functions = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
        parameters = functions[choice["function"]["name"]]["parameters"]
        none: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        return Structure(kind="json_schema", spec=json.dumps(parameters or none))
    return structure


def check_structure(path: str, body: dict[str, Any], said: Said, tokenizer: Tokenizer) -> None:
    """A finished answer matches its structure, one that was cut can be continued to one that does."""
    structure = structure_of(path, body)
    if structure is None or "forced_token_ids" in body or not said.ids:
        return
    text = tokenizer.decode(said.ids, skip_special_tokens=True)
    if said.finish_reason in ("stop", "tool_calls") and said.stop_reason is None:
        check_whole(structure, text)
        return
    try:
        check_whole(structure, text)
    except (AssertionError, ValueError):
        check_beginning(structure, text)
