"""Find the version of moeinf, and of what it runs on."""

from __future__ import annotations

import importlib.metadata
import platform

from moeinf.native import attention_path, kernel_path

LIBRARIES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "huggingface_hub", "gguf")


def version() -> str:
    """Return the installed version, or "source" if the package is not installed."""
    return _installed("moeinf") or "source"


def arithmetic() -> str:
    """Return what the bits of results may depend on, beside the model and the version of moeinf."""
    return f"{kernel_path()}, attention {attention_path()}, torch {_installed('torch')}"


def surroundings() -> dict[str, str]:
    """Return the versions of Python, the system, the kernels and the libraries, by their names.

    A library that is not installed is left out. Nothing names the machine or its user.
    """
    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "kernels": f"{kernel_path()}, attention {attention_path()}",
    }
    versions = {name: _installed(name) for name in LIBRARIES}
    return found | {name: number for name, number in versions.items() if number}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
