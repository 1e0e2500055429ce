"""`python -m ptpipe` is `ptpipe`."""

import signal


def main() -> None:
    """Run the command line; Ctrl-C while its modules are imported ends the process at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command line has handlers of its own
    from ptpipe import cli

    cli.main()


if __name__ == "__main__":
    main()
