"""OpenAI's Responses API: its requests, its output items and events, and the stored responses."""
