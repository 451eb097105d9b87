"""A user's own GGUF file is served as it is, and one that cannot be read is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from toy_gguf import HEAD_DIMS, write_toy

from firstdiff.engine.model_cache import cache_dir
from firstdiff.engine.model_store import resolve

PROMPT = [3, 5, 7, 4, 6]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of its own, with the machine's compiled kernels."""
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernels)
    return cache


@contextmanager
def served(model: Path, cache: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "firstdiff.harness.cli", "serve", "--model", str(model)]
    command += ["--port", "0", "--threads", "1", "--dtype", "fp32", "--served-model-name", "mine"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"FIRSTDIFF_CACHE": str(cache)}
    )
    assert server.stdout is not None
    try:
        line = next(line for line in server.stdout if "listening on" in line)
        yield line.split("listening on ", 1)[1].split()[0]
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()


def completion(url: str, **body: Any) -> dict[str, Any]:
    raw = json.dumps({"model": "mine", **body}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data=raw, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer: dict[str, Any] = json.load(reply)["choices"][0]
    return answer


@pytest.mark.parametrize(("arch", "by_folder"), [("llama", False), ("qwen3", True), ("gemma3", False)])
def test_a_file_or_its_folder_is_served(tmp_path: Path, cache: Path, arch: str, by_folder: bool) -> None:
    from transformers import AutoModelForCausalLM

    home = tmp_path / "home"
    home.mkdir()
    file = write_toy(home / "toy.gguf", arch=arch)
    reference = AutoModelForCausalLM.from_pretrained(home, gguf_file=file.name, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for _ in range(2):  # made, then found
        with served(home if by_folder else file, cache) as url:
            answer = completion(url, prompt=PROMPT, max_tokens=1, temperature=0, echo=True, logprobs=1)
        got = answer["logprobs"]["token_logprobs"][1:5]
        want = [expected[at, token].item() for at, token in enumerate(PROMPT[1:])]
        # The toys' weights are large, and so are their log-probabilities.
        assert got == pytest.approx(want, abs=1e-4, rel=5e-5)
    assert sorted(path.name for path in home.iterdir()) == ["toy.gguf"]
    assert len([path for path in (cache / "models").iterdir() if path.is_dir()]) == 1


def refused(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FIRSTDIFF_CACHE", str(cache))
    with pytest.raises(ValueError, match=file.name) as caught:
        resolve(str(file))
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []
    return str(caught.value)


def test_files_that_cannot_be_read_are_refused_and_leave_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_toy(tmp_path / "whole.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    for content in (b"", b"hello", b"GGUF", b"GGUF" + b"\xff" * 60):
        bad.write_bytes(content)
        assert "expected a whole GGUF file" in refused(bad, cache, monkeypatch)
    for length in range(8, len(whole) - 64, len(whole) // 40):
        bad.write_bytes(whole[:length])
        refused(bad, cache, monkeypatch)
    split = write_toy(tmp_path / "part-00001-of-00002.gguf", extra_keys={"split.count": 2})
    assert "merge" in refused(split, cache, monkeypatch)
    for index in range(0, 200, 5):
        broken = bytearray(whole)
        broken[8 + index] ^= 0xFF
        bad.write_bytes(broken)
        monkeypatch.setenv("FIRSTDIFF_CACHE", str(cache))
        try:
            resolve(str(bad))
        except ValueError:
            continue


def test_the_architectures_are_those_of_the_toys() -> None:
    from firstdiff.engine.gguf_weights import ARCHITECTURES

    assert set(HEAD_DIMS) == set(ARCHITECTURES)
