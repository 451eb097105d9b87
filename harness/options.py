"""Groups of command-line options that several commands share.

Owns: the flags' names, defaults and help, and how a group becomes single flags. Refuses to know: commands.
Invariants: a flag means the same in every command that has it.

Usage: `@app.command() @with_groups def run(url: str, workload: WorkloadOptions) -> None: ...`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from firstdiff.harness.sessions import Target
from firstdiff.harness.workload import WorkloadSpec


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
        """The workload; ValueError when a value is out of bounds."""
        spec = WorkloadSpec(
            kind="file" if self.file else self.workload,
            path=str(self.file) if self.file else None,
            num_cases=self.cases,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """How to talk to an endpoint."""

    model: Annotated[str | None, typer.Option(help="Default: the first one it lists.")] = None
    dialect: Annotated[str | None, typer.Option(help="Default: found out by asking.")] = None
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

    model: Annotated[str, typer.Option(help="A pulled model's name, a folder, a hub id, or tiny-random.")]
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of weights and arithmetic.")] = "fp32"
    threads: Annotated[int, typer.Option(help="Threads of the model's arithmetic.")] = 1
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16
    num_blocks: Annotated[int, typer.Option(help="KV blocks; 0: enough, up to 2 GiB.")] = 0
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in a step, at most.")] = 32
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step, at most.")] = 512
    max_model_len: Annotated[int, typer.Option(help="Context length; 0: what the model says.")] = 0
    max_num_waiting: Annotated[int, typer.Option(help="Waiting requests, beyond which 429.")] = 1024
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse KV blocks of equal prefixes.")] = True
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one; default: random.")] = None
    fault: Annotated[list[str] | None, typer.Option(help="Plant a defect; repeat for more.")] = None


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with each parameter that is a group spread out into the group's single options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hint, kind=kind))
            continue
        groups[parameter.name] = hint
        field_hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=field_hints[field.name],
                )
            )

    @wraps(command)
    def spread(**values: Any) -> None:  # noqa: ANN401 - the flags' values, of the flags' types
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread
