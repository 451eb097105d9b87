"""Tiny seeded Llamas of transformers, and a hand-fed engine decoder on the same weights.

The decoder is fed by hand, without a scheduler, so that a parity failure is the model's alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from firstdiff.engine.attention import AttentionBackend, KVCache
from firstdiff.engine.batch import build_batch
from firstdiff.engine.model import Decoder
from firstdiff.engine.model_config import ModelConfig
from firstdiff.engine.ops import Ops
from firstdiff.engine.sequence import ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.engine.weights import load_weights
from firstdiff.tracing.records import Sampling

BLOCK_SIZE = 4
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=8)


def make_reference(folder: Path, *, num_kv_heads: int = 2, tied: bool = True) -> LlamaForCausalLM:
    """A random two-layer Llama, saved to `folder`."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=[1, 2],
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def make_decoder(folder: Path, *, ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.load(folder)
    return Decoder(config, load_weights(folder, config, dtype=dtype, ops=ops), ops)


def make_cache(
    decoder: Decoder,
    *,
    num_blocks: int = 256,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
) -> KVCache:
    config = decoder.config
    return KVCache.allocate(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )


class HandFed:
    """Feeds chosen chunks of chosen sequences to a decoder; blocks are dealt in a scrambled order."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        num_blocks: int = 256,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._block_size = block_size
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
        self._free: list[int] = order.tolist()

    def sequence(self, token_ids: list[int]) -> Sequence:
        sequence = Sequence(
            request_id=str(id(token_ids)), prompt_token_ids=token_ids, sampling=GREEDY, arrived_ns=0
        )
        sequence.block_table = [self._free.pop() for _ in range(len(token_ids) // self._block_size + 8)]
        return sequence

    def step(self, chunks: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Compute the next `n` tokens of each (sequence, n), sampling from all: logits [len(chunks), V]."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1 or chunk[0].num_computed_tokens == 0)
        items = [ScheduledSequence(sequence, sequence.num_computed_tokens, n, True) for sequence, n in chunks]
        with torch.inference_mode():
            batch = build_batch(ScheduledBatch(0, items, 0, 0, 0), block_size=self._block_size)
            logits = self._decoder.logits(self._decoder.forward(batch, self._attention))
        for sequence, n in chunks:
            sequence.num_computed_tokens += n
        return logits


def reference_logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one unpadded prompt."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
