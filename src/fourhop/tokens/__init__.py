"""The one interface between tiers, tokens in and tokens out: its contract, and both ends of it over HTTP."""
