"""Turn requests into tokens: prompts, the scheduler, conversations."""
