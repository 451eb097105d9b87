"""lm-eval's view of an endpoint: its generation requests become Requests, RequestRows become its answers.

Owns: the translation of lm-eval's instances and generation arguments. Refuses to know: HTTP, tokens, scoring,
concurrency (`send` does that). Imports lm_eval, so import this module only where an evaluation runs.
Invariants: the same request is made at every concurrency (lm-eval's own client adds a stop string when it
is serial); a request that fails costs its own item and nothing else; nothing is asked twice.

Usage: `model = EndpointLM(send); evaluate(model, tasks)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from firstdiff.tracing.records import Request, RequestRow

Send = Callable[[Sequence[Request]], Sequence[RequestRow]]
"""Asks all of the requests, waits, and gives one row each, in order, whatever happens."""

DEFAULT_MAX_TOKENS = 256
_MAX_CASE_ID_CHARS = 64


class EndpointLM(LM):  # type: ignore[misc]  # lm_eval has no types
    """An lm-eval model whose answers come from `send`."""

    def __init__(self, send: Send, *, seed: int = 1234, logprobs: int | None = None) -> None:
        super().__init__()
        self._send = send
        self._seed = seed
        self._logprobs = logprobs
        self.rows: dict[str, list[RequestRow]] = {}
        """The rows so far by case id; more than one where a task repeats its requests."""

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The texts that came back, in order; empty where the request did not end ok."""
        asked = [request_of(instance, seed=self._seed, logprobs=self._logprobs) for instance in requests]
        rows = self._send(asked)
        if [row.case_id for row in rows] != [request.case_id for request in asked]:
            raise ValueError(
                f"expected {len(asked)} rows in the order of their requests, got others from send"
            )
        for row in rows:
            self.rows.setdefault(row.case_id, []).append(row)
        return [row.text if row.outcome == "ok" else "" for row in rows]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise ValueError(f"expected generate_until requests, got {len(requests)} of loglikelihood")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise ValueError(f"expected generate_until requests, got {len(requests)} of loglikelihood_rolling")


def case_id_of(task: str, doc_id: int, request_index: int) -> str:
    """`<task>-<document>`, with `-<index>` behind it for a document's further requests."""
    suffix = f"-{doc_id:05d}" + (f"-{request_index}" if request_index else "")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", task)[: _MAX_CASE_ID_CHARS - len(suffix)] + suffix


def request_of(instance: Instance, *, seed: int, logprobs: int | None) -> Request:
    """The Request for an lm-eval instance; generation arguments that are not known go on as they are.

    `until` becomes `stop`, `max_gen_toks` becomes `max_tokens`, `do_sample` is dropped and the temperature is
    0 unless given, all as lm-eval's own clients do it.
    """
    context, arguments = instance.args
    given: dict[str, Any] = dict(arguments)
    given.pop("do_sample", None)
    until = given.pop("until", [])
    stop = [until] if isinstance(until, str) else list(until)
    max_tokens = given.pop("max_gen_toks", given.pop("max_tokens", DEFAULT_MAX_TOKENS))
    temperature, top_p = float(given.pop("temperature", 0.0)), float(given.pop("top_p", 1.0))
    return Request(
        case_id=case_id_of(str(instance.task_name), int(instance.doc_id or 0), int(instance.idx)),
        prompt=str(context),
        max_tokens=int(max_tokens),
        temperature=temperature,
        top_p=top_p,
        seed=int(given.pop("seed", seed)),
        logprobs=logprobs,
        extra=({"stop": stop} if stop else {}) | given,
    )
