"""Implement the endpoints of Ollama's and OpenAI's APIs, and their formats."""
