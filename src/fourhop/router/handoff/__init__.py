"""How KV changes hands, one module for each protocol that engines have; see `protocol.Handoff`."""
