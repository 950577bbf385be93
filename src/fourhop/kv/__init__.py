"""Moving KV blocks between engines: bytes, block geometry and peers; no sequences, no scheduling, no text."""
