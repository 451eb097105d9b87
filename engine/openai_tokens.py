"""The bodies of /tokenize and /detokenize, as vLLM shapes them.

Owns: their fields. Refuses to know: generation. Invariants: as in `openai_api`: nothing is ignored.

Usage: `ask = parse_tokenize(decode_object(body), limits)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstdiff.engine.openai_fields import ApiError, Fields
from firstdiff.engine.openai_limits import Limits, check_model, parse_token_ids
from firstdiff.engine.openai_messages import Message, parse_messages
from firstdiff.engine.tools import Tools, parse_tools

_UNSUPPORTED_TOKENIZE: dict[str, tuple[object, ...]] = {
    "return_token_strs": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "mm_processor_kwargs": (),
}


@dataclass(frozen=True, slots=True)
class TokenizeAsk:
    """Text or chat messages to tokenise; exactly one is set."""

    prompt: str | None
    messages: list[Message] | None
    tools: Tools | None
    add_special_tokens: bool
    add_generation_prompt: bool


def parse_tokenize(body: dict[str, object], limits: Limits) -> TokenizeAsk:
    """`prompt` (special tokens are added unless told otherwise) or `messages` (the template adds its own)."""
    fields = Fields(body)
    check_model(fields, limits)
    prompt = fields.text("prompt")
    if prompt is not None and fields.take("messages") is not None:
        raise ApiError("expected prompt or messages, got both: send one", param="messages")
    messages = parse_messages(fields, limits) if prompt is None else None
    tools = parse_tools(fields, limits) if messages is not None else None
    add_generation_prompt = fields.flag("add_generation_prompt", default=True)
    add_special_tokens = fields.flag("add_special_tokens", default=messages is None)
    if messages is not None and add_special_tokens:
        raise ApiError(
            "expected add_special_tokens false beside messages, got true: the chat template adds its own",
            param="add_special_tokens",
        )
    fields.refuse_rest(_UNSUPPORTED_TOKENIZE)
    return TokenizeAsk(prompt, messages, tools, add_special_tokens, add_generation_prompt)


def parse_detokenize(body: dict[str, object], limits: Limits) -> list[int]:
    """`tokens`, which may be empty."""
    fields = Fields(body)
    check_model(fields, limits)
    tokens = fields.take("tokens")
    if tokens is None:
        raise ApiError('expected "tokens" as an array of token ids, got nothing', param="tokens")
    ids = parse_token_ids(tokens, "tokens", limits) if tokens != [] else []
    fields.refuse_rest({})
    return ids
