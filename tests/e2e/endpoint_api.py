"""One endpoint of a running server, and short ways to ask it what a test wants to know.

Usage: `api = Api(server, COMPLETIONS, log_dir); assert api.ids(temperature=0) == api.ids(top_k=1)`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, TOKENIZER, ServerUnderTest

from firstdiff.tracing.records import TokenLogRow
from firstdiff.tracing.token_log import read_token_log

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
X, Y = 300, 301
LONG = "one prompt that is long enough to fill more than a block of the cache, surely it is. "


class Api:
    """One endpoint of a running server, and short ways to ask it."""

    def __init__(self, server: ServerUnderTest, path: str, log_dir: Path) -> None:
        self.server, self.path, self.log_dir = server, path, log_dir
        self.is_chat = path == CHAT

    def body(self, **fields: Any) -> dict[str, Any]:
        text = fields.pop("text", "The quick")
        what = {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        base = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {name: value for name, value in (what | base | fields).items() if value != "absent"}

    def answer(self, **fields: Any) -> dict[str, Any]:
        return self.server.post(self.path, **self.body(**fields))

    def choice(self, **fields: Any) -> dict[str, Any]:
        (choice,) = self.answer(**fields)["choices"]
        return choice

    def ids(self, **fields: Any) -> list[int]:
        return self.choice(**fields)["token_ids"]

    def text(self, **fields: Any) -> str:
        return self.text_of(self.choice(**fields))

    def text_of(self, choice: dict[str, Any]) -> str:
        return choice["message"]["content"] if self.is_chat else choice["text"]

    def prompt_ids(self, **fields: Any) -> list[int]:
        answer = self.answer(**fields)
        return answer["prompt_token_ids"] if self.is_chat else answer["choices"][0]["prompt_token_ids"]

    def refusal(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        return self.server.refusal(self.path, {"model": MODEL} | self.body(**fields))

    def logprobs(self, count: int, **fields: Any) -> list[dict[str, float]]:
        """The alternatives of each output token, by text."""
        if self.is_chat:
            content = self.choice(logprobs=True, top_logprobs=count, **fields)["logprobs"]["content"]
            return [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content]
        return self.choice(logprobs=count, **fields)["logprobs"]["top_logprobs"]

    def cached(self, **fields: Any) -> int:
        return self.answer(**fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def gap(self, step: int, **fields: Any) -> float:
        """How much likelier X is than Y at output token `step`, by the processed distribution.

        X has so large a bias that it is always chosen, Y so large a one that it always comes second.
        """
        bias = {str(X): 60, str(Y): 40}
        tops = self.logprobs(2, logit_bias=bias, logprobs_mode="processed_logprobs", temperature=1, **fields)
        x, y = (TOKENIZER.token_text(token_id) for token_id in (X, Y))
        return tops[step][x] - tops[step][y]

    def logged(self, **fields: Any) -> list[TokenLogRow]:
        """The rows that the token log gets of a request, one a choice."""
        answer = self.answer(**fields)
        request_id = answer["id"].split("-", 1)[1]
        for _ in range(1000):
            rows = [r for r in read_token_log(self.log_dir)[1] if r.request_id.startswith(request_id)]
            if len(rows) == len(answer["choices"]):
                return rows
            # A row is written just after the answer.
            Event().wait(0.01)
        raise AssertionError(f"no row of {request_id} in the log")
