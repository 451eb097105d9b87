"""Compiles the CPU kernels with numba, once for each version of them and each kind of CPU.

Owns: numba's settings and where compiled code is kept. Refuses to know: what is compiled. Invariants: code
compiled from other sources than these is never loaded (numba looks at the caller's file alone, so the
folder is named by all of them); an unwritable cache means compiling again, never an error.

Usage: `@compiled` above a function of ints and floats.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import llvmlite.binding
import numba

from firstdiff.engine.model_cache import cache_dir

P = ParamSpec("P")
T = TypeVar("T")


def kernel_folder() -> Path:
    """Where these sources' compiled kernels are kept."""
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def compiled_mark(*, parallel: bool) -> Path:
    """The file to make when all kernels, with or without the `parallel` ones, were compiled.

    Its name stands for what numba looks at before it takes kept code: itself, Python, the CPU, and place and
    time of the sources. A kept file that is deleted by hand goes unnoticed here, not by numba.
    """
    binding = llvmlite.binding
    cpu = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    stamps = [(str(source), source.stat().st_mtime_ns) for source in _sources()]
    what = repr((parallel, numba.__version__, numba.config.CACHE_DIR, sys.version, cpu, stamps))
    return kernel_folder() / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.compiled"


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("kernel*.py"))


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
