"""Entry point of ``sparge`` and ``python -m sparge``."""

import sys

CLI_PACKAGES = ("rich", "typer")


def main() -> None:
    """Run `sparge.cli.app`; if its packages are missing, print the install command and exit with 2."""
    try:
        for name in CLI_PACKAGES:
            __import__(name)
    except ImportError as error:
        from sparge.options.extras import install_command

        sys.stderr.write(f"sparge: error: the command needs rich and typer: {install_command('cli')} ({error})\n")
        sys.exit(2)
    from sparge.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
