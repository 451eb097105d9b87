"""Generated items for lm-eval's own clients: no download, no file."""

from __future__ import annotations

from typing import Any

SENTENCES = (
    ("The capital of France is", " Paris", " London", " made of cheese"),
    ("Water freezes at zero degrees", " Celsius", " and then it flies", " Napoléon"),
    ("She opened the door and", " walked in", " the the the", " 走了进去"),
    ("2 + 2 =", " 4", " 5", " four hundred"),
    ("The quick brown fox jumps over the lazy", " dog", " fox", " table\n"),
    ("In the beginning", " there was nothing", " quantum", "  \t spaces"),
    ("Once upon a time, in a village far away, there lived", " an old man", " of", " 🙂🙃"),
    ("def add(a, b):\n    return", " a + b", " b - a", " None"),
)
PAGE = (
    "Firstdiff compares two runs of one workload. Where the answers part, it names the first token, the gap "
    "between the two best candidates and the phase that got slower.\n\nA verdict is pass, fail or unknown. "
)


def _split(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(rows)}


def choices(**_: object) -> dict[str, Any]:
    """A context and three endings; the right one moves about, so that ties cannot look right."""
    rows = []
    for index, (context, *endings) in enumerate(SENTENCES):
        turn = index % 3
        turned = endings[turn:] + endings[:turn]
        rows.append({"context": context, "endings": turned, "gold": turned.index(endings[0])})
    return _split(rows)


def pairs(**_: object) -> dict[str, Any]:
    """Two whole sentences without a context."""
    return _split([{"endings": [c + right, c + wrong]} for c, right, wrong, _ in SENTENCES])


def pages(**_: object) -> dict[str, Any]:
    return _split([{"page": PAGE * count} for count in (1, 2, 3)])
