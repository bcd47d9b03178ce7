"""All cases: those of cases.py, and models in the store of Ollama."""

from __future__ import annotations

from tests.errors.cases import CASES, case
from tests.errors.provoking import Place

__all__ = ["CASES"]


@case("ollama_model_not_found")
def _(place: Place) -> list[str]:
    place.patch.setenv("OLLAMA_MODELS", str(place.folder / "none"))
    return ["pull", "ollama:qwen3"]


@case("bad_local_store")
def _(place: Place) -> list[str]:
    place.patch.setenv("OLLAMA_MODELS", str(place.folder))
    manifest = place.folder / "manifests/registry.ollama.ai/library/qwen3/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    return ["pull", "ollama:qwen3"]
