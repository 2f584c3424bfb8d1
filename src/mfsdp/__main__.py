"""``python -m mfsdp``: the command line."""

from .command.main import main

if __name__ == "__main__":
    raise SystemExit(main())
