"""``sparge`` and ``python -m sparge``: the command, or what to install for it."""

import sys

NEEDED = ("rich", "typer")


def main() -> None:
    """Run `sparge.cli.app`; without its packages exit with 2 and one line that says what to install."""
    try:
        for name in NEEDED:
            __import__(name)
    except ImportError as error:
        from sparge.options.extras import install_command

        sys.stderr.write(f"sparge: error: the command needs rich and typer: {install_command('cli')} ({error})\n")
        sys.exit(2)
    from sparge.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
