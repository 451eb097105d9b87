"""`tiny-random`: a two-layer Llama with seeded random weights on a real byte-level tokenizer.

Owns: its shape, its seed, how its tokenizer was trained. Refuses to know: where it is kept, torch.
Invariants: the same bytes are written every time; greedy output depends on the whole prompt.

Usage: `write_tiny_model(folder)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

SEED = 20
VOCAB_SIZE = 2048
HIDDEN_SIZE = 64
INNER_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
MAX_CONTEXT = 512
TOKENIZER_FILE = Path(__file__).with_name("data") / "tiny_tokenizer.json"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(folder: Path) -> None:
    """Fill `folder` with a complete Hugging Face model of about 0.9 MB."""
    from safetensors.numpy import save_file

    (folder / "tokenizer.json").write_bytes(TOKENIZER_FILE.read_bytes())
    end_of_text, start, end = range(len(SPECIAL_TOKENS))
    generation = {"bos_token_id": start, "eos_token_id": [end, end_of_text], "pad_token_id": end}
    contents: dict[str, dict[str, object]] = {
        "config.json": _config() | {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end},
        "generation_config.json": dict(generation),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[start],
            "eos_token": SPECIAL_TOKENS[end],
            "pad_token": SPECIAL_TOKENS[end],
            "unk_token": SPECIAL_TOKENS[end_of_text],
            "model_max_length": MAX_CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(random_weights(), folder / "model.safetensors", metadata={"format": "pt"})


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INNER_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def random_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Seeded normal weights in fp32 by Hugging Face's names.

    Each matrix is scaled by its fan-in and a gain. The gains are large: with the usual 0.02 the residual
    stream would stay the last token's own embedding, and a tied head would repeat that token for ever.
    """
    rng = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int, gain: float) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float64] = rng.standard_normal((rows, columns)) * (gain / columns**0.5)
        return values.astype(np.float32)

    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)
    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN_SIZE, 3.0), "model.norm.weight": ones}
    kv_size = NUM_KV_HEADS * HEAD_DIM
    for index in range(NUM_LAYERS):
        layer = {
            "input_layernorm": ones,
            "self_attn.q_proj": matrix(HIDDEN_SIZE, HIDDEN_SIZE, 2.0),
            "self_attn.k_proj": matrix(kv_size, HIDDEN_SIZE, 2.0),
            "self_attn.v_proj": matrix(kv_size, HIDDEN_SIZE, 2.0),
            "self_attn.o_proj": matrix(HIDDEN_SIZE, HIDDEN_SIZE, 2.0),
            "post_attention_layernorm": ones,
            "mlp.gate_proj": matrix(INNER_SIZE, HIDDEN_SIZE, 2.0),
            "mlp.up_proj": matrix(INNER_SIZE, HIDDEN_SIZE, 2.0),
            "mlp.down_proj": matrix(HIDDEN_SIZE, INNER_SIZE, 2.0),
        }
        weights |= {f"model.layers.{index}.{name}.weight": values for name, values in layer.items()}
    return weights


def train_tiny_tokenizer(texts: Iterable[str]) -> str:
    """The JSON of a byte-level BPE of VOCAB_SIZE tokens, ChatML's special tokens first.

    `data/tiny_tokenizer.json` is `train_tiny_tokenizer(python_topics())` of CPython 3.11, kept so that
    every Python serves the same ids.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    from firstdiff.engine.gguf_tokenizer import byte_level_bpe

    tokenizer = byte_level_bpe({}, [])
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str(pretty=False)
    return text


def python_topics() -> Iterator[str]:
    """The texts behind Python's `help("topics")`, in name order."""
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))
