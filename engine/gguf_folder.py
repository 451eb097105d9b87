"""A GGUF file made into a folder as Hugging Face has them, which is what everything else reads.

Owns: the conversion, and where a user's own file's folder is kept. Refuses to know: quantisations and
architectures (gguf_weights.py), how a tokenizer works, torch. Invariants: a folder is made once for a file's
content, whole or not at all; what cannot be read is a ValueError that names the file.

Usage: `path = folder_of(Path("model-q8_0.gguf"))`.
"""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

from firstdiff.engine.model_cache import cache_dir, make_once, sha256_of

FOLDER_VERSION = 1
"""Part of a made folder's name: raise it when the conversion changes, so that old copies are not used."""
_UNREADABLE = (ValueError, LookupError, OverflowError, MemoryError, struct.error, EOFError)
"""What the reader raises on files that are cut, or whose numbers lie."""


def only_gguf_in(path: Path) -> Path | None:
    """The GGUF file that a folder without a config.json holds; None unless there is just one."""
    files = sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 and not (path / "config.json").exists() else None


def folder_of(gguf: Path) -> Path:
    """The file's folder in the user's cache, made at the first call; ValueError when that cannot be."""
    target = cache_dir() / "models" / f"gguf-{sha256_of([gguf])[:32]}.v{FOLDER_VERSION}"
    if not target.is_dir():
        logging.getLogger(__name__).warning("converting %s once, to %s", gguf.name, target)
        make_once(target, lambda folder, lock: convert(gguf, folder))
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer files and fp32 safetensors into `folder`; ValueError on an unreadable file."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    from firstdiff.engine.gguf_tokenizer import read_tokenizer_files
    from firstdiff.engine.gguf_weights import read_config, read_optional, read_weights

    try:
        reader = GGUFReader(gguf)
        if read_optional(reader, "split.count", 0) > 1:
            raise ValueError("one file of a split model: merge its files with `llama-gguf-split --merge`")
        files = read_tokenizer_files(reader)
        files["config.json"] = json.dumps(read_config(reader), indent=2) + "\n"
        weights = read_weights(reader)
    except _UNREADABLE as error:
        raise ValueError(f"expected a whole GGUF file of a known kind, got {gguf}: {error}") from error
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
