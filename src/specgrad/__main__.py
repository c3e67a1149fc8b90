"""``python -m specgrad``: the command line."""

from specgrad.cli import main

if __name__ == "__main__":
    main()
