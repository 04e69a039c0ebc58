"""Find a checkpoint by its path or name: a local folder, the local Hugging Face cache, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkv.errors import InputError, quote
from qkv.files import os_error

# the files of a checkpoint; weights of other frameworks and images are not downloaded
_ALLOW_PATTERNS = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.txt", "*.model", "*.spm"]
_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve(name: str | Path) -> Path:
    """Return the folder of a path or of a name such as `google-bert/bert-base-uncased`; download it if necessary."""
    path = Path(name)
    with path_errors(path):
        if path.is_dir():
            return path
        if path.exists():
            raise InputError(f"{path}: is a file; give the model's folder")
        hint = "train a model first (qkv train RECIPE), or check the path"
        if not _REPO_ID.fullmatch(str(name)) or str(name).startswith("."):
            raise InputError(f"{quote(str(name), 200)[1:-1]}: no such folder; {hint}")
        return _find_cached(str(name)) or _download(str(name), hint)


@contextmanager
def path_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system, such as a folder that may not be read, into an InputError of one line."""
    try:
        yield
    except OSError as error:
        raise os_error(error.filename if isinstance(error.filename, str) else folder, error) from None


def _find_cached(name: str) -> Path | None:
    """Return the newest snapshot of a name in the local cache, or None."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    main = snapshots.parent / "refs" / "main"
    if main.is_file() and (snapshots / main.read_text().strip() / "config.json").exists():
        return snapshots / main.read_text().strip()
    complete = [folder for folder in snapshots.glob("*") if (folder / "config.json").exists()]
    return max(complete, key=lambda folder: folder.stat().st_mtime, default=None)


def _download(name: str, hint: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        missing_dependency = "and huggingface_hub, which could fetch it, is not installed (pip install 'qkv[hub]')"
        raise InputError(
            f"{name}: no such folder, not in the Hugging Face cache, {missing_dependency}; {hint}"
        ) from None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise InputError(f"{name}: no such folder, not in the Hugging Face cache, and HF_HUB_OFFLINE is set; {hint}")
    try:
        return Path(snapshot_download(name, allow_patterns=_ALLOW_PATTERNS))
    except Exception as error:  # the hub's client and its transport raise many types
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise InputError(
            f"{name}: no such folder, not in the Hugging Face cache, and the hub did not provide it ({reason}); {hint}"
        ) from None
