"""The program: `fourhop`, and `python -m fourhop`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends the process without a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fourhop import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
