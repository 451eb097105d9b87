"""Fields that OpenAI or other servers know and this one does not, yet.

Owns: their names, each with the values that ask for nothing and are therefore accepted. Refuses to know:
how bodies are read. Invariants: a name is either here or read by `openai_api`, never both; null is
accepted for all of them; any other value than those listed is a 400 that says so.

Usage: `fields.refuse_rest(UNSUPPORTED_CHAT)`.
"""

from __future__ import annotations

Unsupported = dict[str, tuple[object, ...]]

_UNSUPPORTED_SAMPLING: Unsupported = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
    "repetition_detection": (),
    "trace_decode_token_ids": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "cache_salt": (),
    "request_id": (),
    "priority": (0,),
    "add_special_tokens": (),
}
UNSUPPORTED_COMPLETION: Unsupported = _UNSUPPORTED_SAMPLING | {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
UNSUPPORTED_CHAT: Unsupported = _UNSUPPORTED_SAMPLING | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "include_reasoning": (True, False),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "moderation": (),
    "prompt_cache_key": (),
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
