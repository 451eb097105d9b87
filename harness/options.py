"""Groups of command-line options that several commands share, and what makes an option a mistake.

Owns: the flags' names, defaults and help, how a group becomes single flags, refusing a flag that would do
nothing or a path that cannot be written. Refuses to know: commands.
Invariants: a flag means the same in every command that has it; checks of paths create nothing.

Usage: `@app.command() @with_groups def run(url: str, workload: WorkloadOptions) -> None: ...`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from firstdiff.harness.dialect import DIALECTS
from firstdiff.harness.sessions import Target
from firstdiff.harness.workload import MAX_CASES, WorkloadSpec

FAULT_NAMES = ("kv-block-off-by-one", "decode-position-plus-one", "slow-decode")
"""What help says beside `--fault`; a test holds it to the engine's own table, which checks what is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What to ask, and how many at a time."""

    workload: Annotated[
        Literal["chat", "text", "copy", "tokens"], typer.Option(help="What kind of prompts to make.")
    ] = "chat"
    file: Annotated[Path | None, typer.Option(help="Ask the requests of this JSONL file instead.")] = None
    cases: Annotated[int, typer.Option(help="How many different requests.")] = 32
    max_tokens: Annotated[int, typer.Option(help="Output tokens a request, at most.")] = 48
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of arrivals.")] = 0
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    sampling_seed: Annotated[int | None, typer.Option(help="Seed to send, plus the case's index.")] = None
    logprobs: Annotated[int, typer.Option(min=-1, max=20, help="Top ones to ask for; -1: none.")] = 5
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always --max-tokens long.")] = False
    prompt_tokens: Annotated[int, typer.Option(help="Prompt length of --workload tokens.")] = 128
    vocab_size: Annotated[int, typer.Option(help="For --workload tokens; 0: ask the endpoint.")] = 0
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 4

    def spec(self, *, repeats: int, rate_per_s: float | None = None) -> WorkloadSpec:
        """The workload; ValueError when a value is out of bounds. A file is asked whole."""
        spec = WorkloadSpec(
            kind="file" if self.file else self.workload,
            path=str(self.file) if self.file else None,
            num_cases=MAX_CASES if self.file else self.cases,
            max_tokens=self.max_tokens,
            seed=self.seed,
            temperature=self.temperature,
            sampling_seed=self.sampling_seed,
            logprobs=None if self.logprobs < 0 else self.logprobs,
            ignore_eos=self.ignore_eos,
            prompt_tokens=self.prompt_tokens,
            vocab_size=self.vocab_size,
            concurrency=self.concurrency,
            repeats=repeats,
            rate_per_s=rate_per_s,
        )
        spec.validate()
        return spec

    def idle(self, *, rate_per_s: float | None = None) -> dict[str, str]:
        """The options that these values leave without effect, each with what it would need."""
        idle: dict[str, str] = {}
        if self.file:
            idle |= dict.fromkeys(("workload", "cases"), "--file is asked as it stands")
        if self.file and rate_per_s is None:
            idle["seed"] = "--file leaves it nothing to choose without --rate"
        if self.file or self.workload != "tokens":
            idle |= dict.fromkeys(("prompt_tokens", "vocab_size"), "it is for --workload tokens")
        return idle


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """How to talk to an endpoint."""

    model: Annotated[str | None, typer.Option(help="Default: the first one it lists.")] = None
    dialect: Annotated[
        str | None,
        typer.Option(metavar=f"<{'|'.join(DIALECTS)}>", help="Default: found out by asking."),
    ] = None
    api_key: Annotated[str | None, typer.Option(envvar="FIRSTDIFF_API_KEY")] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a request may take.")] = 600.0

    def target(self, url: str, label: str, *, log_dir: Path | None = None) -> Target:
        """The endpoint at `url`."""
        return Target(
            url=url,
            label=label,
            model=self.model,
            dialect=self.dialect,
            api_key=self.api_key,
            timeout_s=self.timeout,
            log_dir=log_dir,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What one server is made of; the bounds are the engine's own."""

    model: Annotated[
        str,
        typer.Option(
            help="A name that `model pull` fetched, a folder, a .gguf file, a hub id, or tiny-random."
        ),
    ]
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of weights and arithmetic.")] = "fp32"
    threads: Annotated[
        int,
        typer.Option(help="Threads of the model's arithmetic; 0: as many as a start-up trial finds fastest."),
    ] = 0
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16
    num_blocks: Annotated[int, typer.Option(help="KV blocks; 0: enough, up to 2 GiB or one context.")] = 0
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in a step, at most.")] = 32
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step, at most.")] = 512
    max_model_len: Annotated[int, typer.Option(help="Context length; 0: what the model says.")] = 0
    max_num_waiting: Annotated[
        int, typer.Option(help="Requests beyond --max-num-seqs that may wait; 429 then.")
    ] = 1024
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse KV blocks of equal prefixes.")] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        typer.Option(help="By arrival, or by the field priority first."),
    ] = "fcfs"
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        typer.Option(help="Log-probabilities before or after penalties, temperature and truncation."),
    ] = "raw_logprobs"
    deterministic: Annotated[
        bool | None,
        typer.Option(help="The same bits alone, batched, chunked and cached; default: where kernels run."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one; default: random.")] = None
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"<{'|'.join(FAULT_NAMES)}>", help="Plant a defect in the engine; repeat for more."
        ),
    ] = None

    def engine_fields(self) -> dict[str, Any]:
        """What an EngineConfig is made of."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "fault"}
        return values | {"faults": tuple(self.fault or ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Where one server listens, whom it answers and how long it waits; the bounds are the server's own."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one and prints it.")] = 8000
    served_model_name: Annotated[str | None, typer.Option(help="Default: --model.")] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="FIRSTDIFF_API_KEY", help="Who sends it is answered; repeat for more."),
    ] = None
    log_dir: Annotated[Path | None, typer.Option(help="Write token log and steps here.")] = None
    log_content: Annotated[
        Literal["full", "ids", "hash"],
        typer.Option(help="Log all; no texts and bodies; or digests in place of texts and token ids."),
    ] = "full"
    log_max_bytes: Annotated[int, typer.Option(help="Begin the next log file at this size; 0: never.")] = 0
    log_max_row_bytes: Annotated[
        int, typer.Option(help="Cut a log row that is larger, and say so in it.")
    ] = 16 << 20
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send spans to this collector; default: OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = None
    otlp_protocol: Annotated[
        str | None, typer.Option(help="http/protobuf or grpc; default: OTEL_EXPORTER_OTLP_PROTOCOL, or http.")
    ] = None
    trace_sample_fraction: Annotated[
        float | None, typer.Option(help="Keep this share of traces; default: OTEL_TRACES_SAMPLER, or all.")
    ] = None
    trace_slow: Annotated[
        float | None, typer.Option(help="Keep also those of requests that took so many seconds.")
    ] = None
    metrics_dialect: Annotated[
        Literal["firstdiff", "vllm"], typer.Option(help="vllm: metrics under vLLM's names too.")
    ] = "firstdiff"
    max_body_bytes: Annotated[int, typer.Option(help="Of a request, decompressed.")] = 4 << 20
    body_timeout: Annotated[float, typer.Option(help="Seconds a request may take to arrive.")] = 60.0
    write_timeout: Annotated[float, typer.Option(help="Seconds an answer may lie unread.")] = 60.0
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish what runs after a signal.")] = 30.0
    in_process: Annotated[bool, typer.Option("--in-process", help="Server and core in one.")] = False
    stop_on_stdin_end: Annotated[bool, typer.Option("--stop-on-stdin-end", hidden=True)] = False

    def serve_fields(self) -> dict[str, Any]:
        """What ServeSettings are made of, beside the engine's."""
        renamed = {"body_timeout": "body_timeout_s", "write_timeout": "write_timeout_s"}
        renamed |= {"drain_timeout": "drain_timeout_s", "trace_slow": "trace_slow_s"}
        values = {renamed.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        del values["stop_on_stdin_end"]
        return values | {"api_keys": tuple(values.pop("api_key") or ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How one Run is filled, and where it goes."""

    out: Annotated[Path | None, typer.Option(help="The Run's directory; default runs/<run id>.")] = None
    label: Annotated[str, typer.Option(help="What to call this side.")] = "run"
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the Run in --out.")] = False
    repeats: Annotated[int, typer.Option(help="Ask each case this often.")] = 1
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second, open loop.")] = None
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, in a file of their own.")] = 1
    log_dir: Annotated[Path | None, typer.Option(help="The server's --log-dir, for its rows.")] = None

    def check(self) -> None:
        """ValueError for what no Run can be made of."""
        if self.resume and self.out is None:
            raise ValueError("expected --out with --resume, got none: name the Run to go on with")
        if self.log_dir is not None and not self.log_dir.is_dir():
            raise ValueError(
                f"expected the server's log folder for --log-dir, got {self.log_dir}, which is none: "
                "give the folder that its own --log-dir names"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demonstration serves and asks."""

    model: Annotated[str, typer.Option(help="The model to serve three times.")] = "smollm2-135m"
    cases: Annotated[int, typer.Option(help="How many different requests.")] = 64
    max_tokens: Annotated[int, typer.Option(help="Output tokens a request, at most.")] = 20
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 4
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"<{'|'.join(FAULT_NAMES)}>",
            help="The candidate's defects; default decode-position-plus-one and slow-decode.",
        ),
    ] = None

    @property
    def faults(self) -> list[str]:
        return ["decode-position-plus-one", "slow-decode"] if self.fault is None else self.fault

    def spec(self) -> WorkloadSpec:
        """The workload; ValueError when a value is out of bounds."""
        spec = WorkloadSpec(
            num_cases=self.cases, max_tokens=self.max_tokens, concurrency=self.concurrency, seed=self.seed
        )
        spec.validate()
        return spec

    def serve_args(self) -> dict[str, list[str]]:
        """The arguments of `firstdiff serve` by label; the candidate alone has the defects."""
        healthy = ["--model", self.model]
        planted = [part for name in self.faults for part in ("--fault", name)]
        return {"base": healthy, "twin": healthy, "candidate": [*healthy, *planted]}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """How two Runs are judged; the defaults are the judge's own."""

    floor: Annotated[Path | None, typer.Option(help="A Run of a twin of BASE: the noise floor.")] = None
    alpha: Annotated[float | None, typer.Option(help="False alarms allowed.")] = None
    latency_margin: Annotated[float | None, typer.Option(help="Slower by this share is fine.")] = None

    def changes(self) -> dict[str, float]:
        """The settings that differ from the judge's own."""
        values = {"alpha": self.alpha, "latency_margin": self.latency_margin}
        return {name: value for name, value in values.items() if value is not None}


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Say which extra to install when a library of that extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("firstdiff"):
            raise
        raise ValueError(
            f"expected the module {error.name}, which is not installed: pip install 'firstdiff[{extra}]'"
        ) from error


def names_of(*groups: type) -> list[str]:
    """The parameters' names of whole groups."""
    return [field.name for group in groups for field in fields(group)]


def refuse_given(context: typer.Context, reasons: dict[str, str]) -> None:
    """ValueError for the first of these parameters that stands on the command line."""
    for parameter in context.command.params:
        if parameter.name not in reasons:
            continue
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            flag = max(parameter.opts, key=len)
            raise ValueError(f"expected no {flag} here, got one: {reasons[parameter.name]}, so leave it out")


def check_output_folder(path: Path, flag: str) -> None:
    """ValueError unless `path` is a folder to write into, or can be made one."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    _check_folder(existing, f"{flag} {path}")


def check_output_file(path: Path | None, flag: str) -> None:
    """ValueError unless the file `path` can be written, whose folder must be there."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"expected a file to write for {flag}, got the folder {path}: name a file in it")
    _check_folder(path.absolute().parent, f"{flag} {path}")


def _check_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ValueError(
            f"expected a folder at {folder} for {what}, got {found}: make it, or choose another place"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"expected a folder that can be written for {what}, got {folder}, which cannot: "
            "choose another place"
        )


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with each parameter that is a group spread out into the group's single options.

    An option of type Literal is a string to the parser; another value than its own is a ValueError here.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    choices: dict[str, tuple[str, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []

    def take(name: str, default: object, hint: Any) -> None:  # noqa: ANN401 - a type, of whatever kind
        values = get_args(get_args(hint)[0]) if get_origin(hint) is Annotated else ()
        if values and get_origin(get_args(hint)[0]) is Literal:
            option = copy(hint.__metadata__[0])
            option.metavar = f"<{'|'.join(values)}>"
            choices[name] = (f"--{name.strip('_').replace('_', '-')}", values)
            hint = Annotated[str, option]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=hint))

    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            take(parameter.name, parameter.default, hint)
            continue
        groups[parameter.name] = hint
        field_hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            take(field.name, default, field_hints[field.name])

    @wraps(command)
    def spread(**values: Any) -> None:  # noqa: ANN401 - the flags' values, of the flags' types
        for name, (flag, allowed) in choices.items():
            if values[name] not in allowed:
                raise ValueError(f"expected {flag} out of {', '.join(allowed)}, got {values[name]!r}")
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread
