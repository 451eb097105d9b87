"""Structures are checked before they reach the engine, quickly, however hostile; masks follow the output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from firstdiff.engine.sequence import Sequence
from firstdiff.engine.structure import CHOICES_MAX, SPEC_BYTES_MAX, Structures, check_structure
from firstdiff.engine.tiny_model import TOKENIZER_FILE, VOCAB_SIZE
from firstdiff.tracing.records import Sampling, Structure, StructureKind

CHECK_S_MAX = 5.0
"""Far beyond what any check takes, even on a loaded machine; without bounds some would take minutes."""


def schema(content: object) -> Structure:
    return Structure(kind="json_schema", spec=json.dumps(content))


def nullable_rules(count: int) -> str:
    rules = [f'a{i}: "x"? | a{i} a{(i + 1) % count}' for i in range(count)]
    return "\n".join([f"start: {' '.join(f'a{i}' for i in range(count))}", *rules])


GOOD = [
    Structure(kind="json_object"),
    schema({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(400)}}),
    schema({"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    Structure(kind="regex", spec=r"^\d{3}-[a-z]+$"),
    Structure(kind="regex", spec=r"(a|b)*a(a|b){25}"),
    Structure(kind="choice", spec=json.dumps(["yes", "no", '"\n\\/', "é", "\U0001f600", "\x7f"])),
    Structure(kind="choice", spec=json.dumps([str(i) for i in range(CHOICES_MAX)])),
    Structure(kind="grammar", spec='start: "(" start ")" | "x"'),
]

BAD: list[tuple[Structure, str]] = [
    (schema({"type": "string", "not": {"const": "x"}}), "Unimplemented keys"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
    (schema({"type": "string", "pattern": "(?=a)"}), "look-around"),
    (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
    (schema({"$ref": "http://127.0.0.1:9/schema.json"}), "not present in a registry"),
    (schema({"$ref": "file:///etc/hostname"}), "not present in a registry"),
    (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "enforced"),
    (schema([]), "json_schema that can be enforced"),
    (Structure(kind="json_schema", spec="{"), "json_schema that can be enforced"),
    (Structure(kind="json_schema", spec='{"items":' * 5000 + "{}" + "}" * 5000), "recursion limit"),
    (schema({"properties": {f"k{i}": {} for i in range(3000)}}), "too big"),
    (Structure(kind="regex", spec="(a"), "unclosed group"),
    (Structure(kind="regex", spec=r"\bword\b"), "lookarounds not supported"),
    (Structure(kind="regex", spec="(" * 30000), "regex that can be enforced"),
    (Structure(kind="regex", spec="a" * (SPEC_BYTES_MAX + 1)), f"at most {SPEC_BYTES_MAX} bytes"),
    (Structure(kind="regex", spec="\ud800"), "lone surrogate"),
    (Structure(kind="choice", spec="[]"), f"1 to {CHOICES_MAX} choices, got 0"),
    (Structure(kind="choice", spec=json.dumps(["x"] * (CHOICES_MAX + 1))), f"got {CHOICES_MAX + 1}"),
    (Structure(kind="choice", spec='["a", 3]'), "array of strings"),
    (Structure(kind="choice", spec='"a"'), "array of strings"),
    (Structure(kind="choice", spec="[" * 60000), "array of strings"),
    (Structure(kind="choice", spec=r'["\ud800"]'), "choice that can be enforced"),
    (Structure(kind="grammar", spec="start: start"), "grammar that can be enforced"),
    (Structure(kind="grammar", spec="no rules"), "grammar that can be enforced"),
]


@pytest.mark.parametrize("structure", GOOD, ids=lambda s: f"{s.kind} {s.spec[:20]}")
def test_what_can_be_enforced_passes(structure):
    check_structure(structure)


@pytest.mark.parametrize(("structure", "why"), BAD, ids=lambda x: getattr(x, "spec", str(x))[:20])
def test_what_cannot_be_enforced_is_refused_in_bounded_time(structure, why):
    started_s = time.process_time()
    with pytest.raises(ValueError, match=f"(?i){why}"):
        check_structure(structure)
    assert time.process_time() - started_s < CHECK_S_MAX


@pytest.mark.parametrize(
    "structure",
    [
        Structure(kind="regex", spec=r"(a?){3000}a{3000}"),
        Structure(kind="regex", spec=r"(((a{1,100}){1,100}){1,100}){1,100}"),
        Structure(kind="grammar", spec=nullable_rules(400)),
        Structure(kind="grammar", spec='start: s\ns: s s | "a" | ""'),
    ],
    ids=lambda s: s.spec[:20],
)
def test_what_explodes_on_the_way_gives_up_in_bounded_time(structure):
    """Each either goes on for all of the answer or says that it cannot."""
    masks, one = structures(), sequence(structure.kind, structure.spec)
    letter, output, gave_up = ids_of("a")[0], [], None
    started_s = time.process_time()
    for _ in range(40):
        try:
            mask = masks.allowed(one, output)
        except ValueError as error:
            gave_up = str(error)
            break
        assert mask is not None
        output.append(letter if mask[letter] else int(np.flatnonzero(mask)[-1]))
    assert gave_up is None or "that can be enforced, got" in gave_up
    assert time.process_time() - started_s < CHECK_S_MAX


def structures(**changes) -> Structures:
    settings = {"vocab_size": VOCAB_SIZE + 10, "eos_token_ids": frozenset({0, 2})} | changes
    return Structures(TOKENIZER_FILE, **settings)


def sequence(kind: StructureKind, spec: str = "") -> Sequence:
    sampling = Sampling(
        temperature=0, top_k=0, top_p=1, seed=0, max_tokens=9, structure=Structure(kind=kind, spec=spec)
    )
    return Sequence(request_id="r", prompt_token_ids=[5], sampling=sampling, arrived_ns=0)


def ids_of(text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(TOKENIZER_FILE)).encode(text, add_special_tokens=False).ids
    return ids


def allowed_ids(mask) -> list[int]:
    assert mask is not None
    assert mask.dtype == np.bool_
    assert len(mask) == VOCAB_SIZE + 10
    return np.flatnonzero(mask).tolist()


def test_a_finished_structure_allows_eos_only_and_so_does_what_follows():
    masks, one = structures(), sequence("choice", '["yes"]')
    yes = ids_of("yes")
    assert 2 not in allowed_ids(masks.allowed(one, []))
    assert allowed_ids(masks.allowed(one, yes)) == [0, 2]
    assert allowed_ids(masks.allowed(one, [*yes, 2])) == [0, 2]
    assert allowed_ids(masks.allowed(one, [*yes, 2, 0])) == [0, 2]


def test_eos_is_one_choice_where_the_answer_may_end_or_go_on():
    masks, one = structures(), sequence("regex", "ab?")
    allowed = allowed_ids(masks.allowed(one, ids_of("a")))
    assert {0, 2, *ids_of("b")} == set(allowed)


def test_a_mask_depends_on_the_output_alone():
    """Outputs that grow, shrink (a draft was rejected, a step was lost) and turn aside."""
    masks, one = structures(), sequence("regex", "(abc|abd|xyz)*")
    outputs = [[], ids_of("a"), ids_of("abcx"), ids_of("abc"), ids_of("abdxyz"), [], ids_of("xy")]
    for output in outputs:
        fresh = structures().allowed(sequence("regex", "(abc|abd|xyz)*"), output)
        assert allowed_ids(masks.allowed(one, output)) == allowed_ids(fresh)


CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["f"]}, "arguments": {"type": "object", "maxProperties": 0}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def calls(most: int | None = None) -> str:
    return json.dumps({"open": "<tool_call>", "close": "</tool_call>", "call": CALL, "most": most})


def texts_after(masks: Structures, spec: str, text: str) -> set[str]:
    """Which of the bytes of ASCII, and "EOS", may follow `text`."""
    mask = masks.allowed(sequence("tool_calls", spec), ids_of(text))
    assert mask is not None
    allowed = {chr(code) for code in range(33, 127) if mask[ids_of(chr(code))[0]]}
    return allowed | ({"EOS"} if mask[2] else set())


def test_text_is_free_until_a_call_begins_which_is_then_forced():
    masks, any_text = structures(), {chr(code) for code in range(33, 127)} | {"EOS"}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text in ("", "a < b, <tool_cal", call, f"so: {call}\nand", f"{call}{call} <tool"):
        assert texts_after(masks, calls(), text) == any_text, text
    for text, follows in (
        ("<tool_call>", "{"),
        ("so <tool_call>\n{", '"'),
        (f'{call}<tool_call>{{"name": "', "f"),
        ('<tool_call>{"name": "f", "arguments": {', "}"),
        ('<tool_call>{"name": "f", "arguments": {}}', "<"),
    ):
        assert texts_after(masks, calls(), text) == {follows}, text
    assert texts_after(masks, calls(most=1), f"so {call}") == {"EOS"}
    assert texts_after(masks, calls(most=1), "so") == any_text


def test_tags_that_are_special_tokens_begin_and_end_calls_too(tmp_path: Path):
    file = json.loads(TOKENIZER_FILE.read_text())
    for index, tag in enumerate(("<tool_call>", "</tool_call>")):
        file["added_tokens"].append(file["added_tokens"][0] | {"id": VOCAB_SIZE + index, "content": tag})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    masks = Structures(
        tmp_path / "tokenizer.json", vocab_size=VOCAB_SIZE + 2, eos_token_ids=frozenset({0, 2})
    )
    one = sequence("tool_calls", calls())
    begin, end = VOCAB_SIZE, VOCAB_SIZE + 1

    def allowed(output: list[int]) -> list[int]:
        mask = masks.allowed(one, output)
        assert mask is not None
        return np.flatnonzero(mask).tolist()

    assert {begin, *ids_of("a")} <= set(allowed([]))
    body = ids_of('{"name": "f", "arguments": {}}')
    assert not {begin, end, *ids_of("a")} & set(allowed([begin]))
    assert end in allowed([begin, *body])
    assert {begin, 2} <= set(allowed([begin, *body, end]))
    assert not {begin, end, *ids_of("a")} & set(allowed(ids_of("<tool_call>")))


def test_output_outside_of_the_structure_is_an_error():
    with pytest.raises(ValueError, match="regex that can be enforced"):
        structures().allowed(sequence("regex", "abc"), ids_of("x"))


def test_a_sequence_without_structure_has_no_mask():
    plain = Sequence(
        request_id="r",
        prompt_token_ids=[5],
        sampling=Sampling(temperature=0, top_k=0, top_p=1, seed=0, max_tokens=9),
        arrived_ns=0,
    )
    assert structures().allowed(plain, [3]) is None


def test_matchers_end_with_their_sequences():
    masks = structures()
    for _ in range(3):
        masks.allowed(sequence("json_object"), [])
    assert len(masks._matchers) == 0


def test_models_and_tokenizers_that_cannot_do_it_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="a model with an EOS token"):
        structures(eos_token_ids=frozenset()).allowed(sequence("json_object"), [])
    (tmp_path / "tokenizer.json").write_text("{}")
    bad = Structures(tmp_path / "tokenizer.json", vocab_size=9, eos_token_ids=frozenset({0}))
    with pytest.raises(ValueError, match="expected a tokenizer"):
        bad.allowed(sequence("json_object"), [])


def test_the_check_needs_no_torch():
    code = (
        "import sys; from firstdiff.engine.structure import check_structure; "
        "from firstdiff.tracing.records import Structure; check_structure(Structure(kind='json_object')); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
