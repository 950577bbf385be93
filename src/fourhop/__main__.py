"""`python -m fourhop` is `fourhop`."""

from fourhop.cli import main

main()
