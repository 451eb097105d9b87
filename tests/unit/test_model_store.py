"""Every way to name a model ends in a checked folder or in one line that says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from subprocess import run

import pytest

from firstdiff.engine.model_cache import cache_dir, sha256_of
from firstdiff.engine.model_store import ModelFolder, describe_folder, resolve
from firstdiff.engine.tiny_model import write_tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIRSTDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_tiny_model(path)
    return path


def digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("FIRSTDIFF_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/h/.cache/firstdiff")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path("/h/.cache/firstdiff")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/firstdiff")
    monkeypatch.setenv("FIRSTDIFF_CACHE", "/f")
    assert cache_dir() == Path("/f")


def test_tiny_random_is_the_same_every_time(cache: Path, folder: Path) -> None:
    tiny = resolve("tiny-random")
    assert tiny.path.parent == cache / "models"
    for file in folder.iterdir():
        assert file.read_bytes() == (tiny.path / file.name).read_bytes()
    assert resolve("tiny-random") == tiny
    # Weights on which recorded outputs may rest: the generator's stream must not drift.
    assert tiny.weights_sha256 == "d0325dc7a6adff16128f7059c0014966ff4f373df62344bfa3e1b7a24f5753b9"


def test_hashes_are_of_the_contents(cache: Path, folder: Path) -> None:
    (folder / "another.safetensors").write_bytes(b"second in no order but by name")
    described = resolve(str(folder))
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert described == ModelFolder(
        name=str(folder),
        path=folder,
        weights_sha256=digest(folder / "another.safetensors", folder / "model.safetensors"),
        config_sha256=digest(folder / "config.json"),
        tokenizer_sha256=digest(folder / "tokenizer.json"),
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest(),
    )
    (folder / "chat_template.jinja").write_text("{{ newer }}")
    assert resolve(str(folder)).chat_template_sha256 == hashlib.sha256(b"{{ newer }}").hexdigest()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    assert resolve(str(folder)).chat_template_sha256 is None
    (folder / "tokenizer_config.json").unlink()
    assert resolve(str(folder)).chat_template_sha256 is None


def test_a_sum_is_remembered_until_the_file_changes(cache: Path, folder: Path) -> None:
    weights = folder / "model.safetensors"
    first = sha256_of([weights])
    (sidecar,) = (cache / "sha256").iterdir()
    # Proof that it is not taken again: what is remembered is believed.
    sidecar.write_text(sidecar.read_text().replace(first, "f" * 64))
    assert sha256_of([weights]) == "f" * 64
    # Same size, later time.
    status = weights.stat()
    weights.write_bytes(bytes(status.st_size))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert sha256_of([weights]) == digest(weights)
    # Same size and time, another file.
    other = folder / "other"
    other.write_bytes(b"x" * status.st_size)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    other.rename(weights)
    assert sha256_of([weights]) == digest(weights)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"stamps": 3}', b"\xff\x00", b"[" * 100_000])
def test_a_damaged_sidecar_is_not_believed(cache: Path, folder: Path, content: bytes) -> None:
    weights = folder / "model.safetensors"
    sha256_of([weights])
    (sidecar,) = (cache / "sha256").iterdir()
    sidecar.write_bytes(content)
    assert sha256_of([weights]) == digest(weights)


def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path, folder: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert resolve(str(folder)).weights_sha256 == digest(folder / "model.safetensors")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_is_missing(cache: Path, folder: Path, file: str) -> None:
    (folder / file).unlink()
    name = "*.safetensors" if file.endswith("safetensors") else file
    with pytest.raises(ValueError, match="use a complete Hugging Face folder") as caught:
        resolve(str(folder))
    assert str(caught.value).startswith(f"expected {name} in {folder}, got none")
    with pytest.raises(ValueError, match="delete that folder and run `firstdiff model pull smollm2-135m`"):
        describe_folder("smollm2-135m", folder)
    with pytest.raises(ValueError, match="delete that folder, it is made again"):
        describe_folder("tiny-random", folder)


def test_a_missing_shard_is_named(cache: Path, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ValueError, match=r"expected model-2\.safetensors in "):
        resolve(str(folder))
    index.write_text("{")
    with pytest.raises(ValueError, match="expected a JSON object in "):
        resolve(str(folder))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"3"])
def test_a_damaged_tokenizer_config_is_refused(cache: Path, folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a JSON object in .*tokenizer_config.json"):
        resolve(str(folder))


def test_a_model_that_was_not_pulled(cache: Path) -> None:
    with pytest.raises(ValueError, match="got nothing: run `firstdiff model pull smollm2-135m`"):
        resolve("smollm2-135m")
    assert not cache.exists()


@pytest.mark.parametrize(
    "name", ["", "nope", "a/b/c", "./no-such", "../no-such", "~nobody-here/x", "a\x00b", "x" * 5000, "é/x"]
)
def test_names_that_are_nothing(cache: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match="expected --model to be one of gemma3-270m, smollm2-135m, tiny-random, an existing"
    ):
        resolve(name)


def test_a_file_is_not_a_folder(cache: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a model folder or a .gguf file, got the file .*: name"):
        resolve(str(folder / "config.json"))


HUB = """
import os, sys
from firstdiff.engine.model_store import resolve
try:
    print(resolve(sys.argv[1]).path)
except ValueError as error:
    print("ValueError", error)
"""


def resolve_with_hub(home: Path, cache: Path, name: str) -> str:
    """`resolve` in a process whose Hugging Face cache is `home` and whose hub cannot be reached."""
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment |= {"FIRSTDIFF_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = run(
        [sys.executable, "-c", HUB, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    return line


def test_a_hub_id_in_the_local_cache(tmp_path: Path, cache: Path) -> None:
    repository = tmp_path / "hf" / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    write_tiny_model(snapshot)
    assert resolve_with_hub(tmp_path / "hf", cache, "someone/tiny") == str(snapshot)
    # Part of a snapshot is not enough.
    (snapshot / "model.safetensors").unlink()
    assert "expected" in resolve_with_hub(tmp_path / "hf", cache, "someone/tiny")


def test_a_hub_id_without_a_network(tmp_path: Path, cache: Path) -> None:
    line = resolve_with_hub(tmp_path / "hf", cache, "someone/other")
    assert line.startswith(
        "ValueError expected someone/other in the local Hugging Face cache or from the hub, got: "
    )
    assert line.endswith("check the id and the network, or name a folder")
    line = resolve_with_hub(tmp_path / "hf", cache, "someone/" + "x" * 300)
    assert line.startswith("ValueError expected a Hugging Face id, got ")


def test_importing_the_store_is_quick() -> None:
    code = (
        "import sys; import firstdiff.engine.model_store; "
        "heavy = {'torch', 'transformers', 'gguf', 'numpy', 'huggingface_hub'} & sys.modules.keys(); "
        "assert not heavy, heavy"
    )
    run([sys.executable, "-c", code], check=True, timeout=60)
