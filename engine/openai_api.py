"""What a client may ask: OpenAI's request bodies, with vLLM's additions, checked in full.

Owns: the fields of a generation beside its sampling, and which fields exclude each other. Refuses to know:
sockets, tokenisation, the engine's state. Invariants: a body becomes a request or one ApiError; no field is
accepted and ignored: one that is not supported is refused unless its value changes nothing; defaults are
OpenAI's (temperature 1, top_p 1, 16 tokens for completions, the rest of the context for chat), never the
model's generation_config.

Usage: `ask = parse_completion(decode_object(body), limits); sampling = ask.sampling(9, limits, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal

import msgspec

from firstdiff.engine.openai_fields import ApiError, Fields, expected
from firstdiff.engine.openai_limits import Limits, check_model, parse_texts_or_ids
from firstdiff.engine.openai_messages import Message, parse_messages, uses_tools
from firstdiff.engine.openai_sampling import MAX_LOGPROBS, SamplingWish, parse_sampling
from firstdiff.engine.openai_unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, Unsupported
from firstdiff.engine.tools import Tools, parse_tools
from firstdiff.tracing.records import Sampling, Structure

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

COMPLETION_MAX_TOKENS = 16
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Queueing:
    """How the engine is to treat a request beside its sampling, and what is only written down."""

    priority: int = 0
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    user: str | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request for one or more generations, before tokenisation.

    Exactly one of `prompts` (text or token ids each) and `messages` is set; each prompt gets `n` choices.
    """

    endpoint: Endpoint
    model: str
    prompts: list[str | list[int]] | None
    messages: list[Message] | None
    tools: Tools | None
    wish: SamplingWish
    n: int
    echo: bool
    truncate_prompt_tokens: int | None
    add_special_tokens: bool
    skip_special_tokens: bool
    include_stop: bool
    queueing: Queueing
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def logprobs(self) -> int | None:
        """Alternatives wanted at each output token; None for no log-probabilities."""
        return self.wish.template.logprobs

    @property
    def structure(self) -> Structure | None:
        """What the answers must match."""
        return self.wish.template.structure

    def sampling(
        self, num_prompt_tokens: int, limits: Limits, rng: Random, *, choice_index: int = 0
    ) -> Sampling:
        """All values resolved for choice `choice_index` of one prompt; see SamplingWish.resolve."""
        param = "messages" if self.is_chat else "prompt"
        return self.wish.resolve(num_prompt_tokens, limits, rng, param=param, choice_index=choice_index)


def parse_completion(body: dict[str, object], limits: Limits) -> Ask:
    """A /v1/completions body."""
    fields = Fields(body)
    model = check_model(fields, limits)
    prompts = parse_texts_or_ids(fields.take("prompt"), "prompt", limits)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    max_tokens = _max_tokens(fields, "max_tokens", limits)
    echo = fields.flag("echo")
    wish = parse_sampling(
        fields,
        limits,
        logprobs=logprobs,
        max_tokens=max_tokens,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        echo_logprobs=echo,
        may_sample_nothing=echo,
    )
    n = _num_choices(fields, limits, len(prompts), wish)
    best_of = fields.integer("best_of", 1, limits.max_choices)
    if best_of not in (None, n):
        raise expected(f"best_of equal to n ({n})", best_of, "best_of", "all choices are returned")
    return _ask(
        fields,
        limits,
        UNSUPPORTED_COMPLETION,
        endpoint=COMPLETIONS,
        model=model,
        prompts=prompts,
        messages=None,
        tools=None,
        wish=wish,
        n=n,
        echo=echo,
        add_special_tokens=fields.flag("add_special_tokens", default=True),
    )


def parse_chat(body: dict[str, object], limits: Limits) -> Ask:
    """A /v1/chat/completions body; `max_completion_tokens` is the newer name of `max_tokens`."""
    fields = Fields(body)
    model = check_model(fields, limits)
    messages = parse_messages(fields, limits)
    tools = parse_tools(fields, limits)
    wants_logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        raise ApiError(
            "expected logprobs true beside top_logprobs, got it false or missing: send both",
            param="top_logprobs",
        )
    wish = parse_sampling(
        fields,
        limits,
        logprobs=(top_logprobs or 0) if wants_logprobs else None,
        max_tokens=_chat_max_tokens(fields, limits),
        default_max_tokens=None,
    )
    if tools is not None:
        wish = _held_to_tools(wish, tools, limits)
    return _ask(
        fields,
        limits,
        UNSUPPORTED_CHAT,
        endpoint=CHAT,
        model=model,
        prompts=None,
        messages=messages,
        tools=tools,
        wish=wish,
        n=_num_choices(fields, limits, 1, wish),
        echo=False,
        add_special_tokens=False,
    )


def needs_tool_template(ask: Ask) -> bool:
    """Whether the prompt can only be written by a template that knows tools."""
    shown = ask.tools is not None and ask.tools.shown is not None
    return shown or (ask.messages is not None and uses_tools(ask.messages))


def parse_queueing(fields: Fields, limits: Limits) -> Queueing:
    """The fields of every request that reaches the engine."""
    priority = fields.integer("priority", -MAX_PRIORITY - 1, MAX_PRIORITY) or 0
    if priority and not limits.takes_priorities:
        raise expected(
            "priority 0", priority, "priority", "this server runs first come, first served; leave it out"
        )
    salt = fields.text("cache_salt")
    if salt is not None and not 0 < len(salt) <= limits.max_stop_chars:
        raise expected(f"a salt of 1 to {limits.max_stop_chars} characters", salt, "cache_salt")
    user = fields.text("user")
    if user is not None and len(user) > limits.max_label_chars:
        raise expected(f"a string of at most {limits.max_label_chars} characters", user, "user")
    return Queueing(
        priority=priority,
        cache_salt=salt,
        use_prefix_cache=fields.flag("use_prefix_cache", default=True),
        user=user,
        metadata=_metadata(fields, limits),
    )


def _ask(
    fields: Fields,
    limits: Limits,
    unsupported: Unsupported,
    *,
    endpoint: Endpoint,
    model: str,
    prompts: list[str | list[int]] | None,
    messages: list[Message] | None,
    tools: Tools | None,
    wish: SamplingWish,
    n: int,
    echo: bool,
    add_special_tokens: bool,
) -> Ask:
    """The fields that both endpoints share beside sampling; refuses what is left."""
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    if stream and wish.prompt_logprobs is not None:
        raise ApiError(
            "expected stream false beside prompt_logprobs, got it true: a stream brings the prompt's "
            "log-probabilities only by echo and logprobs",
            param="prompt_logprobs",
        )
    ask = Ask(
        endpoint=endpoint,
        model=model,
        prompts=prompts,
        messages=messages,
        tools=tools,
        wish=wish,
        n=n,
        echo=echo,
        truncate_prompt_tokens=fields.integer("truncate_prompt_tokens", 1, limits.max_model_len),
        add_special_tokens=add_special_tokens,
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        include_stop=fields.flag("include_stop_str_in_output"),
        queueing=parse_queueing(fields, limits),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.flag("return_token_ids"),
    )
    fields.refuse_rest(unsupported)
    return ask


def _num_choices(fields: Fields, limits: Limits, num_prompts: int, wish: SamplingWish) -> int:
    n = fields.integer("n", 1, limits.max_choices) or 1
    if n * num_prompts > max(limits.max_choices, num_prompts):
        raise expected(
            f"at most {limits.max_choices} choices of all {num_prompts} prompts together",
            n * num_prompts,
            "n",
            "send several requests",
        )
    if n > 1 and wish.template.forced_token_ids is not None:
        raise expected("n 1 beside forced_token_ids", n, "n", "a replay has one outcome")
    if n > 1 and wish.max_tokens == 0:
        raise expected("n 1 beside max_tokens 0", n, "n", "without a token all choices are one")
    return n


def _held_to_tools(wish: SamplingWish, tools: Tools, limits: Limits) -> SamplingWish:
    """The wish with the structure that the choice of tools demands."""
    if tools.choice == "none":
        return wish
    if wish.template.structure is not None:
        raise ApiError(
            f"expected tools or a structure for the answer, got both with tool_choice {tools.choice}: "
            "a call has a form of its own, send one of them",
            param="tool_choice",
        )
    structure = tools.structure(limits)
    if structure is None:
        return wish
    if wish.template.forced_token_ids is not None:
        raise ApiError(
            "expected forced_token_ids alone, got a tool_choice or a strict tool beside it: a replay has no "
            "choice to steer",
            param="forced_token_ids",
        )
    return replace(wish, template=msgspec.structs.replace(wish.template, structure=structure))


def _max_tokens(fields: Fields, name: str, limits: Limits) -> int | None:
    return fields.integer(
        name, 0, limits.max_model_len, f"prompt and output share {limits.max_model_len} tokens"
    )


def _chat_max_tokens(fields: Fields, limits: Limits) -> int | None:
    old_name = _max_tokens(fields, "max_tokens", limits)
    new_name = _max_tokens(fields, "max_completion_tokens", limits)
    if None not in (old_name, new_name) and old_name != new_name:
        raise ApiError(
            f"expected one limit, got max_tokens {old_name} and max_completion_tokens {new_name}: send one",
            param="max_completion_tokens",
        )
    return new_name if old_name is None else old_name


def _metadata(fields: Fields, limits: Limits) -> dict[str, str] | None:
    value = fields.take("metadata")
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > limits.max_labels:
        raise expected(f"an object of at most {limits.max_labels} strings", value, "metadata")
    labels: dict[str, str] = {}
    for key, label in value.items():
        if not isinstance(label, str) or max(len(key), len(label)) > limits.max_label_chars:
            raise expected(f"strings of at most {limits.max_label_chars} characters", label, "metadata")
        labels[key] = label
    return labels


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.nested("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise ApiError(
            "expected stream true beside stream_options, got it false or missing: leave one out",
            param="stream_options",
        )
    include_usage = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    options.refuse_rest({"include_obfuscation": (False,)})
    if continuous and not include_usage:
        raise ApiError(
            "expected include_usage true beside continuous_usage_stats, got it false: send both",
            param="stream_options.continuous_usage_stats",
        )
    return include_usage, continuous
