"""A real server on loopback with the real engine, in this process, on `tiny-random` or a variant of it.

Usage: `with real_server(log_dir=tmp_path) as server: server.post("/v1/completions", prompt="hi")`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import MODEL, TOKENIZER_PATH, ServerUnderTest, serving

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.core import build_from_config
from firstdiff.engine.core_client import InProcessCore
from firstdiff.engine.server import ServeSettings
from firstdiff.engine.tokenizer import Tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tool_model(folder: Path) -> Path:
    """`tiny-random` with a template that knows tools, a BOS before text and the opening tag as one token."""
    for path in TOKENIZER_PATH.iterdir():
        if path.name not in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    config = json.loads((TOKENIZER_PATH / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TOOL_TEMPLATE}))
    tokenizer = json.loads((TOKENIZER_PATH / "tokenizer.json").read_text())
    bos = tokenizer["added_tokens"][1]
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last = max(vocab, key=lambda token: int(vocab[token]))
    tag = tokenizer["added_tokens"][0] | {"id": vocab.pop(last), "content": "<tool_call>", "special": False}
    tokenizer["added_tokens"].append(tag)
    assert "".join(merges.pop()).replace(" ", "") == last
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos["content"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            bos["content"]: {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@contextmanager
def real_server(
    *, model: Path | None = None, serve: dict[str, Any] | None = None, **engine: Any
) -> Iterator[ServerUnderTest]:
    """`serve` are further ServeSettings fields, `engine` those of EngineConfig."""
    config = EngineConfig(model=str(model or MODEL), **({"num_blocks": 512} | engine))
    settings = ServeSettings(
        engine=config, port=0, served_model_name=MODEL, **({"drain_timeout_s": 0.0} | (serve or {}))
    )
    tokenizer = Tokenizer.load(model or TOKENIZER_PATH)
    with serving(InProcessCore(build_from_config(config)), settings, tokenizer=tokenizer) as server:
        yield server
