"""From a request to its tokens: prompts, the scheduler, conversations."""
