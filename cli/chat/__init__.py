"""`moeinf run`: the conversation at a terminal, with an engine of this process or a server."""
