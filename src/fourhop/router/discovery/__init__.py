"""Which engines there are: one module for each way to be told, and what follows from it for the fleet."""
