"""Token ids, sequences, blocks and tensors. Knows no text and no other engine."""
