"""What crosses a process boundary: types, errors, moments and the SSE codec. No logic, no HTTP, no torch."""
