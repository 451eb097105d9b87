"""Wires a model folder into a running engine.

Owns: the order of construction and the server's identity. Refuses to know: HTTP, processes.
Invariants: everything that decides what is computed is in the Identity; a bad setting or file is a
ValueError before any request is taken.

Usage: `engine, identity = build_engine(config, emit=rows.append, clock=SystemClock())`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import platform
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from firstdiff.engine.attention import KVCache
from firstdiff.engine.batch import build_batch
from firstdiff.engine.compute import Compute, choose_compute
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import Emit, LLMEngine
from firstdiff.engine.faults import check_faults, wrap_prepare, wrap_runner
from firstdiff.engine.model import Decoder
from firstdiff.engine.model_config import ModelConfig
from firstdiff.engine.model_store import ModelFolder, resolve
from firstdiff.engine.rng import RNG_SCHEME
from firstdiff.engine.runner import ModelRunner
from firstdiff.engine.structure import Structures
from firstdiff.engine.weights import load_weights
from firstdiff.tracing.clock import Clock
from firstdiff.tracing.records import Identity

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
KV_CACHE_BYTES_MAX = 2 << 30
"""Ceiling of the default cache size; one whole context and `--num-blocks` go beyond it."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How large the paged cache is."""

    num_blocks: int
    max_model_len: int


def build_engine(config: EngineConfig, *, emit: Emit, clock: Clock) -> tuple[LLMEngine, Identity]:
    """Load the model and return an idle engine; sets the thread counts as `choose_compute` does."""
    config.validate()
    check_faults(config.faults)
    compute = choose_compute(config, clock=clock)
    folder = resolve(config.model)
    model = ModelConfig.load(folder.path)
    shape = cache_shape(config, model)
    dtype = DTYPES[config.dtype]
    logging.getLogger(__name__).info("reading the weights of %s", folder.name)
    decoder = Decoder(model, load_weights(folder.path, model, dtype=dtype, ops=compute.ops), compute.ops)
    cache = KVCache.allocate(
        num_layers=model.num_layers,
        num_blocks=shape.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )
    attention = compute.make_attention(cache, decoder.attention_rules)
    prepare = partial(build_batch, block_size=config.block_size)
    runner = ModelRunner(
        decoder,
        attention,
        wrap_prepare(prepare, config.faults, num_blocks=shape.num_blocks),
        eos_token_ids=model.eos_token_ids,
        structures=Structures(
            folder.path / "tokenizer.json", vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        ),
    )
    engine = LLMEngine(
        config,
        runner=wrap_runner(runner, config.faults, clock),
        num_blocks=shape.num_blocks,
        max_model_len=shape.max_model_len,
        eos_token_ids=model.eos_token_ids,
        emit=emit,
        clock=clock,
    )
    return engine, describe(config, folder, decoder, shape, compute, type(attention).__name__)


def cache_shape(config: EngineConfig, model: ModelConfig) -> CacheShape:
    """The cache size and context length after defaults; ValueError when they do not fit the model."""
    max_model_len = config.max_model_len or model.max_model_len
    num_slots = config.num_blocks * config.block_size
    if num_slots and num_slots < max_model_len:
        # A context that no request can fill would only promise what is refused later.
        if config.max_model_len:
            raise ValueError(
                f"expected --num-blocks for one context of {max_model_len} tokens, got {config.num_blocks} "
                f"blocks of {config.block_size}: raise --num-blocks, or lower --max-model-len to {num_slots}"
            )
        max_model_len = num_slots
    if max_model_len > model.max_model_len:
        raise ValueError(
            f"expected --max-model-len of at most {model.max_model_len}, the model's context, "
            f"got {max_model_len}"
        )
    if config.num_blocks:
        return CacheShape(config.num_blocks, max_model_len)
    width = model.num_layers * model.num_kv_heads * model.head_dim * DTYPES[config.dtype].itemsize
    block_bytes = 2 * width * config.block_size
    blocks_a_sequence = -(-max_model_len // config.block_size)
    wanted = config.max_num_seqs * blocks_a_sequence
    # One whole context always fits, however small the ceiling.
    affordable = max(blocks_a_sequence, KV_CACHE_BYTES_MAX // block_bytes)
    return CacheShape(min(wanted, affordable), max_model_len)


def describe(
    config: EngineConfig,
    folder: ModelFolder,
    decoder: Decoder,
    shape: CacheShape,
    compute: Compute,
    attention_backend: str,
) -> Identity:
    """What this engine is, by hash; the engine settings are what came of them, not what was asked."""
    settings: dict[str, str | int | float | bool | None] = {
        "model": folder.name,
        "dtype": NAMES[decoder.dtype],
        "threads": compute.threads,
        "deterministic": compute.deterministic,
        "block_size": config.block_size,
        "num_blocks": shape.num_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_waiting": config.max_num_waiting,
        "max_model_len": shape.max_model_len,
        "enable_prefix_caching": config.enable_prefix_caching,
        "scheduling_policy": config.scheduling_policy,
        "logprobs_mode": config.logprobs_mode,
        "attention_backend": attention_backend,
    }
    return Identity(
        model=folder.name,
        engine="firstdiff",
        engine_version=importlib.metadata.version("firstdiff"),
        instance_id=uuid.uuid4().hex,
        weights_sha256=folder.weights_sha256,
        config_sha256=folder.config_sha256,
        tokenizer_sha256=folder.tokenizer_sha256,
        chat_template_sha256=folder.chat_template_sha256,
        engine_config_sha256=hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest(),
        engine_config=settings,
        dtype=NAMES[decoder.dtype],
        device="cpu",
        vocab_size=decoder.config.vocab_size,
        max_model_len=shape.max_model_len,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
        | {"python": platform.python_version()},
        faults=list(config.faults),
        eos_token_ids=sorted(decoder.config.eos_token_ids),
        rng_scheme=RNG_SCHEME,
    )
