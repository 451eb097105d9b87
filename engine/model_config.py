"""What a model folder's config.json says, in the decoder's own terms.

Owns: reading the configs of the families below, and refusing whatever the decoder does not compute.
Refuses to know: tensors, torch, where folders come from. Invariants: a family is a row of data, never a
branch of the decoder; a setting that would change the numbers is computed or refused, never passed over.

|                     | llama     | qwen2        | qwen3        | gemma3_text                        |
|---------------------|-----------|--------------|--------------|------------------------------------|
| biases              | by config | q, k, v      | by config    | by config                          |
| norm of q and k     |           |              | each head    | each head                          |
| norms a layer       | 2         | 2            | 2            | 4: after attention and MLP too     |
| norm's factor       | weight    | weight       | weight       | 1 + weight, in fp32                |
| activation          | silu      | silu         | silu         | gelu (tanh)                        |
| scores scaled by    | D^-0.5    | D^-0.5       | D^-0.5       | query_pre_attn_scalar^-0.5         |
| layers see          | all       | all or last W| all or last W| five last W, one all, and so on    |
| rotary tables       | one       | one          | one          | one for either kind of layer       |
| embedding times     | 1         | 1            | 1            | E^0.5                              |
| final logits        |           |              |              | softcap by config                  |

Usage: `config = ModelConfig.load(folder)`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type fixes, whatever its config says."""

    activation_key: str = "hidden_act"
    qkv_bias: bool | None = None
    """Whether q, k and v have biases; None where the config's `attention_bias` says so."""
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    default_head_dim: int | None = None
    tied_by_default: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, default_head_dim=128),
    "gemma3_text": Family(
        activation_key="hidden_activation",
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        scales_embedding=True,
        default_head_dim=256,
        tied_by_default=True,
    ),
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class Rope:
    """How fast each pair of a head's dimensions turns with the position.

    `factor` divides the frequencies: all of them, or with `llama3` the low ones, between the bounds partly.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer does unlike its neighbours."""

    window: int | None
    """The row at position p attends to the positions > p - window; None: to all before it."""
    rope: int
    """Index into `ModelConfig.ropes`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, sizes in Hugging Face's terms, differences between families as data."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    layers: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...]
    activation: str
    attention_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool
    norm_offset: float
    """Added to the weight of every norm, in fp32."""
    embedding_scale: float | None
    """The embedding is multiplied by it, rounded to the weights' dtype."""
    final_softcap: float | None
    """Logits x become cap * tanh(x / cap)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json; ValueError on anything that is not computed here."""
        file = folder / "config.json"
        raw: dict[str, Any] = json.loads(file.read_text())
        family = FAMILIES.get(raw.get("model_type", ""))
        if family is None:
            known = ", ".join(FAMILIES)
            raise ValueError(
                f"expected model_type to be one of {known} in {file}, "
                f"got {str(raw.get('model_type'))[:100]!r}"
            )
        _refuse_uncomputed(raw, family, file)
        generation_file = folder / "generation_config.json"
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
        eos = generation.get("eos_token_id", raw.get("eos_token_id"))
        num_heads: int = raw["num_attention_heads"]
        head_dim: int = raw.get("head_dim") or family.default_head_dim or raw["hidden_size"] // num_heads
        attention_bias = bool(raw.get("attention_bias", False))
        windows = _windows(raw, file)
        ropes = {window is None: _rope(raw, FULL if window is None else SLIDING, file) for window in windows}
        distinct = list(dict.fromkeys(ropes.values()))
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            intermediate_size=raw["intermediate_size"],
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_model_len=raw["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied_by_default)),
            eos_token_ids=frozenset([] if eos is None else eos if isinstance(eos, list) else [eos]),
            layers=tuple(LayerKind(window, distinct.index(ropes[window is None])) for window in windows),
            ropes=tuple(distinct),
            activation=_activation(raw, family),
            attention_scale=_attention_scale(raw, head_dim),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sandwich_norms=family.sandwich_norms,
            norm_offset=family.norm_offset,
            embedding_scale=math.sqrt(raw["hidden_size"]) if family.scales_embedding else None,
            final_softcap=raw.get("final_logit_softcapping"),
        )


def _refuse_uncomputed(raw: dict[str, Any], family: Family, file: Path) -> None:
    for name in _REQUIRED:
        if not isinstance(raw.get(name), int):
            raise ValueError(f"expected an integer {name} in {file}, got {raw.get(name)!r}")
    if (activation := _activation(raw, family)) not in ACTIVATIONS:
        known = " or ".join(ACTIVATIONS)
        raise ValueError(f"expected {family.activation_key} {known} in {file}, got {activation!r}")
    absent = [
        # transformers 5.24 reads the first from Gemma 3's config and does not apply it.
        "attn_logit_softcapping",
        "use_bidirectional_attention",
        "quantization_config",
    ]
    if family.qkv_bias is not None:
        absent.append("attention_bias")
    if family is not FAMILIES["llama"]:
        absent.append("mlp_bias")
    for name in absent:
        if raw.get(name):
            raise ValueError(f"expected no {name} in {file}, got {raw[name]!r}: it is not computed here")


def _activation(raw: dict[str, Any], family: Family) -> str:
    default = "gelu_pytorch_tanh" if family.activation_key == "hidden_activation" else "silu"
    return str(raw.get(family.activation_key, default))


def _attention_scale(raw: dict[str, Any], head_dim: int) -> float:
    if raw["model_type"] == "gemma3_text":
        return float(raw.get("query_pre_attn_scalar", 256) ** -0.5)
    return float(head_dim**-0.5)


def _windows(raw: dict[str, Any], file: Path) -> list[int | None]:
    """Each layer's window, as `layer_types` names it or as the family's older keys do."""
    num_layers: int = raw["num_hidden_layers"]
    model_type: str = raw["model_type"]
    if model_type == "llama":
        return [None] * num_layers
    is_gemma = model_type == "gemma3_text"
    window = raw.get("sliding_window", 4096) if is_gemma or raw.get("use_sliding_window") else None
    types = raw.get("layer_types")
    if types is None and is_gemma:
        pattern = raw.get("sliding_window_pattern", 6)
        types = [SLIDING if (index + 1) % pattern else FULL for index in range(num_layers)]
    elif types is None:
        first = raw.get("max_window_layers", 28) if window is not None else num_layers
        types = [FULL if index < first else SLIDING for index in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise ValueError(
            f"expected {num_layers} layer_types of {FULL} or {SLIDING} in {file}, got {str(types)[:200]}"
        )
    if SLIDING in types and not (isinstance(window, int) and window > 0):
        raise ValueError(f"expected a positive sliding_window for {SLIDING} in {file}, got {window!r}")
    return [window if kind == SLIDING else None for kind in types]


def _rope(raw: dict[str, Any], kind: str, file: Path) -> Rope:
    """The rotary settings of layers of `kind`, in transformers 5's layout or in the older one."""
    is_gemma = raw["model_type"] == "gemma3_text"
    is_local = is_gemma and kind == SLIDING
    given: dict[str, Any] = raw.get("rope_parameters") or {}
    if FULL in given or SLIDING in given:
        given = given.get(kind) or {}
    elif given and is_gemma:
        raise ValueError(f"expected rope_parameters by layer type in {file}, got {str(given)[:200]}")
    elif not is_local:
        # Gemma's older configs scale the full layers only, and give the sliding ones a base of their own.
        given = given or raw.get("rope_scaling") or {}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3"):
        raise ValueError(f"expected rope type default, linear or llama3 in {file}, got {rope_type!r}")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"expected partial_rotary_factor 1.0 in {file}, got {partial!r}")
    otherwise = raw.get("rope_local_base_freq" if is_local else "rope_theta")
    theta = float(given.get("rope_theta") or otherwise or (1e6 if is_gemma and not is_local else 1e4))
    if rope_type == "default":
        return Rope(theta)
    if rope_type == "linear":
        return Rope(theta, rope_type, float(given["factor"]))
    return Rope(
        theta,
        rope_type,
        float(given["factor"]),
        float(given["low_freq_factor"]),
        float(given["high_freq_factor"]),
        int(given.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )
