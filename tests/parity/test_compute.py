"""How an engine's way of computing is chosen: kernels or torch, and the number of threads."""

from __future__ import annotations

import importlib.util

import numba
import pytest

from firstdiff.engine.attention_cpu import CpuAttention
from firstdiff.engine.compute import choose_compute
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.ops import TorchOps
from firstdiff.engine.ops_kernel import KernelOps
from firstdiff.tracing.clock import SystemClock


def choose(**settings):
    return choose_compute(EngineConfig(model="tiny-random", **settings), clock=SystemClock())


@pytest.mark.parametrize("asked", [None, True])
def test_kernels_are_the_default(asked):
    compute = choose(deterministic=asked)
    assert isinstance(compute.ops, KernelOps)
    assert compute.deterministic


def test_torch_is_taken_when_asked():
    compute = choose(deterministic=False)
    assert isinstance(compute.ops, TorchOps)
    assert compute.make_attention is CpuAttention
    assert not compute.deterministic


@pytest.mark.parametrize("deterministic", [None, False])
def test_threads_are_measured_when_none_are_given(deterministic):
    compute = choose(threads=0, deterministic=deterministic)
    assert compute.threads >= 1
    assert choose(threads=compute.threads, deterministic=deterministic).threads == compute.threads


def test_without_numba_torch_serves_and_determinism_is_refused(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else found(name))
    assert isinstance(choose().ops, TorchOps)
    with pytest.raises(ValueError, match=r"expected numba's .* for --deterministic .* install"):
        choose(deterministic=True)


def test_where_numba_may_not_compile_torch_serves_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert isinstance(choose().ops, TorchOps)
    (record,) = caplog.records
    assert "computing with torch" in record.getMessage()
    assert "unset NUMBA_DISABLE_JIT" in record.getMessage()
    with pytest.raises(ValueError, match=r"--deterministic .* unset NUMBA_DISABLE_JIT"):
        choose(deterministic=True)
    caplog.clear()
    assert isinstance(choose(deterministic=False).ops, TorchOps)
    assert not caplog.records


def test_compiling_is_said_before_it_until_it_was_done_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("FIRSTDIFF_CACHE", str(tmp_path))
    said = []
    for threads in (1, 1, 2, 2):
        choose(threads=threads)
        said.append([record.getMessage().split()[0] for record in caplog.records])
        caplog.clear()
    assert said == [["compiling"], [], ["compiling"], []]


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FIRSTDIFF_CACHE", str(tmp_path / "file"))
    assert isinstance(choose().ops, KernelOps)
