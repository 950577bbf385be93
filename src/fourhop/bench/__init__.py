"""Load for a server, and what came of it: `bench serve`, `bench sweep`, `bench compare`. Public endpoints only."""
