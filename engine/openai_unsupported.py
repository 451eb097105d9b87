"""Fields that OpenAI or other servers know and this one does not.

Owns: their names, each with the values that ask for nothing and are therefore accepted. Refuses to know:
how bodies are read. Invariants: a name is either here or read by one of the `openai_*` parsers, never both;
null is accepted for all of them; any other value than those listed is a 400 that says so.

Usage: `fields.refuse_rest(UNSUPPORTED_CHAT)`.
"""

from __future__ import annotations

Unsupported = dict[str, tuple[object, ...]]

_UNSUPPORTED_SAMPLING: Unsupported = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncation_side": ("left",),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "repetition_detection": (),
    "trace_decode_token_ids": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "request_id": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
}
UNSUPPORTED_COMPLETION: Unsupported = _UNSUPPORTED_SAMPLING | {
    "suffix": ("",),
    "prompt_embeds": (),
}
UNSUPPORTED_CHAT: Unsupported = _UNSUPPORTED_SAMPLING | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "include_reasoning": (True, False),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": (),
}
UNSUPPORTED_MESSAGE: Unsupported = {
    "name": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "reasoning_content": (),
}
