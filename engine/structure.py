"""Which tokens an answer of a given structure may go on with, by llguidance.

Owns: the bounds on a structure, its translation to a grammar, one matcher a sequence. Refuses to know: HTTP,
torch, logits, the scheduler. Invariants: a mask depends on the structure and the output so far only, so
preemption, recompute and rejected drafts cannot change it; a finished structure allows only EOS, and so does
everything after an EOS that the request ignores; special tokens other than EOS are never allowed, unless a
grammar names them or they are the tags of tool calls; text that may hold tool calls is free up to an opening
tag, by which the call's form is forced.

The dialects are llguidance's: JSON Schema (a keyword that it does not enforce is refused), Rust's regular
expressions without look-around, matched against the whole answer, and its variant of Lark.

Usage: `check_structure(structure)` where a request comes in, `structures.allowed(sequence, output)` a step.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from firstdiff.engine.sequence import Sequence
from firstdiff.tracing.records import Structure

SPEC_BYTES_MAX = 1 << 16
CHOICES_MAX = 1024
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"
"""Between the parts of JSON: bounded, because small models like to write blanks for ever."""
UNFORCED = '%llguidance {"no_forcing": true}'
"""Without this the library tokenizes what must come by itself, and reads special tokens in it: the text of
EOS in a choice would end the answer. It stands last, where it holds whatever a client's grammar says."""


class StructureError(ValueError):
    """A request's own structure cannot be enforced, or not gone on with: nothing is wrong with the engine."""


def check_structure(structure: Structure) -> None:
    """ValueError unless an answer can be held to the structure and can begin; bounded in time and memory.

    It is tried on a vocabulary of single bytes, which any tokenizer's text is made of. The check may take a
    tenth of a second and holds no lock meanwhile: a server runs it beside its loop.
    """
    _Matcher(structure, LLTokenizer("byte")).allowed([])


class Structures:
    """The matchers of one engine's sequences.

    The tokenizer is read at once: it takes a third of a second for 49,152 tokens and three seconds for
    262,144, which no step may wait for. One that cannot be read fails only the requests that need it.
    """

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = _read_tokenizer(tokenizer_file, vocab_size, eos_token_ids)
        self._matchers: weakref.WeakKeyDictionary[Sequence, _Matcher] = weakref.WeakKeyDictionary()

    def allowed(self, sequence: Sequence, output: list[int]) -> NDArray[np.bool_] | None:
        """Which tokens [V] may follow `output`; None where the request has no structure.

        ValueError when the structure cannot be enforced, or allows nothing after `output`.
        """
        structure = sequence.sampling.structure
        if structure is None:
            return None
        matcher = self._matchers.get(sequence)
        if matcher is None:
            if isinstance(self._tokenizer, StructureError):
                raise self._tokenizer
            matcher = self._matchers[sequence] = _Matcher(structure, self._tokenizer)
        return matcher.allowed(output)


def _read_tokenizer(
    file: Path, vocab_size: int, eos_token_ids: frozenset[int]
) -> LLTokenizer | StructureError:
    """The tokenizer, or why structured answers cannot be had from this model."""
    if not eos_token_ids:
        return StructureError("expected a model with an EOS token to end structured answers, got none")
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
    except Exception as error:  # noqa: BLE001 - the Rust reader raises bare Exception
        return StructureError(f"expected a tokenizer that structured answers work with, got: {error}")


class _Matcher:
    """One sequence's place in its grammar; follows whatever output it is asked about."""

    def __init__(self, structure: Structure, tokenizer: LLTokenizer) -> None:
        self._structure = structure
        self._vocab_size = tokenizer.vocab_size
        self._consumed: list[int] = []
        self._matcher = LLMatcher(tokenizer, _grammar(structure, tokenizer), log_level=0, limits=_limits())
        self._raise_error()

    def allowed(self, output: list[int]) -> NDArray[np.bool_]:
        if output[: len(self._consumed)] != self._consumed:
            self._matcher.reset()
            self._consumed = []
        for token_id in output[len(self._consumed) :]:
            # After its end there is nothing to follow, and the mask stays EOS.
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
                self._raise_error()
            self._consumed.append(token_id)
        words = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        # A matcher that gives up in the middle of a mask leaves one behind that ends the answer.
        self._raise_error()
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)
        if not allowed.any():
            raise StructureError(
                f"expected a token that the {self._structure.kind} allows, got none: dead end"
            )
        return allowed

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._structure, self._matcher.get_error())


def _grammar(structure: Structure, tokenizer: LLTokenizer) -> str:
    """The structure as llguidance's Lark; ValueError when it is out of bounds or not of its kind."""
    spec, kind = structure.spec, structure.kind
    try:
        num_bytes = len(spec.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"expected {kind} as Unicode text, got a lone surrogate: send UTF-8") from error
    if num_bytes > SPEC_BYTES_MAX:
        raise ValueError(f"expected {kind} of at most {SPEC_BYTES_MAX} bytes, got {num_bytes}: shorten it")
    if kind == "regex":
        wrapped = LLMatcher.grammar_from_regex(spec)
        lark = str(json.loads(wrapped)["grammars"][0]["lark_grammar"])
    elif kind == "grammar":
        lark = spec
    elif kind == "choice":
        lark = _choice_grammar(spec)
    elif kind == "tool_calls":
        lark = _calls_grammar(structure, tokenizer)
    else:
        schema = '{"type":"object"}' if kind == "json_object" else spec
        lark = f"start: {_json_rule(structure, schema)}"
    return f"{lark}\n{UNFORCED}"


def _json_rule(structure: Structure, schema: str) -> str:
    try:
        wrapped = LLMatcher.grammar_from_json_schema(
            schema, overrides={"lenient": False, "whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise _refusal(structure, str(error)) from error
    return f"%json {json.dumps(json.loads(wrapped)['grammars'][0]['json_schema'])}"


def _calls_grammar(structure: Structure, tokenizer: LLTokenizer) -> str:
    """Text, in which an opening tag must go on as a call: the lazy rule ends with the tag, so no text can."""
    spec = json.loads(structure.spec)
    call = _json_rule(structure, json.dumps(spec["call"]))
    lines = [
        "start: call* TEXT" if spec["most"] is None else "start: call | TEXT",
        f"call: open BLANKS {call} BLANKS close",
        "open: spelled" + _special_token(tokenizer, spec["open"], " | TEXT "),
        f"spelled[lazy]: TEXT {json.dumps(spec['open'])}",
        f"close: {json.dumps(spec['close'])}" + _special_token(tokenizer, spec["close"], " | "),
        f"BLANKS: /{WHITESPACE}/",
        r"TEXT: /(.|\n)*/",
    ]
    return "\n".join(lines)


def _special_token(tokenizer: LLTokenizer, text: str, before: str) -> str:
    """`before` and the special token of that text; nothing where the vocabulary has none."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    is_special = len(ids) == 1 and tokenizer.is_special_token(ids[0])
    return f"{before}<[{ids[0]}]>" if is_special else ""


def _choice_grammar(spec: str) -> str:
    try:
        choices = json.loads(spec)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("expected choice as a JSON array of strings, got something else")
    if not 1 <= len(choices) <= CHOICES_MAX:
        raise ValueError(f"expected 1 to {CHOICES_MAX} choices, got {len(choices)}")
    # Lark's strings are JSON's, but for this character, which JSON takes as it is.
    quoted = (json.dumps(choice).replace("\x7f", "\\u007f") for choice in choices)
    return "start: " + " | ".join(quoted)


def _limits() -> LLParserLimits:
    """Tighter than the library's own, so that a hostile grammar costs a tenth of a second, not several.

    A schema of 400 optional properties passes; lexer states take 1 to 2 kB each.
    """
    return LLParserLimits(
        max_grammar_size=10_000, step_max_items=10_000, max_lexer_states=10_000, verbose_errors=False
    )


def _refusal(structure: Structure, reason: str) -> ValueError:
    first = " ".join(reason.split())[:300]
    return StructureError(f"expected {structure.kind} that can be enforced, got: {first}")
