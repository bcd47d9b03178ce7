"""Hold the conversation of `moeinf run` at a terminal, with a local engine or a server."""
