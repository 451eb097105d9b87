"""The bundled inference engine: scheduler, paged KV cache, model, OpenAI-compatible server."""
