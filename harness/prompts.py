"""Prompts made from a seed: varied in topic, task and length, needing no download.

Owns: the words and how they are put together. Refuses to know: sampling, timing, endpoints.
Invariants: a prompt depends only on (kind, seed, its index), so a longer workload begins with the shorter
one; no two chat prompts of a workload are equal; no text is taken from anybody.

Usage: `messages = chat_messages(seed=0, index=3)`.
"""

from __future__ import annotations

import random

_TASKS = (
    "Explain {topic} to {reader}.",
    "Write a short story about {topic} for {reader}.",
    "List the most important facts about {topic}, one a line.",
    "What do people most often get wrong about {topic}?",
    "Compare {topic} with {other}. Which matters more to {reader}?",
    "Write a letter to {reader} about {topic}.",
    "Give {reader} three questions to ask about {topic}, with answers.",
    "Describe how {topic} changed over the last hundred years.",
    "Summarise the following notes in two sentences.\n\n{notes}",
    "Rewrite the following notes for {reader}.\n\n{notes}",
    "Using the notes below, answer: why does {topic} matter?\n\n{notes}",
    "Write a Python function that works on a list of records about {topic}, and explain it.",
)
_TOPICS = (
    "tides", "bread", "railway timetables", "bees", "maps", "volcanoes", "chess openings", "soap", "bridges",
    "sleep", "rivers", "paper money", "lighthouses", "vaccines", "glass", "the moon", "compost", "alphabets",
    "earthquakes", "bicycles", "salt", "migrating birds", "clocks", "public libraries", "coral reefs", "tea",
    "weather forecasts", "wool", "elevators", "mushrooms", "satellites", "postage stamps", "deserts", "ice",
    "prime numbers", "the human heart", "canals", "concrete", "honey", "sailing ships", "traffic lights",
)  # fmt: skip
_READERS = (
    "a child of eight", "a new neighbour", "an engineer", "a tired teacher", "a visitor from abroad",
    "a sceptical friend", "a farmer", "someone in a hurry", "a class of students", "a retired sailor",
)  # fmt: skip
_SUBJECTS = ("The committee", "A traveller", "My grandmother", "The town", "A young clerk", "The museum",
             "Every winter the harbour", "The survey", "An old catalogue", "The second report")  # fmt: skip
_VERBS = ("kept a record of", "wrote at length about", "argued over", "nearly forgot", "took samples of",
          "raised money for", "made drawings of", "measured", "bought", "lost interest in")  # fmt: skip
_ENDINGS = ("before the war", "for eleven years", "without telling anyone", "in 1{year}", "at great expense",
            "as {count} witnesses agreed", "until the roof fell in", "for the price of {count} horses",
            "and published a table of {count} rows", "whenever it rained")  # fmt: skip


def _rng(kind: str, seed: int, index: int) -> random.Random:
    # A string seeds by its SHA-512, the same in every Python version and process.
    return random.Random(f"firstdiff {kind} {seed} {index}")


def notes(rng: random.Random, num_sentences: int) -> str:
    """Some made-up sentences."""
    sentences = []
    for _ in range(num_sentences):
        ending = rng.choice(_ENDINGS).format(year=rng.randint(500, 899), count=rng.randint(2, 400))
        sentences.append(
            f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_TOPICS)} "
            f"and {rng.choice(_TOPICS)} {ending}."
        )
    return " ".join(sentences)


def chat_messages(*, seed: int, index: int) -> list[dict[str, str]]:
    """An instruction, in a quarter of the cases with a system message or an earlier turn before it."""
    rng = _rng("chat", seed, index)
    # Lengths spread evenly on a logarithmic scale, as in logs of real use: most short, a few long.
    num_sentences = round(2 ** rng.uniform(1, 3.6))
    task = rng.choice(_TASKS).format(
        topic=rng.choice(_TOPICS),
        other=rng.choice(_TOPICS),
        reader=rng.choice(_READERS),
        notes=notes(rng, num_sentences),
    )
    # The number makes each prompt of a workload differ from all others.
    messages = [{"role": "user", "content": f"{task}\n\nUse at most {30 + index} words."}]
    shape = rng.random()
    if shape < 0.15:
        style = rng.choice(("briefly", "politely", "with one example", "in plain words"))
        messages.insert(0, {"role": "system", "content": f"You answer {style}."})
    elif shape < 0.25:
        messages[:0] = [
            {"role": "user", "content": f"Tell me one thing about {rng.choice(_TOPICS)}."},
            {"role": "assistant", "content": notes(rng, 1)},
        ]
    return messages


def text_prompt(*, seed: int, index: int) -> str:
    """The beginning of a text, to be continued."""
    rng = _rng("text", seed, index)
    opening = f"A short history of {rng.choice(_TOPICS)} and {rng.choice(_TOPICS)}\n\n"
    return opening + notes(rng, round(2 ** rng.uniform(0, 4.6)))


def copy_messages(*, seed: int, index: int) -> list[dict[str, str]]:
    """A passage to be repeated word for word: the output follows from the prompt's far end."""
    passage = notes(_rng("copy", seed, index), 4)
    return [{"role": "user", "content": f"Repeat the following text exactly, word for word:\n\n{passage}"}]


def token_prompt(*, seed: int, index: int, num_tokens: int, vocab_size: int) -> list[int]:
    """`num_tokens` ids drawn evenly from the vocabulary."""
    rng = _rng("tokens", seed, index)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]
