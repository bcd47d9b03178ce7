"""Choose the next token: sampling, penalties, grammars."""
