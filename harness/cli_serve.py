"""The commands that need the bundled engine: `firstdiff serve` and `firstdiff model`.

Owns: these commands. Refuses to know: how a model is served or fetched, exit codes of other commands.
Invariants: as in cli.py; the engine is imported inside the commands, so that the base install has the others;
a key given by the environment is a key.

Usage: `app.command()(serve)`.
"""

from __future__ import annotations

import sys

import typer

from firstdiff.harness.options import HttpOptions, ServeOptions, needing, with_groups
from firstdiff.harness.parent import end_with_standard_input

model_app = typer.Typer(help="Fetch and list models.", no_args_is_help=True, rich_markup_mode=None)


@with_groups
def serve(options: ServeOptions, http: HttpOptions) -> None:
    """Serve a model over the OpenAI HTTP API."""
    with needing("engine"):
        from firstdiff.engine.config import EngineConfig
        from firstdiff.engine.server import ServeSettings, serve_main

        if http.stop_on_stdin_end:
            end_with_standard_input()
        settings = ServeSettings(engine=EngineConfig(**options.engine_fields()), **http.serve_fields())
        raise typer.Exit(serve_main(settings))


@model_app.command("pull")
def model_pull(name: str) -> None:
    """Fetch a model once into the user's cache and print its folder."""
    with needing("engine"):
        from firstdiff.engine.model_store import pull

        folder = pull(name, report=lambda line: print(line, file=sys.stderr, flush=True))
        print(folder.path)


@model_app.command("list")
def model_list() -> None:
    """Name the models that `pull` knows."""
    with needing("engine"):
        from firstdiff.engine.model_store import KNOWN_MODELS

        print("\n".join(sorted(KNOWN_MODELS)))
