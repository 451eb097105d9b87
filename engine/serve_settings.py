"""What `firstdiff serve` was asked for, and the bounds of it.

Owns: the settings of a server beside its engine's, the check of each. Refuses to know: how a server lives.
Invariants: a setting that cannot be is a ValueError before anything is started.

Usage: `settings = ServeSettings(engine=EngineConfig(model="tiny-random")); settings.validate()`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import get_args

import msgspec

from firstdiff.engine.access import check_keys
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.faults import check_faults
from firstdiff.tracing.metrics import MetricsDialect
from firstdiff.tracing.otlp_export import OtlpTarget
from firstdiff.tracing.records import LogContent
from firstdiff.tracing.token_log import LogLimits
from firstdiff.tracing.trace_sampling import Sampler

MAX_TIMEOUT_S = 86_400.0
LOG_CONTENTS: tuple[LogContent, ...] = get_args(LogContent)
METRICS_DIALECTS: tuple[MetricsDialect, ...] = get_args(MetricsDialect)
MIN_LOG_BYTES, MAX_LOG_BYTES = 1 << 16, 1 << 44
MIN_LOG_ROW_BYTES, MAX_LOG_ROW_BYTES = 1 << 14, 1 << 30


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `firstdiff serve` was asked for.

    `port` 0 takes any free one. `log_dir` None keeps no files; a file of `log_max_bytes` is followed by the
    next, 0 never; a row of more than `log_max_row_bytes` is cut. `otlp_endpoint`, `otlp_protocol`
    and `trace_sample_fraction` None leave it to OpenTelemetry's variables; `trace_slow_s` None: being slow is
    no reason to keep a trace. With the `metrics_dialect` "vllm", metrics are there under vLLM's names too.
    `served_model_name` None serves under the model's own name. `body_timeout_s` bounds a request's head as
    well as its body, `write_timeout_s` how long a client may leave an answer unread, `drain_timeout_s` how
    long running requests may take to finish after a signal. Without `api_keys` anybody is answered.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    log_dir: Path | None = None
    log_content: str = "full"
    log_max_bytes: int = 0
    log_max_row_bytes: int = 16 << 20
    in_process: bool = False
    served_model_name: str | None = None
    otlp_endpoint: str | None = None
    otlp_protocol: str | None = None
    trace_sample_fraction: float | None = None
    trace_slow_s: float | None = None
    metrics_dialect: str = "firstdiff"
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    api_keys: tuple[str, ...] = ()

    def validate(self) -> None:
        """Make `log_dir`; ValueError (expected, got, what to do) on the first setting that cannot be."""
        self.engine.validate()
        check_faults(self.engine.faults)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"expected --port in 0..65535, got {self.port}")
        if not 1024 <= self.max_body_bytes <= 1 << 30:
            raise ValueError(f"expected --max-body-bytes in 1024..{1 << 30}, got {self.max_body_bytes}")
        for flag, seconds, low in (
            ("--body-timeout", self.body_timeout_s, 0.001),
            ("--write-timeout", self.write_timeout_s, 0.001),
            ("--drain-timeout", self.drain_timeout_s, 0.0),
        ):
            if not low <= seconds <= MAX_TIMEOUT_S:
                raise ValueError(f"expected {flag} in {low:g}..{MAX_TIMEOUT_S:g} seconds, got {seconds:g}")
        check_keys(self.api_keys)
        if self.served_model_name == "":
            raise ValueError("expected --served-model-name with a character or more, got none: leave it out")
        self.otlp()
        self.sampler()
        self.log_limits()
        self.dialect()
        if self.log_dir is not None:
            make_log_dir(self.log_dir)

    def otlp(self) -> OtlpTarget | None:
        """The collector; ValueError when what names it cannot be used."""
        return OtlpTarget.from_environment(
            os.environ, endpoint=self.otlp_endpoint, protocol=self.otlp_protocol
        )

    def sampler(self) -> Sampler:
        """Which traces are kept; ValueError when that cannot be told."""
        fraction, slow_s = self.trace_sample_fraction, self.trace_slow_s
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"expected --trace-sample-fraction in 0..1, got {fraction:g}")
        if slow_s is not None and not 0 <= slow_s <= MAX_TIMEOUT_S:
            raise ValueError(f"expected --trace-slow in 0..{MAX_TIMEOUT_S:g} seconds, got {slow_s:g}")
        slow_ns = None if slow_s is None else int(slow_s * 1e9)
        return Sampler.from_environment(os.environ, fraction=fraction, slow_ns=slow_ns)

    def dialect(self) -> MetricsDialect:
        """Under whose names metrics are shown; ValueError when there is no such dialect."""
        dialect = next((one for one in METRICS_DIALECTS if one == self.metrics_dialect), None)
        if dialect is None:
            raise ValueError(
                f"expected --metrics-dialect out of {', '.join(METRICS_DIALECTS)}, "
                f"got {self.metrics_dialect!r}"
            )
        return dialect

    def log_limits(self) -> LogLimits:
        """How much the log keeps; ValueError when that cannot be, or there is no log."""
        content = next((one for one in LOG_CONTENTS if one == self.log_content), None)
        if content is None:
            raise ValueError(
                f"expected --log-content out of {', '.join(LOG_CONTENTS)}, got {self.log_content!r}"
            )
        if self.log_max_bytes and not MIN_LOG_BYTES <= self.log_max_bytes <= MAX_LOG_BYTES:
            raise ValueError(
                f"expected --log-max-bytes 0, or in {MIN_LOG_BYTES}..{MAX_LOG_BYTES}, "
                f"got {self.log_max_bytes}"
            )
        if not MIN_LOG_ROW_BYTES <= self.log_max_row_bytes <= MAX_LOG_ROW_BYTES:
            raise ValueError(
                f"expected --log-max-row-bytes in {MIN_LOG_ROW_BYTES}..{MAX_LOG_ROW_BYTES}, "
                f"got {self.log_max_row_bytes}"
            )
        limits = LogLimits(
            content=content, max_file_bytes=self.log_max_bytes, max_row_bytes=self.log_max_row_bytes
        )
        if self.log_dir is None and limits != LogLimits():
            raise ValueError(
                "expected --log-dir beside what is said of the log, got none: name a folder for it"
            )
        return limits


def make_log_dir(log_dir: Path) -> None:
    """Make the log directory; ValueError when it is none or cannot be written to."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise log_error(log_dir, error) from error
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise log_error(log_dir, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def log_error(log_dir: Path | None, error: OSError) -> ValueError:
    return ValueError(
        f"expected --log-dir as a directory to write to, got {log_dir}: {error.strerror}: choose another"
    )
