"""Mistakes at the server's start: one line, exit code 2."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from server_process import MODEL, beside_progress, start

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.model_store import resolve
from firstdiff.engine.server import ServeSettings, serve_main


def check_mistake(stdout: str, stderr: str, says: str) -> None:
    assert stdout == ""
    stderr = beside_progress(stderr)
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("firstdiff serve: expected "), stderr
    assert ", got " in stderr
    assert says in stderr


def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(port=port)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    check_mistake(stdout, stderr, f"got {port}")


def test_a_model_that_the_core_cannot_build_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    healthy = resolve(MODEL).path
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(healthy / name)
    config = json.loads((healthy / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    process = start(model=str(tmp_path))
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    check_mistake(stdout, stderr, "")


@pytest.mark.parametrize(
    ("engine", "serve", "says"),
    [
        ({"model": "no-such-model"}, {}, "no-such-model"),
        ({"model": "FOLDER/nowhere"}, {}, "nowhere"),
        ({"model": "FOLDER"}, {}, ""),
        ({"faults": ("no-such-fault",)}, {}, "no-such-fault"),
        ({"block_size": 0}, {}, "--block-size"),
        ({}, {"port": 70000}, "--port"),
        ({}, {"host": "no such host"}, "--host as an address of this machine, got 'no such host': "),
        ({}, {"host": "h" * 64}, "--host as an address of this machine, got 'hhh"),
        # Reserved for documentation: no machine has it.
        ({}, {"host": "192.0.2.1"}, "--host as an address of this machine, got '192.0.2.1', which is not: "),
        ({}, {"max_body_bytes": 1}, "--max-body-bytes"),
        ({}, {"body_timeout_s": float("nan")}, "--body-timeout"),
        ({}, {"write_timeout_s": 0.0}, "--write-timeout"),
        ({}, {"drain_timeout_s": -1.0}, "--drain-timeout"),
        ({}, {"api_keys": ("good", "two words")}, "--api-key"),
        ({"logprobs_mode": "raw_logits"}, {}, "--logprobs-mode"),
        ({}, {"served_model_name": ""}, "--served-model-name"),
        ({}, {"otlp_endpoint": "not a url"}, "not a url"),
        ({}, {"log_dir": "FOLDER/file/log"}, "--log-dir"),
        ({}, {"log_dir": "FOLDER/file"}, "--log-dir"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    serve: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("")

    def placed(value: Any) -> Any:
        return value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value

    config = EngineConfig(**{"model": MODEL} | {name: placed(value) for name, value in engine.items()})
    serve = {"port": 0} | {name: placed(value) for name, value in serve.items()}
    if "log_dir" in serve:
        serve["log_dir"] = Path(serve["log_dir"])
    assert serve_main(ServeSettings(engine=config, **serve)) == 2
    check_mistake(*capsys.readouterr(), says)
