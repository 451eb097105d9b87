"""Gemma 3 270M as pulled: the model against transformers and llama.cpp, its tokenizer against both."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Gemma3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from engine_driver import EngineUnderTest, greedy, ids_of
from llamacpp import BLANKS, KINDS, WORDS, LlamaCpp, llamacpp_on, mixture, python_topics, texts_of
from tiny_families import make_attention
from tiny_llama import HandFed, make_decoder

from firstdiff.engine.attention_cpu import CpuAttention
from firstdiff.engine.model import Decoder
from firstdiff.engine.model_config import LayerKind
from firstdiff.engine.model_store import resolve
from firstdiff.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from firstdiff.engine.weights import load_weights

NAME = "gemma3-270m"
WINDOW = 512
pytestmark = pytest.mark.model(NAME)

TOLERANCE = 1e-4
"""Of a logit; they reach 32, and fp32 sums in another order differ by 3e-5 (measured)."""
NUM_TOKENS = 32
TEXTS_A_KIND = 300
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1. Tides rise twice a day because",
    "春の海、",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(NAME).path)


@pytest.fixture(scope="module")
def reference() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM.from_pretrained(resolve(NAME).path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder(resolve(NAME).path)


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[LlamaCpp]:
    with llamacpp_on(next(resolve(NAME).path.glob("*.gguf")), context=1024) as server:
        yield server


@pytest.fixture(scope="module")
def long_prompt(tokenizer: Tokenizer) -> list[int]:
    """700 tokens of prose: the sliding layers see neither its beginning nor each other's."""
    topic = next(topic for topic in python_topics() if len(topic) > 4000)
    return tokenizer.encode(topic)[:700]


def test_the_config_is_gemmas(decoder: Decoder) -> None:
    config = decoder.config
    assert [layer.window for layer in config.layers] == ([WINDOW] * 5 + [None]) * 3
    assert {(layer.window, config.ropes[layer.rope].theta) for layer in config.layers} == {
        (WINDOW, 1e4),
        (None, 1e6),
    }
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (256, 4, 1)
    assert config.eos_token_ids == {1, 106}


def test_greedy_ids_are_transformers_choices(
    reference: Gemma3ForCausalLM, tokenizer: Tokenizer, long_prompt: list[int]
) -> None:
    """Each of our tokens is what transformers chooses after those before it, as `generate` would."""
    prompts = [*map(tokenizer.encode, PROMPTS), long_prompt]
    engine = EngineUnderTest(
        model=NAME, dtype="fp32", max_num_batched_tokens=256, num_blocks=96, max_model_len=1024
    )
    answers = ids_of(engine.generate(prompts, greedy(NUM_TOKENS, ignore_eos=True)))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer[:-1]])
            logits = reference(ids, logits_to_keep=NUM_TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == answer
    assert len({answer[0] for answer in answers}) > 2


def feed(decoder: Decoder) -> HandFed:
    sizes = {"num_blocks": 64, "block_size": 16}
    return HandFed(decoder, make_attention(CpuAttention, decoder, **sizes), **sizes)


@pytest.mark.parametrize("chunks", [(300, 100, 200, 98, 1, 1), (511, 1, 1, 187)])
def test_logits_agree_past_the_window(
    reference: Gemma3ForCausalLM, decoder: Decoder, long_prompt: list[int], chunks: tuple[int, ...]
) -> None:
    fed = feed(decoder)
    with torch.inference_mode():
        # Only some rows go through the head: the logits of all would be 734 MB.
        expected = reference.model(torch.tensor([long_prompt])).last_hidden_state[0]
    sequence = fed.sequence(long_prompt)
    for chunk in chunks:
        logits = fed.step([(sequence, chunk)])[0]
        with torch.inference_mode():
            wanted = reference.lm_head(expected[sequence.num_computed_tokens - 1])
        assert (logits - wanted).abs().max() < TOLERANCE
    assert sequence.num_computed_tokens == len(long_prompt)


def llamacpp_top(llamacpp: LlamaCpp, prompt: list[int]) -> dict[int, float]:
    """Its 20 likeliest next tokens, the first one first: id -> log-probability."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 20, "temperature": 0, "cache_prompt": False}
    (first,) = llamacpp.post("/completion", body)["completion_probabilities"]
    return {token["id"]: token["logprob"] for token in first["top_logprobs"]}


def distance(decoder: Decoder, prompt: list[int], top: dict[int, float]) -> tuple[float, bool]:
    """Mean distance of the log-probabilities, in nats, and whether both would say the same token."""
    fed = feed(decoder)
    logprobs = fed.step([(fed.sequence(prompt), len(prompt))])[0].log_softmax(-1)
    distances = [abs(float(logprobs[token]) - logprob) for token, logprob in top.items()]
    return sum(distances) / len(distances), int(logprobs.argmax()) == next(iter(top))


def test_log_probabilities_are_llamacpps(
    decoder: Decoder, llamacpp: LlamaCpp, long_prompt: list[int]
) -> None:
    """Both read the file by themselves; llama.cpp rounds activations to 8 bits, which costs 0.1 nats here."""
    for prompt in (long_prompt[:20], long_prompt[:600]):
        top = llamacpp_top(llamacpp, prompt)
        mean, same = distance(decoder, prompt, top)
        assert mean < 0.2
        assert same
    # The measure sees a wrong model: no windows, or the rotary bases exchanged.
    config = decoder.config
    weights = load_weights(resolve(NAME).path, config, dtype=torch.float32)
    endless = replace(config, layers=tuple(LayerKind(None, layer.rope) for layer in config.layers))
    exchanged = replace(config, ropes=config.ropes[::-1])
    for wrong in (endless, exchanged):
        short = replace(wrong, max_model_len=1024)
        assert distance(Decoder(short, weights), prompt, top)[0] > 0.5


SPECIALS = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<table>", "</b>", "<unused5>", "<0x0A>"]
SPECIALS += ["[multimodal]", "<pa", "\n\n", "\t\t", "    ", "\u2581", "\u2581\u2581", "<start_of_image>"]
RUNS = ["a", "-", "=", "ab", "1", "あ", "xy", "ha", "_", " "]
GEMMA_KINDS = KINDS | {
    "special tokens": mixture(SPECIALS, BLANKS, WORDS),
    "runs": lambda rng: "".join(rng.choice(RUNS) * rng.randint(1, 40) for _ in range(rng.randint(1, 5))),
}


@pytest.mark.parametrize("kind", GEMMA_KINDS)
def test_ids_equal_llamacpp(kind: str, tokenizer: Tokenizer, llamacpp: LlamaCpp) -> None:
    texts = texts_of(kind, TEXTS_A_KIND, GEMMA_KINDS)
    encoded = [tokenizer.encode(text) for text in texts]
    pairs = zip(texts, encoded, map(llamacpp.tokenize, texts), strict=True)
    assert [(text, ours, theirs) for text, ours, theirs in pairs if ours != theirs] == []
    # U+2581 is the vocabulary's blank, and a literal "<0x0A>" its byte token: the two that do not come back.
    kept = [(text, ids) for text, ids in zip(texts, encoded, strict=True) if not {"\u2581", "<"} & {*text}]
    assert len(kept) > TEXTS_A_KIND // 20
    assert [text for text, ids in kept if tokenizer.decode(ids[1:]) != text] == []


def test_ids_and_text_equal_transformers(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(resolve(NAME).path)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (len(theirs), theirs.bos_token_id)
    for kind in ("everything", "bytes", "special tokens"):
        for text in texts_of(kind, 50, GEMMA_KINDS):
            ids = tokenizer.encode(text)
            assert ids == theirs.encode(text)
            assert tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert theirs.chat_template is None
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("skip", [False, True])
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, skip: bool) -> None:
    for text in texts_of("random unicode", 200, GEMMA_KINDS) + texts_of("special tokens", 200, GEMMA_KINDS):
        ids = tokenizer.encode(text)
        stream = IncrementalDetokenizer(tokenizer, ids[:1], skip_special_tokens=skip)
        deltas = [stream.push(token_id) for token_id in ids[1:]] + [stream.finish()]
        assert "".join(deltas) == tokenizer.decode(ids[1:], skip_special_tokens=skip)
    # Whole characters only, also of bytes in any order.
    rng = random.Random(4)
    for _ in range(200):
        ids = [238 + byte for byte in rng.randbytes(12)]
        stream = IncrementalDetokenizer(tokenizer, [2], skip_special_tokens=skip)
        deltas = [stream.push(token_id) for token_id in ids] + [stream.finish()]
        data = b"".join(map(tokenizer.token_bytes, ids))
        assert "".join(deltas) == data.decode("utf-8", "replace")
