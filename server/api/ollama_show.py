"""Describe a model in the form of Ollama's `/api/show`."""

from __future__ import annotations

from typing import Any

import msgspec

from moeinf.runtime.hub.aliases import licence_of
from moeinf.runtime.library.defaults import Defaults
from moeinf.runtime.library.library import Library, present
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.modelfile import modelfile_of, parameters_text
from moeinf.runtime.text.reasoning import thinks
from moeinf.runtime.text.tokenizer import chat_template
from moeinf.runtime.text.tool_calls import knows_tools


def shown(library: Library, wanted: str) -> dict[str, Any]:
    """Return the document of a model. Raises NoSuchModel."""
    m, folder = library.read(wanted)
    given = m.defaults or Defaults(str(m.model))
    with present(m.model, folder):
        template = chat_template(folder) or "" if given.template is None else given.template
    capabilities = {
        "completion": not m.encoder_layers,
        "tools": knows_tools(template),
        "thinking": thinks(template),
    }
    info = {
        "general.architecture": m.family,
        f"{m.family}.block_count": m.layers,
        f"{m.family}.expert_count": m.experts,
        f"{m.family}.expert_used_count": m.top_k,
        f"{m.family}.embedding_length": m.hidden_width,
        f"{m.family}.context_length": m.max_context,
        "moeinf.experts_bytes": m.slots.max_bytes,
        "moeinf.least_memory_bytes": m.slots.min_bytes,
    }
    licence = "\n".join(given.licences) or licence_of(m.source)
    return {
        "model": str(m.model),
        **({"license": licence} if licence else {}),
        **({"system": given.system} if given.system else {}),
        **({"messages": msgspec.to_builtins(given.messages)} if given.messages else {}),
        "modelfile": modelfile_of(m)[0],
        "parameters": parameters_text(given),
        "template": template,
        "details": details_of(m),
        "model_info": info,
        "capabilities": [name for name, there in capabilities.items() if there],
        "modified_at": m.created_at,
    }


def details_of(m: Manifest) -> dict[str, Any]:
    parameters = m.layers * m.experts * m.expert_layouts[0].weights
    return {
        "parent_model": "" if m.defaults is None else m.defaults.base,
        "format": "safetensors",
        "family": m.family,
        "families": [m.family],
        "parameter_size": f"{parameters / 1e9:.1f}B",
        "quantization_level": m.tag.upper(),
    }
