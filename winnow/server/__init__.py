"""The HTTP server: OpenAI's protocol in front of an engine that runs in a process of its own."""
