"""Output tokens a second and CPU seconds a thousand tokens, side by side with transformers.

Every side runs the same prompts on the same weights in the same dtype with the same number of threads, in
turn, in one run: round after round, side after side, so that a slow minute of the machine hits all. Each
wave of `concurrency` requests is submitted at once (prompt 128 random ids, 128 output tokens, greedy, EOS
ignored). The sides:

- `engine`: our engine core, called in its own process;
- `http`: the same engine as `firstdiff serve` gives it, closed loop over HTTP, streaming, client included;
- `vllm`: vLLM's CPU build behind its own server, for the same client as `http`; given by `--vllm-python`;
- `transformers`: transformers' own continuous batching (`generate_batch`), called in its own process.

After the rounds come the shares of a decode step and the worth of prefix reuse.

Usage: `python tests/bench/bench_engine.py --rounds 3 --threads 2`. The last line of stdout is one JSON
document; the lines before it are for people, which `--write-readme` also puts into README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import prefix_reuse
import profile_step
import torch

WORKER = Path(__file__).with_name("bench_worker.py")
README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SIDES = ("engine", "http", "vllm", "transformers")
RATIOS = (("http", "vllm"), ("engine", "transformers"))


class Worker:
    """A side in its own process: one JSON line in, one JSON line out."""

    def __init__(self, side: str, arguments: argparse.Namespace) -> None:
        command = [
            sys.executable,
            str(WORKER),
            side,
            arguments.model,
            arguments.dtype,
            str(arguments.threads),
            arguments.vllm_python or "",
        ]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the worker
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self.ask({"warm_up": True})

    def ask(self, request: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(
                f"expected an answer, got the end of {self._process.args}: {self._errors.read()}"
            )
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._errors.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--write-readme", action="store_true")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM's CPU build")
    arguments = parser.parse_args()
    if "vllm" in arguments.sides and not arguments.vllm_python:
        print("without vLLM: no --vllm-python", file=sys.stderr)
        arguments.sides.remove("vllm")
    return arguments


def memory_bandwidth(threads: int) -> float:
    """GB/s at which `threads` threads of torch add up an array that no cache holds; the best of several."""
    torch.set_num_threads(threads)
    array = torch.ones(100_000_000)
    best_s = min(timed(array.sum) for _ in range(8))
    return array.numel() * array.element_size() / best_s / 1e9


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def floor_tokens_s(arguments: argparse.Namespace, concurrency: int, bandwidth: float) -> float:
    """Tokens a second if a step did nothing but read the weights, and the KV of its rows, once."""
    from firstdiff.engine.model_config import ModelConfig
    from firstdiff.engine.model_store import resolve

    model = ModelConfig.load(resolve(arguments.model).path)
    item = {"bf16": 2, "fp32": 4}[arguments.dtype]
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * q_size + 2 * kv_size + 3 * model.intermediate_size)
    weights = model.num_layers * layer + model.vocab_size * model.hidden_size
    context = arguments.prompt_tokens + arguments.output_tokens / 2
    kv = concurrency * context * 2 * model.num_layers * kv_size
    return concurrency * bandwidth * 1e9 / (item * (weights + kv))


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    workers = {side: Worker(side, arguments) for side in arguments.sides}
    rows: list[dict[str, object]] = []
    try:
        for round_index in range(arguments.rounds):
            for concurrency in arguments.concurrency:
                # Alternate the order, so that no side always runs on the warmer machine.
                sides = list(workers) if round_index % 2 == 0 else list(workers)[::-1]
                for side in sides:
                    answer = workers[side].ask(
                        {
                            "concurrency": concurrency,
                            "seed": 1000 * round_index + concurrency,
                            "prompt_tokens": arguments.prompt_tokens,
                            "output_tokens": arguments.output_tokens,
                        }
                    )
                    row: dict[str, object] = {"round": round_index, "side": side, "concurrency": concurrency}
                    rows.append(row | dict(answer))
                    print(f"round {round_index} {side} x{concurrency}: {answer}", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def summarise(
    rows: list[dict[str, object]], arguments: argparse.Namespace, bandwidth: float
) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for concurrency in arguments.concurrency:
        entry: dict[str, object] = {"concurrency": concurrency}
        for side in arguments.sides:
            mine = [row for row in rows if row["side"] == side and row["concurrency"] == concurrency]
            rates = [float(str(row["tokens"])) / float(str(row["wall_s"])) for row in mine]
            costs = [1000 * float(str(row["cpu_s"])) / float(str(row["tokens"])) for row in mine]
            entry[f"{side} tok/s"] = round(statistics.median(rates), 1)
            entry[f"{side} CPU-s/1k"] = round(statistics.median(costs), 2)
        for ours, theirs in RATIOS:
            if {ours, theirs} <= set(arguments.sides):
                # The ratio is taken inside each round, where both sides met the same machine.
                ratios = [
                    wall_of(rows, index, theirs, concurrency) / wall_of(rows, index, ours, concurrency)
                    for index in range(arguments.rounds)
                ]
                entry[f"{ours} / {theirs}"] = round(statistics.median(ratios), 2)
        entry["floor tok/s"] = round(floor_tokens_s(arguments, concurrency, bandwidth))
        table.append(entry)
    return table


def wall_of(rows: list[dict[str, object]], round_index: int, side: str, concurrency: int) -> float:
    (row,) = (
        row
        for row in rows
        if (row["round"], row["side"], row["concurrency"]) == (round_index, side, concurrency)
    )
    return float(str(row["wall_s"]))


def machine() -> dict[str, str]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "date": datetime.fromtimestamp(time.time(), tz=UTC).date().isoformat(),
    }


def table_lines(table: list[dict[str, object]]) -> list[str]:
    columns = list(table[0])
    rows = ["| " + " | ".join(str(entry[column]) for column in columns) + " |" for entry in table]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows]


def profile_lines(arguments: argparse.Namespace) -> list[str]:
    """Where a decode step's time goes, by concurrency, and what a shared prefix saves."""
    with torch.inference_mode():
        found = {
            c: profile_step.shares(arguments.model, arguments.dtype, c)[1] for c in arguments.concurrency
        }
        seconds = prefix_reuse.measure(arguments.model, arguments.dtype, arguments.threads, arguments.rounds)
    table = [
        {"share of a decode step (1 thread)": part}
        | {f"{c} sequences": f"{found[c][part]:.1%}" for c in arguments.concurrency}
        for part in found[arguments.concurrency[0]]
    ]
    sooner = statistics.median(without / with_reuse for with_reuse, without in seconds)
    tokens, requests = prefix_reuse.PREFIX_TOKENS, prefix_reuse.NUM_REQUESTS
    reuse = (
        f"A prefix of {tokens} tokens shared by {requests} requests: first tokens come {sooner:.1f} times "
        "sooner with prefix reuse than without (mean over the requests, which follow one that computed the "
        f"prefix; median of {arguments.rounds} rounds in turns)."
    )
    return [*table_lines(table), "", *textwrap.wrap(reuse, 110)]


def write_readme(lines: list[str], arguments: argparse.Namespace, bandwidth: float) -> None:
    """Replace what stands between the bench markers of README.md."""
    found = machine()
    caption = (
        f"Measured by `make bench` on {found['date']}: {found['cpu']}, {arguments.threads} threads a side, "
        f"{arguments.dtype}, prompt {arguments.prompt_tokens}, output {arguments.output_tokens}, torch "
        f"{found['torch']}, transformers {found['transformers']}; medians of {arguments.rounds} "
        f"interleaved rounds. The floor is of decoding alone, at the {bandwidth:.1f} GB/s that a sum reached."
    )
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wrapped = "\n".join(textwrap.wrap(caption, 110))
    README.write_text(f"{before}{BEGIN}\n{wrapped}\n\n" + "\n".join(lines) + f"\n{END}{after}")


def main() -> None:
    arguments = parse_arguments()
    bandwidth = memory_bandwidth(arguments.threads)
    rows = measure(arguments)
    # The better of two moments: a floor must not be that of a busy one.
    bandwidth = max(bandwidth, memory_bandwidth(arguments.threads))
    table = summarise(rows, arguments, bandwidth)
    lines = [*table_lines(table), "", *profile_lines(arguments)]
    print("\n".join(lines))
    if arguments.write_readme:
        write_readme(lines, arguments, bandwidth)
    settings = {
        key: value
        for key, value in vars(arguments).items()
        if key not in ("sides", "write_readme", "vllm_python")
    }
    print(
        json.dumps(
            {
                "machine": machine(),
                "bandwidth_gb_s": bandwidth,
                "settings": settings,
                "table": table,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
