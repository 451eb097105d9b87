"""Compiles the CPU kernels with numba, once for each version of them and each kind of CPU.

Owns: numba's settings and where compiled code is kept. Refuses to know: what is compiled. Invariants: code
compiled from other sources than these is never loaded (numba looks at the caller's file alone, so the
folder is named by all of them); an unwritable cache means compiling again, never an error.

Usage: `@compiled` above a function of ints and floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba

from firstdiff.engine.model_cache import cache_dir

P = ParamSpec("P")
T = TypeVar("T")


def kernel_folder() -> Path:
    """Where these sources' compiled kernels are kept."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("kernel*.py")):
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Machine code at the first call."""
    return _compiled(function, parallel=False)


def compiled_parallel(function: Callable[P, T]) -> Callable[P, T]:
    """As `compiled`; loops over `prange` run on numba's threads."""
    return _compiled(function, parallel=True)


def _compiled(function: Callable[P, T], *, parallel: bool) -> Callable[P, T]:
    # No fastmath: the order of sums is a promise. numpy's error model: a check a division stops vectors.
    jit = numba.njit(nogil=True, error_model="numpy", parallel=parallel)
    made = jit(function)
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or str(kernel_folder())
    try:
        made.enable_caching()
    except RuntimeError:
        pass  # nowhere to write: it is compiled in every process
    finally:
        numba.config.CACHE_DIR = before
    return cast("Callable[P, T]", made)
