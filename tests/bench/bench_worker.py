"""One side of the benchmark: reads requests on stdin, runs waves, writes measurements on stdout.

`cpu_s` is of this process and its children, user and system; `wall_s` from submitting the wave to its last
token; `tokens` is what came back, counted, not assumed.

Usage: `python tests/bench/bench_worker.py engine smollm2-135m bf16 2`; a fifth argument is the side's Python.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

Prompts = list[list[int]]
Wave = Callable[[Prompts, int], int]
WARM_UP_TOKENS = 8
START_S_MAX = 300


def make_prompts(concurrency: int, num_tokens: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(100, 49_000) for _ in range(num_tokens)] for _ in range(concurrency)]


def engine_wave(model: str, dtype: str, threads: int) -> Wave:
    from firstdiff.engine.build import build_engine
    from firstdiff.engine.config import EngineConfig
    from firstdiff.engine.engine import EngineRequest
    from firstdiff.tracing.clock import SystemClock
    from firstdiff.tracing.records import Sampling

    config = EngineConfig(model=model, dtype=dtype, threads=threads)  # type: ignore[arg-type]
    engine, _ = build_engine(config, emit=lambda row: None, clock=SystemClock())

    def wave(prompts: Prompts, num_output: int) -> int:
        sampling = Sampling(
            temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=num_output, ignore_eos=True
        )
        for index, prompt in enumerate(prompts):
            engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        tokens = 0
        while engine.has_work:
            tokens += len(engine.step())
        return tokens

    return wave


def transformers_wave(model: str, dtype: str, threads: int) -> Wave:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from firstdiff.engine.model_store import resolve

    torch.set_num_threads(threads)
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    loaded = AutoModelForCausalLM.from_pretrained(
        resolve(model).path, dtype=torch_dtype, attn_implementation="sdpa"
    ).eval()

    def wave(prompts: Prompts, num_output: int) -> int:
        generation = GenerationConfig(max_new_tokens=num_output, do_sample=False, eos_token_id=-1)
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512, allow_block_sharing=False)
        outputs = loaded.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, warmup=False
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    return wave


def http_wave(model: str, dtype: str, threads: int) -> Wave:
    """Our server with everything on, driven by a bare client that counts the token ids it is sent."""
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory()
    command = [sys.executable, "-m", "firstdiff.harness.cli", "serve", "--model", model, "--dtype", dtype]
    command += ["--threads", str(threads), "--port", "0", "--log-dir", folder.name]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    end_with_us(server)
    assert server.stdout is not None
    line = next(line for line in server.stdout if "listening on" in line)
    return client_wave(line.split("listening on ", 1)[1].split()[0], model)


def vllm_wave(model: str, dtype: str, threads: int) -> Wave:
    """vLLM's own server on the same files, prefix cache off, for the same client."""
    import os
    import socket
    import subprocess

    from firstdiff.engine.model_store import resolve

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    python = Path(sys.argv[5])
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(resolve(model).path)]
    command += ["--served-model-name", model, "--dtype", {"bf16": "bfloat16", "fp32": "float32"}[dtype]]
    command += ["--host", "127.0.0.1", "--port", port, "--max-model-len", "2048", "--max-num-seqs", "32"]
    command += ["--no-enable-prefix-caching"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | settings)
    end_with_us(server)
    url = f"http://127.0.0.1:{port}"
    wait_until_healthy(url, server.poll)
    return client_wave(url, model)


def end_with_us(server: subprocess.Popen[Any]) -> None:
    import atexit

    atexit.register(server.wait)
    atexit.register(server.terminate)


def wait_until_healthy(url: str, ended: Callable[[], int | None]) -> None:
    import urllib.error
    import urllib.request

    for _ in range(START_S_MAX):
        if (code := ended()) is not None:
            raise RuntimeError(f"expected a server at {url}, got exit code {code}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise RuntimeError(f"expected a server at {url} within {START_S_MAX} s")


def client_wave(url: str, model: str) -> Wave:
    import aiohttp

    async def one(session: aiohttp.ClientSession, prompt: list[int], num_output: int) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": num_output, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        tokens = 0
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for raw in reply.content:
                if raw.startswith(b"data: {"):
                    tokens += sum(len(c.get("token_ids") or []) for c in json.loads(raw[6:])["choices"])
        return tokens

    async def all_of(prompts: Prompts, num_output: int) -> int:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            return sum(await asyncio.gather(*(one(session, prompt, num_output) for prompt in prompts)))

    return lambda prompts, num_output: asyncio.run(all_of(prompts, num_output))


def cpu_s() -> float:
    """CPU seconds of this process and all its living and reaped descendants."""
    import os

    total = time.process_time()
    ticks = os.sysconf("SC_CLK_TCK")
    stats = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it ended between the listing and the read
            stats[int(folder.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks)
    family = {os.getpid()}
    while True:
        grown = family | {pid for pid, (parent, _) in stats.items() if parent in family}
        if grown == family:
            break
        family = grown
    return total + sum(stats[pid][1] for pid in family if pid != os.getpid() and pid in stats)


def main() -> None:
    side, model, dtype, threads = sys.argv[1:5]
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries that print must not mix with the answers
    makers = {"engine": engine_wave, "transformers": transformers_wave, "http": http_wave, "vllm": vllm_wave}
    wave = makers[side](model, dtype, int(threads))
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("warm_up"):
            wave(make_prompts(2, 32, seed=99), WARM_UP_TOKENS)
            answer: dict[str, float] = {}
        else:
            prompts = make_prompts(request["concurrency"], request["prompt_tokens"], request["seed"])
            started_s, started_cpu_s = time.monotonic(), cpu_s()
            tokens = wave(prompts, request["output_tokens"])
            answer = {
                "tokens": tokens,
                "wall_s": time.monotonic() - started_s,
                "cpu_s": cpu_s() - started_cpu_s,
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
