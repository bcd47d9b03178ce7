"""Use models from Python: `Model` loads one into this process. See docs/python.md."""

from moeinf.api.answers import Answer, AsyncStream, Stream
from moeinf.api.model import Model
from moeinf.runtime.requests import Message

__all__ = ["Answer", "AsyncStream", "Message", "Model", "Stream"]
