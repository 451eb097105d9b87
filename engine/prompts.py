"""What a client sent, as token ids: texts, chat messages, structures, checked off the event loop.

Owns: which thread that work is done in, how much of it at a time, its time bound. Refuses to know: routes,
generation. Invariants: no request holds up the streams of the others: large inputs, and every structure, go
to a thread; a structure that takes too long to check is refused; what a client's text made fail is a 400.

Usage: `ids = await reader.encode(text, add_special_tokens=True)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from firstdiff.engine.openai_fields import ApiError
from firstdiff.engine.openai_messages import Message, num_chars
from firstdiff.engine.structure import check_structure
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.records import Structure

R = TypeVar("R")

INLINE_SIZE = 8192
"""Characters or ids up to which tokenising is quicker than a thread switch."""
CHECK_TIMEOUT_S = 10.0
"""How long a structure may take to check, waiting for a free thread included."""
MAX_CHECKS = 2
"""Structures checked at a time: a thread cannot be stopped, so hostile ones may occupy no more than these."""


class PromptReader:
    """Turns what came into what the engine takes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._free_checks = asyncio.Semaphore(MAX_CHECKS)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of `text`; ApiError when it has none (a lone surrogate)."""
        try:
            return await off_loop(
                len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        except ValueError as error:
            raise ApiError(str(error), param=param) from error

    async def ids_of(
        self, item: str | list[int], *, add_special_tokens: bool, param: str = "prompt"
    ) -> list[int]:
        """Token ids of text or of ids, which are taken as they are."""
        if isinstance(item, list):
            return item
        return await self.encode(item, add_special_tokens=add_special_tokens, param=param)

    async def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, object]] | None = None,
        add_generation_prompt: bool,
    ) -> tuple[str, list[int]]:
        """A conversation as text and as token ids; ApiError where the chat template refuses it."""

        def work() -> tuple[str, list[int]]:
            text = self.tokenizer.render_chat(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
            # The template writes the special tokens itself.
            return text, self.tokenizer.encode(text, add_special_tokens=False)

        try:
            return await off_loop(num_chars(messages) + len(str(tools or "")), work)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error

    async def check(self, structure: Structure | None) -> None:
        """ApiError when `structure` cannot be enforced."""
        if structure is None:
            return
        check = asyncio.create_task(self._checked(structure))
        try:
            await asyncio.wait_for(asyncio.shield(check), CHECK_TIMEOUT_S)
        except TimeoutError as error:
            check.add_done_callback(_forget)
            raise ApiError(
                f"expected a structure that can be checked within {CHECK_TIMEOUT_S:g} s, got one that takes "
                "longer: send a simpler one"
            ) from error
        except ValueError as error:
            raise ApiError(str(error)) from error

    async def _checked(self, structure: Structure) -> None:
        async with self._free_checks:
            await asyncio.to_thread(check_structure, structure)


async def off_loop(size: int, work: Callable[[], R]) -> R:
    """`work()`, in a thread when its input is large."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)


def _forget(check: asyncio.Task[None]) -> None:
    """Nobody waits for the outcome any more."""
    if not check.cancelled():
        check.exception()
