"""`python -m torrential` is the same as `torrential`."""

from torrential.cli import main

if __name__ == "__main__":
    main()
