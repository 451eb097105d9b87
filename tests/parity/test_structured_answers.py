"""Answers of a random model at a high temperature match what they were asked to match."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import regex
import tokenizers
from llguidance import LLTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest

from firstdiff.engine.model_store import resolve
from firstdiff.engine.tiny_model import TOKENIZER_FILE
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.records import EngineRequestRow, Sampling, Structure, TokenRow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "\U0001f600"]}, "maxItems": 3},
        "of": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "number", "maximum": 3}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORD = {"type": "string", "pattern": "^[a-c]{2,5}$"}
CHOICES = ["yes", "no", "yes, but", "\U0001f600!", 'a "quoted" \\ line\n']
REGEXES = [r"\d{2,4}-(x|yz)+", r"^[^\n]{0,8}$", r"(ab|é|\p{Lu}){1,6}", ""]

SCHEMAS = {"person": PERSON, "word": WORD, "dates": {"type": "string", "format": "date"}}
STRUCTURES = (
    [Structure(kind="json_schema", spec=json.dumps(schema)) for schema in SCHEMAS.values()]
    + [Structure(kind="regex", spec=spec) for spec in REGEXES]
    + [
        Structure(kind="choice", spec=json.dumps(CHOICES)),
        Structure(kind="json_object"),
        Structure(kind="grammar", spec='start: "(" start? ")" | /[xy]{1,3}/'),
    ]
)


def sampling(structure: Structure | None, seed: int, **changes) -> Sampling:
    defaults = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "max_tokens": 60}
    return Sampling(structure=structure, seed=seed, **(defaults | changes))


TOKENIZER = tokenizers.Tokenizer.from_file(str(TOKENIZER_FILE))


def text_of(rows: list[TokenRow]) -> str:
    text: str = TOKENIZER.decode([row.token_id for row in rows], skip_special_tokens=True)
    return text


def run(engine: EngineUnderTest, samplings: list[Sampling]) -> list[tuple[str, EngineRequestRow]]:
    outputs = engine.generate([[11, 12 + index % 7] for index in range(len(samplings))], samplings)
    return [(text_of(rows), row) for rows, row in zip(outputs, engine.finished, strict=True)]


@pytest.fixture(scope="module")
def engine() -> EngineUnderTest:
    """Few blocks, so that answers are preempted and made again in the middle of their structure."""
    return EngineUnderTest(
        model="tiny-random", block_size=4, num_blocks=24, max_model_len=96, max_num_batched_tokens=40
    )


def check_whole(structure: Structure, text: str) -> None:
    if structure.kind == "json_schema":
        jsonschema.validate(
            json.loads(text), json.loads(structure.spec), format_checker=jsonschema.FormatChecker()
        )
    elif structure.kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif structure.kind == "choice":
        assert text in json.loads(structure.spec)
    elif structure.kind == "regex":
        assert regex.fullmatch(structure.spec, text)
    else:
        assert re.fullmatch(r"\(*([xy]{1,3})?\)*", text)
        assert text.count("(") == text.count(")")


def check_beginning(structure: Structure, text: str) -> None:
    """`text` can be continued to a whole answer, as far as an independent reader can tell."""
    text = text.rstrip("\ufffd")
    if structure.kind == "choice":
        assert any(choice.startswith(text) for choice in json.loads(structure.spec))
    elif structure.kind == "regex":
        assert regex.fullmatch(structure.spec, text, partial=True)
    elif structure.kind.startswith("json"):
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads(text)
        # The reader stumbles over the end, or over the word, number or string that the end cut.
        rest = text[caught.value.pos :]
        assert re.fullmatch(r'|".*|[-+.\deE]*|\\?u?[\da-fA-F]*|t|tr|tru|f|fa|fal|fals|n|nu|nul', rest, re.S)
    else:
        assert re.fullmatch(r"\(*[xy]{0,3}\)*", text)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: f"{s.kind} {s.spec[:12]}")
def test_answers_match_their_structure(engine, structure):
    answers = run(engine, [sampling(structure, seed) for seed in range(20)])
    finished = [text for text, row in answers if row.finish_reason == "stop"]
    for text, row in answers:
        assert row.error is None
        if row.finish_reason == "stop":
            check_whole(structure, text)
        else:
            check_beginning(structure, text)
    if structure.kind != "json_object":
        assert len(finished) >= 10
    assert engine.engine.scheduler.pool.num_used_blocks == 0


def test_preemption_does_not_change_structured_answers(engine):
    roomy = EngineUnderTest(model="tiny-random", block_size=4, max_model_len=96)
    samplings = [sampling(structure, 5) for structure in STRUCTURES for _ in range(3)]
    tight = run(engine, samplings)
    assert sum(row.num_preemptions for _, row in tight) > 0
    assert [text for text, _ in tight] == [text for text, _ in run(roomy, samplings)]


@pytest.mark.parametrize(
    "structure",
    [
        Structure(kind="choice", spec='["<|im_end|>x", "<|im_start|>"]'),
        Structure(kind="regex", spec=r"<\|im_(end|start)\|>x?"),
        Structure(kind="json_schema", spec='{"const": {"<|im_end|>": "<|im_start|>"}}'),
        Structure(kind="grammar", spec='%llguidance {"no_forcing": false}\nstart: "(<|im_end|>x)"'),
    ],
    ids=lambda s: s.kind,
)
def test_the_text_of_a_special_token_is_text(engine, structure):
    answers = engine.generate([[11]] * 6, [sampling(structure, seed) for seed in range(6)])
    for rows, row in zip(answers, engine.finished, strict=True):
        assert (row.finish_reason, row.error) == ("stop", None)
        assert {0, 1, 2} & {token.token_id for token in rows[:-1]} == set()
        text = text_of(rows)
        assert "<|im_" in text
        if structure.kind != "grammar":
            check_whole(structure, text)


def test_structured_and_free_answers_share_a_batch(engine):
    structure = STRUCTURES[3]
    alone = [run(engine, [sampling(each, 3)])[0][0] for each in (structure, None)]
    together = run(engine, [sampling(structure, 3), sampling(None, 3)])
    # The prompts differ by place, so only the first is the same.
    assert together[0][0] == alone[0]
    check_whole(structure, together[0][0])


def test_what_eos_and_min_tokens_make_of_a_finished_structure(engine):
    """An ignored EOS, and one that comes before min_tokens, is followed by more of them."""
    yes = Structure(kind="choice", spec='["yes"]')
    [plain] = engine.generate([[11]], sampling(yes, 1))
    assert plain[-1].token_id in (0, 2)
    for changes, reason in (({"ignore_eos": True}, "length"), ({"min_tokens": 9}, "stop")):
        [rows] = engine.generate([[11]], sampling(yes, 1, max_tokens=12, **changes))
        assert text_of(rows) == "yes"
        assert len(rows) == (12 if reason == "length" else 9)
        assert engine.finished[0].finish_reason == reason


def test_a_structure_that_cannot_go_on_fails_its_request_alone(engine):
    # Known to the vocabulary of bytes that a server checks with, not to the model's.
    unknown = Structure(kind="grammar", spec='start: <|system|> "x"')
    answers = run(engine, [sampling(None, 1, max_tokens=6), sampling(unknown, 1), sampling(None, 2)])
    assert [row.finish_reason for _, row in answers][1] == "error"
    assert "grammar that can be enforced" in str(answers[1][1].error)
    assert all(row.error is None for _, row in (answers[0], answers[2]))
    banned = sampling(Structure(kind="choice", spec='["yes"]'), 1, logit_bias={0: -100.0, 2: -100.0})
    assert run(engine, [banned])[0][0] == "yes"


MODELS = [
    "tiny-random",
    pytest.param("smollm2-135m", marks=pytest.mark.model),
    pytest.param("gemma3-270m", marks=pytest.mark.model("gemma3-270m")),
]


@pytest.mark.parametrize("model", MODELS)
def test_the_matcher_reads_tokens_as_the_detokenizer_does(model):
    """Byte-level and SentencePiece alphabets; byte 255, in no UTF-8 text, is the library's own mark."""
    folder = resolve(model).path
    tokenizer = Tokenizer.load(folder)
    theirs = LLTokenizer(str(folder / "tokenizer.json"), eos_token=[1])
    some = np.random.default_rng(0).permutation(tokenizer.vocab_size)[:20_000].tolist()
    for token_id in (*range(300), *some):
        ours = tokenizer.token_bytes(token_id)
        if not tokenizer.is_special(token_id) and ours != b"\xff":
            assert theirs.decode_bytes([token_id]) == ours


@pytest.mark.model
def test_smollm2_fills_a_schema_in():
    engine = EngineUnderTest(model="smollm2-135m", max_model_len=256)
    tokenizer = Tokenizer.load(resolve("smollm2-135m").path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Who are you? Answer in JSON."}])
    structure = Structure(kind="json_schema", spec=json.dumps(PERSON))
    [rows] = engine.generate([prompt], sampling(structure, 0, temperature=0.0))
    assert engine.finished[0].finish_reason == "stop"
    text = tokenizer.decode([row.token_id for row in rows], skip_special_tokens=True)
    check_whole(structure, text)
