"""The server's life: bind, start the core, serve, stop.

Owns: the order of starting and stopping, the ready line, exit codes. Refuses to know: routes, the engine.
Invariants: the port is taken before anything slow begins, and listens only when requests can be answered;
whatever fails, what was started is stopped; a user's mistake is one line on stderr and exit code 2;
SIGTERM and SIGINT end with exit code 0: nothing new is taken (503), what runs is finished within
`drain_timeout_s` and fails with 503 after that or at a second signal, the log is flushed.

Usage: `sys.exit(serve_main(ServeSettings(engine=EngineConfig(model="smollm2-135m"))))`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random, SystemRandom

import msgspec
from aiohttp import web

from firstdiff.engine.access import exposure_warning
from firstdiff.engine.answering import Answerer
from firstdiff.engine.app import TRACED_ROUTES, Routes
from firstdiff.engine.connections import Connections
from firstdiff.engine.console import log_on_console
from firstdiff.engine.core import build_from_config
from firstdiff.engine.core_client import CoreClient, CoreStartError, InProcessCore, ProcessCore
from firstdiff.engine.dispatcher import Dispatcher
from firstdiff.engine.http_calls import HttpCalls
from firstdiff.engine.listening import bind, port_error, url_of
from firstdiff.engine.model_store import resolve
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.prompts import PromptReader
from firstdiff.engine.serve_settings import ServeSettings as ServeSettings
from firstdiff.engine.serve_settings import log_error
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.clock import Clock, SystemClock
from firstdiff.tracing.records import Identity

EXIT_OK = 0
EXIT_CRASHED = 1
EXIT_USAGE = 2

ANSWER_GRACE_S = 5.0
"""How long answers in flight may take to end after a signal."""

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers; `app` has its routes."""

    url: str
    app: web.Application
    identity: Identity
    dispatcher: Dispatcher
    ledger: ServerLedger


def serve_main(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Mistakes become one line on stderr."""
    try:
        with log_on_console():
            asyncio.run(serve(settings))
    except ValueError as error:
        print(f"firstdiff serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    except CoreStartError as error:
        print(f"firstdiff serve: {error}", file=sys.stderr)
        return EXIT_USAGE if error.is_usage else EXIT_CRASHED
    return EXIT_OK


async def serve(settings: ServeSettings, *, announce: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; `announce` gets the one ready line (default: stdout)."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    stopped = False
    hurry = asyncio.Event()

    def stop() -> None:
        # The first signal stops in order, the second without waiting for what runs; the next ones have their
        # usual effect.
        nonlocal stopped
        if not stopped:
            stopped = True
            task.cancel()
            return
        hurry.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        await _serve_until_cancelled(settings, announce or _print_line, hurry)
    except asyncio.CancelledError:
        if not stopped:
            raise


async def _serve_until_cancelled(
    settings: ServeSettings, announce: Callable[[str], None], hurry: asyncio.Event
) -> None:
    settings.validate()
    listener = bind(settings.host, settings.port)
    warning = exposure_warning(settings.host, settings.api_keys)
    if warning is not None:
        print(f"firstdiff serve: {warning}", file=sys.stderr, flush=True)
    logging.getLogger(__name__).info("loading %s", settings.engine.model)
    try:
        folder = await asyncio.to_thread(resolve, settings.engine.model)
        core: CoreClient
        if settings.in_process:
            core = InProcessCore(build_from_config(settings.engine))
        else:
            core = ProcessCore(settings.engine)
        server = running_server(
            settings,
            listener=listener,
            core=core,
            load_tokenizer=lambda: Tokenizer.load(folder.path),
            clock=SystemClock(),
            rng=SystemRandom(),
            hurry=hurry,
        )
        async with server as running:
            # Modules and tokenizer live as long as the server: scanning them again would only pause streams.
            gc.collect()
            gc.freeze()
            model = settings.served_model_name or running.identity.model
            announce(
                f"firstdiff: listening on {running.url} "
                f"(model {model}, dtype {running.identity.dtype}, pid {os.getpid()})"
            )
            await asyncio.Event().wait()
    finally:
        listener.close()


@asynccontextmanager
async def running_server(
    settings: ServeSettings,
    *,
    listener: socket.socket,
    core: CoreClient,
    load_tokenizer: Callable[[], Tokenizer],
    clock: Clock,
    rng: Random,
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[RunningServer]:
    """A server that listens on the bound `listener` for as long as the context is open.

    Its end waits for running requests, `drain_timeout_s` at most, or until `hurry` is set.
    """
    # The core needs seconds for its model: the tokenizer loads meanwhile.
    tokenizer_task = asyncio.create_task(asyncio.to_thread(load_tokenizer))
    try:
        identity = await core.start()
    except BaseException:
        tokenizer_task.cancel()
        with suppress(asyncio.CancelledError, ValueError, OSError):
            await tokenizer_task
        raise
    try:
        tokenizer = await tokenizer_task
        name = settings.served_model_name or identity.model
        identity = msgspec.structs.replace(identity, special_tokens=tokenizer.special_tokens)
        ledger = _open_ledger(settings, identity, name)
    except BaseException:
        await core.stop()
        raise
    dispatcher = Dispatcher(core, ledger, clock)
    connections = Connections(head_timeout_s=settings.body_timeout_s)
    routes = _routes(settings, identity, name, dispatcher, ledger, tokenizer, clock, rng, connections)
    app = routes.app()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=ANSWER_GRACE_S,
    )
    delivering = asyncio.create_task(dispatcher.run())
    server: asyncio.Server | None = None
    try:
        await runner.setup()
        assert runner.server is not None
        try:
            server = await asyncio.get_running_loop().create_server(
                connections.factory(runner.server), sock=listener, backlog=BACKLOG
            )
        except OSError as error:
            # Another process bound the port without listening, and began to listen first.
            raise port_error(settings.host, settings.port, error) from error
        yield RunningServer(url_of(settings.host, listener), app, identity, dispatcher, ledger)
    finally:
        await _drain(dispatcher, settings.drain_timeout_s, hurry)
        await _stop(server, runner, dispatcher, core, delivering, ledger)


def _routes(
    settings: ServeSettings,
    identity: Identity,
    name: str,
    dispatcher: Dispatcher,
    ledger: ServerLedger,
    tokenizer: Tokenizer,
    clock: Clock,
    rng: Random,
    connections: Connections,
) -> Routes:
    limits = Limits(
        models=(name,),
        vocab_size=identity.vocab_size,
        max_model_len=identity.max_model_len,
        logprobs_mode=settings.engine.logprobs_mode,
        takes_priorities=settings.engine.scheduling_policy == "priority",
    )
    return Routes(
        dispatcher=dispatcher,
        ledger=ledger,
        reader=PromptReader(tokenizer),
        answerer=Answerer(
            dispatcher=dispatcher,
            ledger=ledger,
            tokenizer=tokenizer,
            limits=limits,
            clock=clock,
            rng=rng,
            # Of its own: request and span ids drawn in between must not shift the seeds.
            sampling_rng=rng if settings.engine.seed is None else Random(settings.engine.seed),
            write_timeout_s=settings.write_timeout_s,
        ),
        limits=limits,
        clock=clock,
        rng=rng,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        api_keys=settings.api_keys,
        connections=connections,
        calls=HttpCalls(TRACED_ROUTES, ledger=ledger, clock=clock, rng=rng, sampler=settings.sampler()),
    )


async def _drain(dispatcher: Dispatcher, timeout_s: float, hurry: asyncio.Event | None) -> None:
    """Finish what runs, still answering (503) whoever comes, until time is up or `hurry` is set."""
    if dispatcher.num_open and timeout_s:
        print(
            f"firstdiff serve: finishing {dispatcher.num_open} requests within {timeout_s:g} s: "
            "a second signal ends them",
            file=sys.stderr,
            flush=True,
        )
    draining = asyncio.create_task(dispatcher.drain("the server is shutting down", timeout_s=timeout_s))
    hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurried):
        task.cancel()
    await asyncio.gather(draining, hurried, return_exceptions=True)


async def _stop(
    server: asyncio.Server | None,
    runner: web.AppRunner,
    dispatcher: Dispatcher,
    core: CoreClient,
    delivering: asyncio.Task[None],
    ledger: ServerLedger,
) -> None:
    """Stop listening, fail what is in flight, let those answers out, end the core, flush the log."""
    if server is not None:
        server.close()
    dispatcher.stop_taking("the server is shutting down")
    try:
        await runner.cleanup()
        await core.stop()
        await delivering
    finally:
        await asyncio.to_thread(ledger.close)
        if ledger.num_lost_rows:
            print(f"firstdiff serve: {ledger.num_lost_rows} rows of the log were lost", file=sys.stderr)


def _open_ledger(settings: ServeSettings, identity: Identity, model_name: str) -> ServerLedger:
    try:
        return ServerLedger(
            identity,
            model_name=model_name,
            log_dir=settings.log_dir,
            otlp=settings.otlp(),
            sampler=settings.sampler(),
            log_limits=settings.log_limits(),
            metrics_dialect=settings.dialect(),
        )
    except OSError as error:
        raise log_error(settings.log_dir, error) from error


def _print_line(line: str) -> None:
    print(line, flush=True)
