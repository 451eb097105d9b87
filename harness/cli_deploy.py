"""The command that writes what Prometheus and Grafana need to watch our servers: `firstdiff deploy`.

Owns: this command. Refuses to know: what the files say. Invariants: as in cli.py; a file that is there with
other contents is replaced only where that was asked for.

Usage: `app.command()(deploy)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firstdiff.harness.options import check_output_folder
from firstdiff.harness.progress import printable
from firstdiff.tracing.store import write_atomically


def deploy(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; made if missing.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="A server to scrape; repeat for more. Default 127.0.0.1:8000."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that differ.")] = False,
) -> None:
    """Write a scrape file and rules for Prometheus and a dashboard for Grafana."""
    from firstdiff.tracing.deploy_files import DEFAULT_TARGET, deploy_files

    files = {folder / name: content for name, content in deploy_files(target or [DEFAULT_TARGET]).items()}
    check_output_folder(folder, "DIR")
    for path, content in files.items():
        if not overwrite and path.exists() and path.read_bytes() != content:
            raise ValueError(
                f"expected no {path.name} in {folder}, or one made with the same targets, got another: "
                "choose another folder or give --overwrite"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_atomically(path, content)
        print(printable(str(path)))
