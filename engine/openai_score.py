"""The body and the answer of /score: how likely given tokens are after a given prompt.

Owns: their fields. Refuses to know: how scores are computed, sockets. Invariants: nothing is ignored; one
result a target, in the order of the targets, one log-probability a target token. (vLLM's /score compares two
texts by an embedding model; its fields are refused by name.)

Usage: `ask = parse_score(decode_object(body), limits)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from firstdiff.engine.choice import Choice
from firstdiff.engine.openai_api import Queueing, parse_queueing
from firstdiff.engine.openai_fields import ApiError, Fields
from firstdiff.engine.openai_limits import Limits, check_model, parse_texts_or_ids
from firstdiff.engine.openai_logprobs import PromptLogprobs, Scored, finite, prompt_tokens, show_prompt
from firstdiff.engine.openai_sampling import MAX_LOGPROBS
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.records import Sampling

SCORE: Final = "/score"

_OF_VLLM: Final = ("text_1", "text_2", "queries", "documents", "data_1", "data_2", "items", "query")


@dataclass(frozen=True, slots=True)
class ScoreAsk:
    """Targets and the prompts before them, as many; `is_shared` when there is but one prompt."""

    model: str
    prompts: list[str | list[int]]
    targets: list[str | list[int]]
    top_logprobs: int | None
    add_special_tokens: bool
    queueing: Queueing

    @property
    def is_shared(self) -> bool:
        return len(self.prompts) == 1

    @property
    def per_prompt(self) -> int:
        """Targets that are to find their prompt computed by the first of them."""
        return len(self.targets) if self.is_shared and self.queueing.use_prefix_cache else 1

    def sampling(self, num_prompt_tokens: int, num_target_tokens: int, limits: Limits) -> Sampling:
        """What the engine is asked for one target; ApiError when it does not fit the context."""
        if num_prompt_tokens == 0 or num_target_tokens == 0:
            param = "target" if num_prompt_tokens else "prompt"
            raise ApiError(f"expected 1 token or more in {param!r}, got none: send some text", param=param)
        if num_prompt_tokens + num_target_tokens > limits.max_model_len:
            raise ApiError(
                f"expected prompt and target within the context of {limits.max_model_len} tokens, got "
                f"{num_prompt_tokens} + {num_target_tokens}: shorten one",
                param="prompt",
                code="context_length_exceeded",
            )
        return Sampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            seed=0,
            max_tokens=0,
            # One at least, so that the answer can say whether the target is the greedy one.
            prompt_logprobs=max(1, self.top_logprobs or 0),
            prompt_logprobs_start=num_prompt_tokens,
        )


class Score(msgspec.Struct, frozen=True):
    """One target: `score` is the sum of its log-probabilities; `is_greedy`: each token is the likeliest."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    score: float
    is_greedy: bool
    num_cached_tokens: int
    top_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


def parse_score(body: dict[str, object], limits: Limits) -> ScoreAsk:
    """`prompt` and `target`, each text or ids or an array of either; one prompt serves all targets."""
    fields = Fields(body)
    fields.refuse_any(_OF_VLLM, "this endpoint scores a 'target' after a 'prompt'")
    model = check_model(fields, limits)
    prompts = parse_texts_or_ids(fields.take("prompt"), "prompt", limits)
    targets = parse_texts_or_ids(fields.take("target"), "target", limits)
    if len(prompts) not in (1, len(targets)):
        raise ApiError(
            f"expected one prompt, or one for each of {len(targets)} targets, got {len(prompts)}: pair them",
            param="prompt",
        )
    ask = ScoreAsk(
        model=model,
        prompts=prompts,
        targets=targets,
        top_logprobs=fields.integer("top_logprobs", 0, MAX_LOGPROBS),
        add_special_tokens=fields.flag("add_special_tokens", default=True),
        queueing=parse_queueing(fields, limits),
    )
    fields.refuse_rest({})
    return ask


def score_of(choice: Choice, ask: ScoreAsk, tokenizer: Tokenizer) -> Score:
    """The result for one target, whose tokens are the last ones of the choice's prompt."""
    ids = choice.request.prompt_token_ids
    computed = choice.request.sampling.prompt_logprobs or 0
    scored = [token for token in prompt_tokens(ids, choice.prompt_logprobs) if token is not None]
    assert len(scored) == len(ids) - choice.request.sampling.prompt_logprobs_start
    logprobs = [finite(token.logprob) for token in scored]
    top: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    if ask.top_logprobs is not None:
        top = show_prompt(scored, shown=ask.top_logprobs, computed=computed, token_text=tokenizer.token_text)
    return Score(
        index=choice.index,
        token_ids=[token.token_id for token in scored],
        logprobs=logprobs,
        score=math.fsum(logprobs),
        is_greedy=all(map(_is_likeliest, scored)),
        num_cached_tokens=choice.num_cached_tokens or 0,
        top_logprobs=top,
    )


def _is_likeliest(token: Scored) -> bool:
    return token.logprob >= max(logprob for _, logprob in token.top)
