"""One request over many engines: placement, hand-over, tickets. Knows token ids, never text or torch."""
