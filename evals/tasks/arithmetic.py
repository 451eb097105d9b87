"""The items of the arithmetic task, made from a seed.

Owns: questions, worked examples and right answers. Refuses to know: templates and scoring (the YAML's).
Invariants: the items depend only on (num_items, seed); no question comes twice or is one of the examples.

Usage: `load(num_items=200, seed=0)["test"][0]["question"]`; lm-eval calls it by `!function arithmetic.load`.
"""

from __future__ import annotations

import random
from typing import Any

MAX_ITEMS = 1000
_EXAMPLES = ((4, "+", 3), (23, "+", 5), (9, "-", 2), (31, "+", 42))


def _answer(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


def _draw(rng: random.Random, level: int) -> tuple[int, str, int]:
    if level == 0:
        return rng.randint(1, 9), "+", rng.randint(1, 9)
    if level == 1:
        return rng.randint(10, 89), "+", rng.randint(1, 9)
    if level == 2:
        left = rng.randint(2, 18)
        return left, "-", rng.randint(1, left - 1)
    return rng.randint(10, 89), "+", rng.randint(10, 89)


def make_items(num_items: int, seed: int) -> list[dict[str, str]]:
    """`num_items` different questions of four kinds in turn, each with `examples` and its `answer`."""
    if not 1 <= num_items <= MAX_ITEMS:
        raise ValueError(
            f"expected num_items in 1..{MAX_ITEMS}, got {num_items}: there are not more small sums"
        )
    rng = random.Random(f"firstdiff arithmetic {seed}")
    examples = "".join(
        f"{left} {sign} {right} = {_answer(left, sign, right)}\n" for left, sign, right in _EXAMPLES
    )
    seen = set(_EXAMPLES)
    items: list[dict[str, str]] = []
    while len(items) < num_items:
        # Kinds with few questions run out; then the last, which has thousands, takes their turn.
        level = len(items) % 4 if len(items) < 200 else 3
        left, sign, right = _draw(rng, level)
        if (left, sign, right) in seen:
            continue
        seen.add((left, sign, right))
        items.append(
            {
                "examples": examples,
                "question": f"{left} {sign} {right} =",
                "answer": str(_answer(left, sign, right)),
            }
        )
    return items


def load(*, num_items: int, seed: int, **metadata: object) -> dict[str, Any]:
    """The test split as lm-eval wants it; the task's metadata comes along and changes nothing."""
    import datasets

    return {"test": datasets.Dataset.from_list(make_items(num_items, seed))}
