"""Text: requests to tokens, tokens to responses. Knows no blocks, no torch, not which engine serves."""
