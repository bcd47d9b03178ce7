"""Convert messages to token ids and back: tokenizers, chat templates, reasoning, tool calls."""
