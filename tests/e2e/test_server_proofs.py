"""The proofs of fields fail on an engine that ignores the field or overdoes it, and truncations add up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_api import CHAT, COMPLETIONS, Api
from parameter_proofs import BOTH
from real_server import real_server
from scripted_server import ServerUnderTest

from firstdiff.engine import runner, sampler
from firstdiff.engine.logits import Place
from firstdiff.engine.structure import Structures
from firstdiff.tracing.records import Sampling

STRUCTURED = [name for name in BOTH if "guided" in name or name in ("response_format", "structured_outputs")]
DEFECTS: dict[str, tuple[str, Callable[[Sampling], dict[str, float]]]] = {
    "temperature is 1 when not 0": ("temperature", lambda s: {"temperature": float(s.temperature > 0)}),
    "temperature is halved": ("temperature", lambda s: {"temperature": s.temperature / 2}),
    "top_p is ignored": ("top_p", lambda s: {"top_p": 1.0}),
    "top_p is greedy": ("top_p", lambda s: {"top_k": int(s.top_p < 1)}),
    "top_p is min_p": ("top_p", lambda s: {"top_p": 1.0, "min_p": s.top_p if s.top_p < 1 else 0.0}),
    "top_k is ignored": ("top_k", lambda s: {"top_k": 0}),
    "top_k is greedy": ("top_k", lambda s: {"top_k": min(s.top_k, 1)}),
    "top_k is one too many": ("top_k", lambda s: {"top_k": s.top_k + (s.top_k > 1)}),
    "min_p is ignored": ("min_p", lambda s: {"min_p": 0.0}),
    "min_p is greedy": ("min_p", lambda s: {"min_p": float(s.min_p > 0)}),
}


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def server(log_dir: Path) -> Iterator[ServerUnderTest]:
    with real_server(serve={"log_dir": log_dir}) as running:
        yield running


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", STRUCTURED)
def test_without_structures_each_of_their_proofs_fails(
    server: ServerUnderTest, log_dir: Path, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    assert len(STRUCTURED) == 6
    monkeypatch.setattr(Structures, "allowed", lambda *_: None)
    with pytest.raises(AssertionError):
        BOTH[field](Api(server, path, log_dir))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_distribution_is_seen(
    server: ServerUnderTest, log_dir: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    field, changes = DEFECTS[defect]

    def choose(logits: Any, place: Place, best_id: int, **kwargs: Any) -> sampler.Choice:
        changed = msgspec.structs.replace(place.sampling, **changes(place.sampling))
        place = Place(changed, place.token_ids, place.num_prompt_tokens)
        return sampler.choose(logits, place, best_id, **kwargs)

    monkeypatch.setattr(runner, "choose", choose)
    with pytest.raises(AssertionError):
        BOTH[field](Api(server, COMPLETIONS, log_dir))


def truncated(raw: NDArray[np.float64], fields: dict[str, float]) -> NDArray[np.float64]:
    """The falling log-probabilities left of falling `raw` ones: temperature, min_p, top_k, top_p."""
    left = raw / fields["temperature"]
    left = left[np.exp(left - left[0]) >= fields["min_p"]][: int(fields["top_k"])]
    shares = np.exp(left - left[0]) / np.exp(left - left[0]).sum()
    left = left[np.cumsum(shares) - shares < fields["top_p"]]
    return left - left[0] - np.log(np.exp(left - left[0]).sum())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("temperature", "min_p_keeps", "top_k", "top_p", "binding"),
    [
        (0.4, 3, 10, 0.7, {"min_p", "top_p"}),
        (0.7, 12, 6, 0.7, {"top_k", "top_p"}),
        (1.3, 5, 10, 0.8, {"min_p", "top_p"}),
        (2.0, 12, 9, 0.8, {"top_k", "top_p"}),
    ],
)
def test_temperature_and_truncations_together(
    server: ServerUnderTest,
    log_dir: Path,
    path: str,
    temperature: float,
    min_p_keeps: int,
    top_k: int,
    top_p: float,
    binding: set[str],
) -> None:
    """All that is left is among the twenty likeliest, so the reference needs no more than those."""
    api = Api(server, path, log_dir)
    plain = api.logprobs(20, max_tokens=1)[0]
    raw = np.array(list(plain.values())[:20])
    # Between the last that it keeps and the next.
    least = (raw[min_p_keeps - 1] + raw[min_p_keeps]) / 2
    min_p = float(np.exp((least - raw[0]) / temperature))
    fields = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    expected = truncated(raw, fields)
    for name in binding:
        without = truncated(raw, fields | {name: {"min_p": 0.0, "top_k": 20, "top_p": 1.0}[name]})
        assert len(without) > len(expected)
    told = api.logprobs(20, max_tokens=1, logprobs_mode="processed_logprobs", **fields)[0]
    assert list(told) == list(plain)[: len(expected)]
    assert list(told.values()) == pytest.approx(expected.tolist(), abs=1e-4)
    drawn = {api.ids(max_tokens=1, seed=seed, **fields)[0] for seed in range(20)}
    assert 1 < len(drawn) <= len(expected)
