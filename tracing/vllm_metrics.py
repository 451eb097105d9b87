"""The metrics that vLLM has too, a second time under vLLM's names.

Owns: the renaming. Refuses to know: what moves a metric. Invariants: a twin is made of its original while a
scrape is written, so that both have the same values, labels, buckets and exemplars in every scrape, and
keeping it costs nothing in between.

Usage: `registry.register(VllmTwins([(metric, collector), ...]))`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from firstdiff.tracing.metric_table import VLLM_PREFIX, Metric


class Original(Protocol):
    """A metric of the library."""

    def collect(self) -> Iterable[Family]: ...


class VllmTwins(Collector):
    """Twins of those of `originals` that vLLM has."""

    def __init__(self, originals: Sequence[tuple[Metric, Original]]) -> None:
        self._originals = [(metric, original) for metric, original in originals if metric.in_vllm]

    def collect(self) -> Iterator[Family]:
        for metric, original in self._originals:
            for family in original.collect():
                twin = Family(VLLM_PREFIX + metric.name, family.documentation, family.type)
                twin.samples = [
                    sample._replace(name=VLLM_PREFIX + sample.name.removeprefix(metric.prefix))
                    for sample in family.samples
                ]
                yield twin
